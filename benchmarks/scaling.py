#!/usr/bin/env python3
"""What several processes make of a run: invariant 9 over its whole grid, ranks that are killed, speed; docs/scaling.md.

    python3 benchmarks/scaling.py                         a few tries of everything, in minutes
    python3 benchmarks/scaling.py --parts invariant --full      the grid of docs/scaling.md; an hour for all parts

The exit code is 1 where a result differs that should not, or a run ends otherwise than it should.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.measuring.parts import PartsFlags, run_parts
from konkanivani.base.command_line import read_flags

Part = Literal["invariant", "kills", "overhead", "speed", "traffic"]


@dataclass(frozen=True)
class Flags(PartsFlags):
    """What is tried."""

    parts: tuple[Part, ...] = get_args(Part)
    """law: worlds of 1, 2 and 4 against one process; kills: ranks killed under torchrun; overhead: of the distributed
    path in a world of one; speed: 1, 2 and 4 processes on the same cores (alone on the machine); traffic: by a
    model of the network."""


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    package = "benchmarks.measuring.scaling"
    sys.exit(run_parts(package, flags.parts, flags))
