"""Segments of a hypothesis with timestamp tokens.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 2.3: each segment is a start
timestamp, its text and an end timestamp. A segment that continues after Whisper's 30 s window has no end timestamp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from konkanivani.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class TimedSegment:
    """Text tokens between two timestamps, in seconds from the start of the audio."""

    begin: float
    end: float
    tokens: tuple[int, ...]


def timed_segments(tokens: Sequence[int], vocabulary: Vocabulary, seconds: float) -> list[TimedSegment]:
    """Return the segments of a hypothesis for audio of `seconds`, in order; segments without text are dropped.

    Without a start timestamp, a segment starts at the end of the previous segment or at 0. Without an end timestamp, it
    ends at `seconds`.
    """
    found = []
    text = []
    latest = 0.0
    for token in tokens:
        time = vocabulary.seconds_of(token)
        if time is None:
            text.append(token)
            continue
        # The model may predict decreasing timestamps, or timestamps in the padding after the audio: clamp both.
        time = min(max(time, latest), seconds)
        if text:
            found.append(TimedSegment(latest, time, tuple(text)))
        # The same token ends one segment and starts the next, so a repeated timestamp gives no empty segment.
        text = []
        latest = time
    return found + ([TimedSegment(latest, seconds, tuple(text))] if text else [])
