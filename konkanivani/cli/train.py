"""Train a speech recognition model; --resume continues a run exactly where it stopped.

    konkanivani train \\
        --train_manifest train.jsonl --valid_manifest valid.jsonl \\
        --preset minimal --resume auto

Train on two GPUs (docs/scaling.md):

    torchrun --nproc_per_node 2 training_scripts/train_konkanivani_asr.py \\
        --train_manifest train.jsonl --valid_manifest valid.jsonl

With --dry_run the same command tests data, memory plan, two steps, saving and resuming in a minute and leaves no files.

Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 resources, 129 terminal closed, 130 Ctrl-C,
143 SIGTERM.
"""

from konkanivani.command_line import print_on_local_rank0
from konkanivani.config import TrainConfig
from konkanivani.flags import parse_args

Flags = TrainConfig


def main(arguments: list[str]) -> str:
    """Train, then score the test manifest if there is one; return the result as one line of JSON."""
    with print_on_local_rank0():
        command_line = parse_args(arguments, description=__doc__)  # usage errors do not wait for torch
    if command_line.config.run.dry_run:
        from konkanivani.recipe.dry_run import dry_run

        with print_on_local_rank0():
            return dry_run(command_line)
    from konkanivani.recipe.train import train_and_report

    return train_and_report(command_line)
