#!/usr/bin/env python3
"""Kills, fills, truncates, flips and lies, and counts what was lost: the tables of docs/reliability.md.

    python3 benchmarks/faults.py                         a few tries of every kind
    python3 benchmarks/faults.py --parts kills --full    the counts of docs/reliability.md

Every part trains the real script as a child process, or reads files as it does. The exit code is 1 where anything was
lost, read wrongly, or ended otherwise than it should.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import importlib
import json
import tempfile
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from konkanivani.command_line import read_flags, run_script

Part = Literal["kills", "signals", "resumes", "files", "room", "numbers", "loaders", "strangers", "fuzz", "peers"]


@dataclass(frozen=True)
class Flags:
    """What is tried."""

    parts: tuple[Part, ...] = tuple(part for part in get_args(Part) if part != "peers")
    """Kinds of faults; peers (how others fare, in an environment of their own) only where it is named."""
    full: bool = False
    """The counts of docs/reliability.md; some parts then take an hour."""
    seed: int = 0
    """Instants, bits and bytes follow from it."""
    folder: str | None = None
    """Where the runs lie (None: a temporary folder, removed at the end)."""
    json: bool = False
    """Print one line of JSON for each part instead of tables."""


def try_faults(flags: Flags) -> int:
    """Prints a table for each part; 1 where one failed."""
    from benchmarks.measuring.faults.effort import Effort

    failed = False
    for part in flags.parts:
        # Only the part that is asked for is imported: peers need packages that the others do without.
        measure = importlib.import_module(f"benchmarks.measuring.faults.{part}").measure
        with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as folder:
            table = measure(Effort(flags.full, Path(folder), flags.seed))
        print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
        failed = failed or bool(table.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    codes: list[int] = []
    code = run_script(lambda: codes.append(try_faults(flags)) or "")
    sys.exit(code or codes[0])
