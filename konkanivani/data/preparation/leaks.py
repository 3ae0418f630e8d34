"""Leaks between splits, which make a score better than it is: common audio, speakers and sentences."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from konkanivani.base.console import printable
from konkanivani.base.errors import DataError, explained
from konkanivani.data.audio.files import AudioSource, content_digest
from konkanivani.data.preparation.corpus import CheckedUtterance

MAX_EXAMPLES = 5
DIGEST = re.compile("[0-9a-f]{32,}")  # a speaker in Common Voice; eight digits identify it in a message


@dataclass(frozen=True)
class Leak:
    """Number of audio files (or spans of one), speakers or sentences in two or more splits; up to five examples."""

    what: str
    count: int
    examples: tuple[str, ...]


def find_leaks(utterances: list[CheckedUtterance]) -> tuple[Leak, ...]:
    """Return the leaks of audio, speakers and sentences between the splits.

    Raises:
        DataError: If audio can no longer be read.
    """
    with explained(DataError, "Audio that was readable before can no longer be read", "Start again."):
        audio = _leak("audio", _same_audio(utterances))
    speakers = _shared((u.utterance.speaker, u) for u in utterances if u.utterance.speaker)
    return audio, _leak("speaker", speakers), _leak("sentence", _shared((u.sentence, u) for u in utterances))


def _leak(what: str, found: Iterable[str]) -> Leak:
    listed = list(found)
    return Leak(what, len(listed), tuple(printable(example) for example in listed[:MAX_EXAMPLES]))


def _shared(named: Iterable[tuple[str, CheckedUtterance]]) -> Iterator[str]:
    """Yield a description of each name that occurs in two splits, with the first utterance in each."""
    firsts: dict[str, dict[str, CheckedUtterance]] = {}
    for name, utterance in named:
        firsts.setdefault(name, {}).setdefault(utterance.split, utterance)
    for name, by_split in firsts.items():
        if len(by_split) > 1:
            short = f"{name[:8]}…" if DIGEST.fullmatch(name) else name
            yield f"{short}: " + "; ".join(f"{split} ({first.where})" for split, first in sorted(by_split.items()))


def _same_audio(utterances: list[CheckedUtterance]) -> Iterator[str]:
    """Yield a description of each utterance that shares audio with an earlier one in another split."""
    by_recording: dict[AudioSource, list[CheckedUtterance]] = {}
    for checked in utterances:
        utterance = checked.utterance
        recording = AudioSource(utterance.audio_path, utterance.byte_offset, utterance.byte_count)
        by_recording.setdefault(recording, []).append(checked)
    for recordings in _same_bytes(by_recording):
        spoken = [checked for recording in recordings for checked in by_recording[recording]]
        if len({checked.split for checked in spoken}) > 1:
            yield from _overlaps(spoken)


def _same_bytes(by_recording: dict[AudioSource, list[CheckedUtterance]]) -> Iterator[list[AudioSource]]:
    """Yield groups of recordings with identical bytes.

    Only recordings of equal size are read, and only if they are in two splits.
    """
    for _, sized in groupby(sorted(by_recording, key=_size), key=_size):
        same_size = list(sized)
        splits = {checked.split for recording in same_size for checked in by_recording[recording]}
        if len(same_size) == 1 or len(splits) == 1:
            yield from ([recording] for recording in same_size)
        else:
            # Equal size in different splits: only now compare the content.
            alike: dict[str, list[AudioSource]] = {}
            for recording in same_size:
                alike.setdefault(content_digest(recording), []).append(recording)
            yield from alike.values()


def _size(recording: AudioSource) -> int:
    return recording.byte_count or os.path.getsize(recording.path)


def _overlaps(spoken: list[CheckedUtterance]) -> Iterator[str]:
    # Sweep in order of start: by split and channel, the latest end of all utterances that started before.
    furthest: dict[tuple[str, int | None], CheckedUtterance] = {}
    for checked in sorted(spoken, key=lambda one: one.start):
        channel = checked.utterance.channel
        for (split, other_channel), other in furthest.items():
            is_shared = channel == other_channel or None in (channel, other_channel)  # None: the mean of all channels
            # Adjacent spans may overlap by a rounding error.
            if split != checked.split and is_shared and other.end - checked.start > 0.01:
                yield f"{other.where} ({split}) and {checked.where} ({checked.split})"
                break
        known = furthest.get((checked.split, channel))
        if known is None or known.end < checked.end:
            furthest[checked.split, channel] = checked
