"""How hard the faults are tried, and the table that comes of it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Effort:
    """`is_full`: the counts that docs/reliability.md reports, else a few of each; `folder` is empty to begin with."""

    is_full: bool
    folder: Path
    seed: int

    def count(self, full: int, short: int) -> int:
        """How many tries of one kind."""
        return full if self.is_full else short


@dataclass(frozen=True)
class FaultTable:
    """What happened: one row a kind of fault. `failures` are sentences on what should not have happened."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table under its title, then notes and failures."""
        lines = [f"## {self.title}", "", _row(self.columns), _row(("---",) * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *self.notes]
        lines += [f"**Failed:** {failure}" for failure in self.failures]
        return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
