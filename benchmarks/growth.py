#!/usr/bin/env python3
"""Compare how time and memory of a step grow with utterance duration, batch size and model width in several toolkits.

    python3 benchmarks/growth.py --plot docs/growth.png

Each step has one micro-batch of equal utterances. Each toolkit runs in its own process; their steps alternate. A
toolkit that runs out of memory has no value there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
from dataclasses import dataclass
from typing import Literal, get_args

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError

Toolkit = Literal["konkanivani", "speechbrain", "espnet"]


@dataclass(frozen=True)
class Flags:
    """Flags of this script; one quantity is varied at a time."""

    seconds: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 60.0)
    """Durations of one utterance at width 256."""
    utterances: tuple[int, ...] = (1, 4, 16, 64)
    """Utterances of 3 s at once at width 256."""
    widths: tuple[int, ...] = (128, 256, 512)
    """Widths of the model, with 4 utterances of 6 s at once."""
    contestants: tuple[Toolkit, ...] = get_args(Toolkit)
    """Toolkits to compare."""
    rounds: int = 3
    """Steps of each after a warm-up; the median counts."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    mixed_precision: bool = False
    """fp16 with loss scaling on CUDA, bf16 on a CPU."""
    folder: str = "~/.cache/konkanivani/peers"
    """Folder for the environment of the other toolkits."""
    plot: str | None = None
    """Draw the tables into this PNG file."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def measure(flags: Flags) -> str:
    """Measure every case; return the report."""
    if flags.rounds < 1 or min((*flags.seconds, 0.5)) < 0.5 or min((*flags.utterances, *flags.widths, 1)) < 1:
        raise UsageError("--rounds, --utterances and --widths must be at least 1, --seconds at least 0.5.")
    from benchmarks.measuring.peers.contest import Terms
    from benchmarks.measuring.peers.growing import Axis, draw, grow

    where = flags.device, flags.mixed_precision
    axes = (
        Axis("seconds of one utterance", flags.seconds, tuple(Terms(1, s, s, 256, 0.1, *where) for s in flags.seconds)),
        Axis(
            "utterances of 3 s at once",
            tuple(map(float, flags.utterances)),
            tuple(Terms(count, 3.0, 3.0, 256, 0.1, *where) for count in flags.utterances),
        ),
        Axis(
            "width, 4 utterances of 6 s",
            tuple(map(float, flags.widths)),
            tuple(Terms(4, 6.0, 6.0, width, 0.1, *where) for width in flags.widths),
        ),
    )
    folder = Path(flags.folder).expanduser()
    curves = tuple(grow(axis, flags.contestants, flags.rounds, folder) for axis in axes)
    if flags.plot:
        draw(curves, Path(flags.plot), folder)
    if flags.json:
        return json.dumps([curve.as_json() for curve in curves])
    return "\n\n".join(curve.markdown() for curve in curves)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
