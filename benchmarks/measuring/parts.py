"""Benchmarks of several parts, each a module with a function `measure` that returns a table."""

import importlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort
from konkanivani.base.command_line import run_script


@dataclass(frozen=True)
class PartsFlags:
    """Flags of a benchmark of several parts."""

    full: bool = False
    """The counts of the tables in docs/; some parts then take an hour."""
    seed: int = 0
    """Instants, bits and bytes follow from it."""
    folder: str | None = None
    """Folder for the runs (None: a temporary folder, removed at the end)."""
    json: bool = False
    """Print one line of JSON for each part instead of tables."""


def run_parts(package: str, parts: Sequence[str], flags: PartsFlags) -> int:
    """Run each part, a module of `package`, and print its table as soon as it is complete.

    Returns the exit code: that of `run_script`, or 1 if a part has failures.
    """
    failed: list[str] = []

    def run_all() -> str:
        for part in parts:
            # Imported on demand, since some parts need packages that the others do not.
            measure = importlib.import_module(f"{package}.{part}").measure
            with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as scratch:
                table = measure(Effort(flags.full, Path(scratch), flags.seed))
            print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
            failed.extend([part] if table.failures else [])
        return ""

    return run_script(run_all) or int(bool(failed))
