#!/usr/bin/env python3
"""Trains a speech recogniser; goes on exactly where it stopped with --resume.

    python3 training_scripts/train_konkanivani_asr.py --train_manifest train.jsonl --valid_manifest valid.jsonl \
        --batch_size 2 --gradient_accumulation_steps 4 --mixed_precision --device cuda --resume auto

    torchrun --nproc_per_node 2 training_scripts/train_konkanivani_asr.py --train_manifest train.jsonl …

trains in two processes as in one, on two cards where there are (docs/scaling.md). With --dry_run the same command line
is tried in a minute, to the saving and resuming, and nothing stays behind.
Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 resources, 129 a closed terminal, 130 Ctrl-C,
143 SIGTERM.
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys

from konkanivani.base.command_line import end_script, print_on_local_rank0, run_script
from konkanivani.base.flags import parse_args


def main(arguments: list[str]) -> str:
    """Trains, and scores the test manifest if there is one; one line of JSON."""
    with print_on_local_rank0():
        asked = parse_args(arguments)  # usage errors do not wait for torch
    if asked.config.run.dry_run:
        from konkanivani.recipe.dry_run import dry_run

        with print_on_local_rank0():
            return dry_run(asked)
    from konkanivani.recipe.train import train_and_report

    return train_and_report(asked)


if __name__ == "__main__":
    end_script(run_script(lambda: main(sys.argv[1:])))
