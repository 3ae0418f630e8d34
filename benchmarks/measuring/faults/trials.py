"""Trials of faults, and the table that counts the expected outcomes per kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable

Findings = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Trial:
    """Trial of a fault; `findings` runs it in a new folder and returns sentences on unexpected outcomes."""

    kind: str
    name: str
    findings: Findings


def try_all(title: str, trials: Sequence[Trial], effort: Effort, each: int, notes: tuple[str, ...] = ()) -> FaultTable:
    """Run all trials, or every `each`-th one unless the effort is full, and return their table."""
    right: dict[str, list[bool]] = {}
    failures = []
    for number, trial in enumerate(trials if effort.is_full else trials[::each]):
        found = trial.findings(effort.folder / f"trial_{number}")
        right.setdefault(trial.kind, []).append(not found)
        if found:
            failures.append(f"{trial.kind}, {trial.name}: {'; '.join(found[:3])}")
    rows = [(kind, str(len(tried)), str(sum(tried))) for kind, tried in right.items()]
    rows.append(("all", *(str(sum(int(row[column]) for row in rows)) for column in (1, 2))))
    return FaultTable(title, ("What", "Tried", "As it should be"), tuple(rows), tuple(failures), notes)
