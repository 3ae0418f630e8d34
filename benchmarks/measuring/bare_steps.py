"""The steps of a run without what surrounds them: its windows read beforehand, then `train_step` on each.

PYTHON -m benchmarks.measuring.bare_steps SKIPPED STEPS TRAINER_FLAG...     prints seconds and audio seconds
"""

import json
import sys
import time
from contextlib import closing
from itertools import islice

from konkanivani.recipe import build_run
from konkanivani.start import resolve_start
from konkanivani.training.loop import no_collection_of_what_stays
from konkanivani.training.step import train_step


def main(skipped: int, steps: int, flags: list[str]) -> str:
    """Times `steps` steps after `skipped` others; a line of JSON."""
    run = build_run(resolve_start(flags))
    with closing(run.windows.from_cursor(run.state.cursor)) as stream:
        windows = [window for window, _ in islice(stream, skipped + steps)]
    audio = started = 0.0
    with no_collection_of_what_stays():  # as in training
        for step, window in enumerate(windows):
            if step == skipped:
                started = time.perf_counter()
            train_step(run.step, window, step)
            audio += window.audio_seconds if step >= skipped else 0.0
        seconds = time.perf_counter() - started
    return json.dumps({"seconds": seconds, "audio_seconds": audio})


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
