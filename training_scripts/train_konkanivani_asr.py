#!/usr/bin/env python3
"""Trains a speech recogniser; goes on exactly where it stopped with --resume.

    python3 training_scripts/train_konkanivani_asr.py --train_manifest train.jsonl --valid_manifest valid.jsonl \
        --batch_size 2 --gradient_accumulation_steps 4 --mixed_precision --device cuda --resume auto
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys

from konkanivani.errors import KonkaniVaniError
from konkanivani.flags import parse_flags


def main(arguments: list[str]) -> int:
    """Trains, scores the test manifest if there is one, and prints one JSON line; returns the exit code."""
    try:
        parse_flags(arguments)  # usage errors do not wait for torch
        from konkanivani.reporting import train_and_report

        print(train_and_report(arguments), flush=True)
    except KonkaniVaniError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
