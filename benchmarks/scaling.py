#!/usr/bin/env python3
"""Test and measure multi-process training: invariant 9 over its whole grid, killed ranks, and speed; docs/scaling.md.

    python3 benchmarks/scaling.py                         a few tries of everything, in minutes
    python3 benchmarks/scaling.py --parts invariant --full      the grid of docs/scaling.md; an hour for all parts

The exit code is 1 if a result differs that should not, or a run ends in an unexpected way.
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
    """Flags of this script."""

    parts: tuple[Part, ...] = get_args(Part)
    """invariant: 1, 2 and 4 ranks against one process; kills: ranks killed under torchrun; overhead: of the distributed
    code with a single rank; speed: 1, 2 and 4 processes on the same cores (otherwise idle machine); traffic: by a model
    of the network."""


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    package = "benchmarks.measuring.scaling"
    sys.exit(run_parts(package, flags.parts, flags))
