"""The stretches of speech that a hypothesis tells apart by the tokens of their times.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 2.3: a time stands before and
behind the text of a stretch; one that goes on behind the window has none behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from konkanivani.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class TimedSegment:
    """Tokens of text that were said from `begin` to `end`, in seconds from where the audio begins."""

    begin: float
    end: float
    tokens: tuple[int, ...]


def timed_segments(tokens: Sequence[int], vocabulary: Vocabulary, seconds: float) -> list[TimedSegment]:
    """The segments of a hypothesis about so many `seconds` of audio, in order, without those of which no text is said.

    What has no time before it begins where the last segment ends, or the audio begins; what has none behind it ends
    with the audio. Of times that fall, or lie in the silence behind the audio, the nearest possible are taken.
    """
    found, text, latest = [], [], 0.0
    for token in tokens:
        time = vocabulary.seconds_of(token)
        if time is None:
            text.append(token)
            continue
        time = min(max(time, latest), seconds)
        if text:
            found.append(TimedSegment(latest, time, tuple(text)))
        text, latest = [], time
    return found + ([TimedSegment(latest, seconds, tuple(text))] if text else [])
