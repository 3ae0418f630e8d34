"""Number of trials of a fault benchmark, and its table of results."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Effort:
    """Extent of a benchmark: `is_full` runs the counts of docs/reliability.md, otherwise a few; `folder` is empty."""

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
