"""What was recognised in a recording: segments of words with their times. Seconds count from the recording's start."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """A word from `start` to `end`; `confidence` is between 0 and 1, None where there is no measure of it."""

    text: str
    start: float
    end: float
    confidence: float | None


@dataclass(frozen=True)
class Segment:
    """One or more words that were recognised together: mostly what was said between two pauses."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The words with spaces between them."""
        return " ".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        """Where its first word begins."""
        return self.words[0].start

    @property
    def end(self) -> float:
        """Where its last word ends."""
        return self.words[-1].end


@dataclass(frozen=True)
class Transcript:
    """All segments of a recording, in order; none where nothing was said."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The segments with spaces between them."""
        return " ".join(segment.text for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)
