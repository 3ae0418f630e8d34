"""Optimizer steps of a run without its training loop: read all global batches, then run `train_step` on each.

PYTHON -m benchmarks.measuring.bare_steps LOG STEPS TRAINER_FLAG...     appends to LOG a line of JSON for each step
"""

import json
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

from konkanivani.base.flags import parse_args
from konkanivani.recipe.build import build_run
from konkanivani.recipe.startup import resolve_start
from konkanivani.training.loop import freeze_gc
from konkanivani.training.step import train_step


def main(log: Path, steps: int, flags: list[str]) -> None:
    """Run `steps` optimizer steps of the run with these training flags."""
    run = build_run(resolve_start(parse_args(flags)))
    with closing(run.data.global_batches.from_cursor(run.state.cursor)) as stream:
        global_batches = [global_batch for global_batch, _ in islice(stream, steps)]
    with freeze_gc():  # as in the training loop, which keeps garbage collection out of the steps
        for step, global_batch in enumerate(global_batches):
            train_step(run.step, global_batch, step)
            # The records that TurnTaker counts.
            with log.open("a", encoding="utf-8") as lines:
                print(json.dumps({"kind": "step", "audio_seconds": global_batch.audio_seconds}), file=lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
