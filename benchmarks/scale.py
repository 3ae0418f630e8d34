#!/usr/bin/env python3
"""Measure time and memory of opening a manifest with millions of rows.

    python3 benchmarks/scale.py --rows 6600000 --folder /tmp/rows

The rows are generated once into the folder (about 350 bytes each), with lognormal durations of 1 to 20 s. Measured are
the creation of the index and of the token counts, and, in a separate process, the cost of every later start.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import json
from dataclasses import dataclass

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    folder: str
    """Folder for the rows, which are kept."""
    rows: int = 6_600_000
    """Rows of the manifest."""
    json: bool = False
    """Print one line of JSON instead of a sentence."""


def measure_scale(flags: Flags) -> str:
    """Return the report."""
    if flags.rows < 1:
        raise UsageError("--rows must be at least 1.")
    Path(flags.folder).mkdir(parents=True, exist_ok=True)
    from benchmarks.measuring.many_rows import measure

    result = measure(flags.rows, Path(flags.folder))
    return json.dumps(dataclasses.asdict(result)) if flags.json else result.sentence()


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure_scale(flags)))
