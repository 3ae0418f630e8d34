#!/usr/bin/env python3
"""Trains a speech recogniser; goes on exactly where it stopped with --resume.

    python3 training_scripts/train_konkanivani_asr.py --train_manifest train.jsonl --valid_manifest valid.jsonl \
        --batch_size 2 --gradient_accumulation_steps 4 --mixed_precision --device cuda --resume auto
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys

from konkanivani.command_line import end_script, run_script
from konkanivani.flags import parse_flags


def main(arguments: list[str]) -> str:
    """Trains, and scores the test manifest if there is one; one line of JSON."""
    parse_flags(arguments)  # usage errors do not wait for torch
    from konkanivani.reporting import train_and_report

    return train_and_report(arguments)


if __name__ == "__main__":
    end_script(run_script(lambda: main(sys.argv[1:])))
