"""Command lines of benchmarks with several parts or subcommands, and their tables of results."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from konkanivani.command_line import run_script
from konkanivani.errors import UsageError


@dataclass(frozen=True)
class Effort:
    """Extent of a benchmark: `is_full` runs the counts of the tables in docs/, otherwise a few; `folder` is empty."""

    is_full: bool
    folder: Path
    seed: int

    def count(self, full: int, short: int) -> int:
        """Return `full` or `short`, the number of trials of one kind."""
        return full if self.is_full else short


@dataclass(frozen=True)
class FaultTable:
    """Results, one row per kind of fault; `failures` are sentences on unexpected outcomes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the title, the table, the notes and the failures as Markdown."""
        lines = [f"## {self.title}", "", _row(self.columns), _row(("---",) * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *self.notes]
        lines += [f"**Failed:** {failure}" for failure in self.failures]
        return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


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


def run_parts(measures: Mapping[str, Callable[[Effort], FaultTable]], parts: Sequence[str], flags: PartsFlags) -> int:
    """Run the measures of these parts, and print each table as soon as it is complete.

    Returns the exit code: that of `run_script`, or 1 if a part has failures.
    """
    failed: list[str] = []

    def run_all() -> str:
        for part in parts:
            with tempfile.TemporaryDirectory(dir=flags.folder, prefix=f"{part}_") as scratch:
                table = measures[part](Effort(flags.full, Path(scratch), flags.seed))
            print(json.dumps(asdict(table)) if flags.json else f"{table.markdown()}\n", flush=True)
            if table.failures:
                failed.append(part)
        return ""

    exit_code = run_script(run_all)
    return exit_code or int(bool(failed))


def run_subcommand(subcommands: Mapping[str, Callable[[list[str]], str]], arguments: Sequence[str]) -> int:
    """Run the subcommand that the first argument names, with the other arguments; return the exit code.

    A subcommand returns its report. `--help` without a subcommand prints the script's docstring.
    """
    name, others = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in subcommands:
        return run_script(lambda: subcommands[name](others))
    if name in ("-h", "--help"):
        description = (sys.modules["__main__"].__doc__ or "").strip()
        return run_script(lambda: f"{description}\n\nFlags of a subcommand: give --help after its name.")

    def refuse() -> str:
        raise UsageError(f"The first argument must be a subcommand: {', '.join(subcommands)}.")

    return run_script(refuse)
