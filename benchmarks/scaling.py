#!/usr/bin/env python3
"""What several processes make of a run: law 9 over its whole grid, ranks that are killed, speed; docs/scaling.md.

    python3 benchmarks/scaling.py                         a few tries of everything, in minutes
    python3 benchmarks/scaling.py --parts law --full      the grid of docs/scaling.md; an hour for all parts

The exit code is 1 where a result differs that should not, or a run ends otherwise than it should.
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

Part = Literal["law", "kills", "overhead", "speed", "traffic"]


@dataclass(frozen=True)
class Flags:
    """What is tried."""

    parts: tuple[Part, ...] = get_args(Part)
    """law: worlds of 1, 2 and 4 against one process; kills: ranks killed under torchrun; overhead: of the distributed
    path in a world of one; speed: 1, 2 and 4 processes on the same cores (alone on the machine); traffic: by a
    model of the network."""
    full: bool = False
    """The counts of docs/scaling.md."""
    seed: int = 0
    """Instants follow from it."""
    folder: str | None = None
    """Where the runs lie (None: a temporary folder, removed at the end)."""
    json: bool = False
    """Print one line of JSON for each part instead of tables."""


def try_scaling(flags: Flags) -> int:
    """Prints a table for each part; 1 where one failed."""
    from benchmarks.measuring.faults.effort import Effort

    failed = False
    for part in flags.parts:
        measure = importlib.import_module(f"benchmarks.measuring.scaling.{part}").measure
        with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as folder:
            table = measure(Effort(flags.full, Path(folder), flags.seed))
        print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
        failed = failed or bool(table.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    codes: list[int] = []
    code = run_script(lambda: codes.append(try_scaling(flags)) or "")
    sys.exit(code or codes[0])
