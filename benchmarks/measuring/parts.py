"""A benchmark of several parts, a module with a `measure` each: their tables as they come, and the exit code."""

import importlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort
from konkanivani.command_line import run_script


def run_parts(package: str, parts: Sequence[str], full: bool, seed: int, folder: str | None, as_json: bool) -> int:
    """Prints a table for each part, whose module lies in `package`; 1 where one failed, else what `run_script` says."""
    failed: list[str] = []

    def run_all() -> str:
        for part in parts:
            # Only the part that is asked for is imported: some need packages that the others do without.
            measure = importlib.import_module(f"{package}.{part}").measure
            with tempfile.TemporaryDirectory(dir=folder, prefix=f"{part}_") as scratch:
                table = measure(Effort(full, Path(scratch), seed))
            print(json.dumps(asdict(table)) if as_json else f"{table.markdown()}\n", flush=True)
            failed.extend([part] if table.failures else [])
        return ""

    return run_script(run_all) or int(bool(failed))
