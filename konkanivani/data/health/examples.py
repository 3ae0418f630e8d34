"""Example utterances of a report, each with its problem, and named counts."""

from collections import Counter
from dataclasses import dataclass

from konkanivani.base.console import show_text
from konkanivani.data.utterance import Utterance

MAX_EXAMPLES = 20


@dataclass(frozen=True)
class ExampleRow:
    """An utterance in a report: its row in the manifest, its id and text in printable form, and its problem."""

    row: int
    id: str
    text: str
    detail: str

    @property
    def place(self) -> str:
        """Return the location for the user; a broken row may name no audio."""
        return f"row {self.row}, {self.id}" if self.id else f"row {self.row}"


@dataclass(frozen=True)
class Listed:
    """A total count, and the first or the worst utterances as examples."""

    count: int = 0
    examples: tuple[ExampleRow, ...] = ()


@dataclass(frozen=True)
class Tally:
    """A name and the number of its occurrences."""

    name: str
    count: int


def example(utterance: Utterance, detail: str) -> ExampleRow:
    """Return the utterance in printable form, with its problem."""
    # Control characters of a corpus must not reach the terminal.
    return ExampleRow(utterance.row, show_text(utterance.id), show_text(utterance.text), show_text(detail, 300))


def tallies(counts: Counter[str] | Counter[int]) -> tuple[Tally, ...]:
    """Return the most frequent entries in descending order."""
    return tuple(Tally(str(name), count) for name, count in counts.most_common(MAX_EXAMPLES))
