#!/usr/bin/env python3
"""Inject faults (kills, full disks, truncated and flipped files) and count losses: the tables of docs/reliability.md.

    python3 benchmarks/faults.py                         a few tries of every kind
    python3 benchmarks/faults.py --parts kills --full    the counts of docs/reliability.md

Every part trains with the real script as a child process, or reads files the way it does. The exit code is 1 if
anything is lost or read incorrectly, or a run ends in an unexpected way.
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

Part = Literal[
    "kills", "signals", "resumes", "files", "disk_full", "numbers", "loaders", "untrusted_input", "fuzz", "peers"
]


@dataclass(frozen=True)
class Flags(PartsFlags):
    """Flags of this script."""

    parts: tuple[Part, ...] = tuple(part for part in get_args(Part) if part != "peers")
    """Kinds of faults; peers (other toolkits, in a separate environment) runs only if it is named."""


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    package = "benchmarks.measuring.faults"
    sys.exit(run_parts(package, flags.parts, flags))
