"""Results of a listener, until the listener's own module exists."""

from dataclasses import dataclass

from konkanivani.inference.word_times import Word


@dataclass(frozen=True)
class Partial:
    fixed: str
    tentative: str
    start: float


@dataclass(frozen=True)
class Final:
    text: str
    words: tuple[Word, ...]
    start: float
    end: float
    changed: bool
