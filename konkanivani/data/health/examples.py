"""Utterances named in a report, with what is the matter with them, and counts with a name."""

from collections import Counter
from dataclasses import dataclass

from konkanivani.base.console import show_text
from konkanivani.data.utterance import Utterance

MAX_EXAMPLES = 20


@dataclass(frozen=True)
class ExampleRow:
    """An utterance to look at: its line in the manifest, its name and text fit to be shown, and what is the matter."""

    row: int
    id: str
    text: str
    detail: str

    @property
    def place(self) -> str:
        """Where to look: a broken row may name no audio."""
        return f"row {self.row}, {self.id}" if self.id else f"row {self.row}"


@dataclass(frozen=True)
class Listed:
    """How many there are, and the first or the worst of them."""

    count: int = 0
    examples: tuple[ExampleRow, ...] = ()


@dataclass(frozen=True)
class Tally:
    """How often something occurs."""

    name: str
    count: int


def example(utterance: Utterance, detail: str) -> ExampleRow:
    """The utterance as it may be shown, with what is the matter."""
    return ExampleRow(utterance.row, show_text(utterance.id), show_text(utterance.text), show_text(detail, 300))


def tallies(counts: Counter) -> tuple[Tally, ...]:
    """The most frequent, first."""
    return tuple(Tally(str(name), count) for name, count in counts.most_common(MAX_EXAMPLES))
