"""Transcript of a recording as segments of words. Times are seconds from the start of the recording."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """Word with its start and end time; `confidence` is from 0 to 1, or None if unknown."""

    text: str
    start: float
    end: float
    confidence: float | None


@dataclass(frozen=True)
class Segment:
    """One or more words that were recognised together, usually the speech between two pauses."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """Words joined by spaces."""
        return " ".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        """Start of the first word."""
        return self.words[0].start

    @property
    def end(self) -> float:
        """End of the last word."""
        return self.words[-1].end


@dataclass(frozen=True)
class Transcript:
    """All segments of a recording, in order; empty if there is no speech."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """Segments joined by spaces."""
        return " ".join(segment.text for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)
