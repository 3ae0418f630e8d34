"""A benchmark of several parts, a module with a `measure` each: their tables as they come, and the exit code."""

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
    """How much of its parts such a benchmark tries, and where."""

    full: bool = False
    """The counts of the tables in docs/; some parts then take an hour."""
    seed: int = 0
    """Instants, bits and bytes follow from it."""
    folder: str | None = None
    """Where the runs lie (None: a temporary folder, removed at the end)."""
    json: bool = False
    """Print one line of JSON for each part instead of tables."""


def run_parts(package: str, parts: Sequence[str], flags: PartsFlags) -> int:
    """Prints a table for each part, whose module lies in `package`; 1 where one failed, else what `run_script` says."""
    failed: list[str] = []

    def run_all() -> str:
        for part in parts:
            # Only the part that is asked for is imported: some need packages that the others do without.
            measure = importlib.import_module(f"{package}.{part}").measure
            with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as scratch:
                table = measure(Effort(flags.full, Path(scratch), flags.seed))
            print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
            failed.extend([part] if table.failures else [])
        return ""

    return run_script(run_all) or int(bool(failed))
