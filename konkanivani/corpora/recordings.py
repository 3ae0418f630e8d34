"""Statistics over many recordings: those that stand out, padding, and repeats.

A key of 0 means none. Among ten million different contents, two share a key with a probability of 3 in a million.
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from konkanivani.console import show_text
from konkanivani.corpora.statistics import (
    MAX_EXAMPLES,
    ExampleRow,
    Listed,
    SoundLevels,
    Tally,
    example,
    measure_levels,
    tallies,
)
from konkanivani.data.audio.files import AudioSource, content_digest, duration_tolerance
from konkanivani.data.batching import EpochPlanner, padded_seconds, same_size
from konkanivani.data.index import Utterance
from konkanivani.errors import DataError
from konkanivani.scoring.html import Histogram, build_histogram

# --------------------
# Statistics over the audio of many recordings, and the recordings that stand out.


# dBFS
QUIET = -40.0
LOUD = -10.0
MUTE = -80.0
MAX_OFFSET = 0.01  # as a share of full scale
MAX_SILENCE = 0.6  # as a share of the time
MAX_DIGITAL_SILENCE = 0.05


@dataclass(frozen=True)
class SpeakerLevel:
    """Loudness of a speaker: the median level in dBFS of `decoded` recordings."""

    name: str
    decoded: int
    level: float


@dataclass(frozen=True)
class SoundHealth:
    """Audio statistics of `decoded` recordings, evenly spaced in the manifest; each list is of utterances.

    Attributes:
        asked: Number of sampled recordings.
        left_out: Recordings that the trainer would open and reject: unreadable, or of another duration than their row
            states.
        speaker_levels: The quietest twenty labelled speakers, quietest first.
    """

    asked: int  # a key of the JSON report
    decoded: int
    left_out: int
    unreadable: Listed
    rates: tuple[Tally, ...]
    channels: tuple[Tally, ...]
    levels: Histogram
    silence: Histogram
    median_level: float
    speaker_levels: tuple[SpeakerLevel, ...]
    median_leading: float
    median_trailing: float
    silence_share: float
    full_scale_share: float
    clipped: Listed
    quiet: Listed
    loud: Listed
    mute: Listed
    silent: Listed
    offset: Listed
    gated: Listed
    narrow: Listed
    mixing: Listed
    deviating: Listed


def measure_sound(chosen: list[tuple[Utterance, bool]]) -> SoundHealth:
    """Return the audio statistics of these recordings; unreadable ones are listed with the reason.

    Args:
        chosen: Utterances, each with a flag whether it is within the trainer's limits, so that the trainer opens it.
    """
    measured, unreadable = _measure_each(chosen)
    deviations = [_deviation(utterance, sound) for utterance, sound in measured]
    as_stated = {utterance.row for (utterance, _), deviation in zip(measured, deviations, strict=True) if not deviation}
    levels = np.array([sound.level for _, sound in measured])
    silence = np.array([sound.silence_share for _, sound in measured])
    full_scale = np.array([sound.full_scale_share for _, sound in measured])
    seconds = np.array([sound.seconds for _, sound in measured])
    # The median of no values is NaN, with a warning.
    middle = np.median if measured else lambda _: 0.0
    return SoundHealth(
        asked=len(chosen),
        decoded=len(measured),
        left_out=sum(is_usable and utterance.row not in as_stated for utterance, is_usable in chosen),
        unreadable=Listed(len(unreadable), tuple(unreadable[:MAX_EXAMPLES])),
        rates=tallies(Counter(sound.rate for _, sound in measured)),
        channels=tallies(Counter(sound.channels for _, sound in measured)),
        levels=build_histogram(levels, finest=1.0),
        silence=build_histogram(100 * silence, finest=1.0),
        median_level=float(middle(levels)),
        speaker_levels=_speaker_levels(measured),
        median_leading=float(middle([sound.leading_silence for _, sound in measured])),
        median_trailing=float(middle([sound.trailing_silence for _, sound in measured])),
        silence_share=float((silence * seconds).sum() / seconds.sum()) if measured else 0.0,
        full_scale_share=float((full_scale * seconds).sum() / seconds.sum()) if measured else 0.0,
        clipped=_list_worst(measured, [s.clipped_runs for _, s in measured], 0, "{:.0f} clipped runs"),
        # A silent recording is listed in `mute` only, so its value here is 0.
        quiet=_list_worst(measured, [-s.level * (s.level > MUTE) for _, s in measured], -QUIET, "-{:.1f} dBFS"),
        loud=_list_worst(measured, [s.level for _, s in measured], LOUD, "{:.1f} dBFS"),
        mute=_list_worst(measured, [-s.level for _, s in measured], -MUTE, "silent"),
        silent=_list_worst(measured, 100 * silence * (levels > MUTE), 100 * MAX_SILENCE, "{:.0f} % silence"),
        offset=_list_worst(measured, [abs(s.offset) for _, s in measured], MAX_OFFSET, "{:.3f} of full scale"),
        gated=_list_worst(
            measured,
            [100 * s.digital_silence_share * (s.level > MUTE) for _, s in measured],
            100 * MAX_DIGITAL_SILENCE,
            "{:.0f} % of it",
        ),
        narrow=_list_detailed(measured, [f"{s.band:.0f} Hz" if s.band < np.inf else "" for _, s in measured]),
        mixing=_list_detailed(measured, [s.mixing for _, s in measured]),
        deviating=_list_worst(measured, deviations, 0, "off by {:.2f} s"),
    )


def _measure_each(chosen: list[tuple[Utterance, bool]]) -> tuple[list[tuple[Utterance, SoundLevels]], list[ExampleRow]]:
    """Return the readable utterances with their measurements, and the others with the reason."""
    unreadable = []
    measured = []
    for utterance, _ in chosen:
        try:
            measured.append((utterance, measure_levels(utterance)))
        except DataError as error:
            # The example names the file; keep only the reason.
            reason = str(error).split(" cannot be read: ", 1)[-1].removesuffix(" Repair the file, or leave it out.")
            unreadable.append(example(utterance, reason.rstrip(".")))
    return measured, unreadable


def _speaker_levels(measured: list[tuple[Utterance, SoundLevels]]) -> tuple[SpeakerLevel, ...]:
    levels: dict[str, list[float]] = {}
    for utterance, sound in measured:
        if utterance.speaker:
            levels.setdefault(utterance.speaker, []).append(sound.level)
    speakers = [SpeakerLevel(show_text(name, 40), len(own), float(np.median(own))) for name, own in levels.items()]
    return tuple(sorted(speakers, key=lambda speaker: speaker.level)[:MAX_EXAMPLES])


def _deviation(utterance: Utterance, sound: SoundLevels) -> float:
    """Return the difference in seconds between manifest and file header; 0 if the trainer tolerates it."""
    if sound.file_seconds is None:
        return 0.0
    deviation = abs(sound.file_seconds - utterance.duration)
    return deviation if deviation > duration_tolerance(utterance.duration) else 0.0


def _list_detailed(measured: list[tuple[Utterance, SoundLevels]], details: list[str]) -> Listed:
    """Return the utterances with a detail that is not empty, in the manifest's order."""
    examples = [example(utterance, detail) for (utterance, _), detail in zip(measured, details, strict=True) if detail]
    return Listed(len(examples), tuple(examples[:MAX_EXAMPLES]))


def _list_worst(
    measured: list[tuple[Utterance, SoundLevels]], values: Iterable[float], most: float, words: str
) -> Listed:
    """Return the utterances with a value above `most`, worst first."""
    values = np.array([*values], dtype=float)
    rows = np.flatnonzero(values > most)
    order = rows[np.argsort(-values[rows], kind="stable")][:MAX_EXAMPLES]
    return Listed(len(rows), tuple(example(measured[i][0], words.format(values[i])) for i in order))


# --------------------
# Share of padding in the planned micro-batches, computed from durations as `batching` plans them.


@dataclass(frozen=True)
class EpochHealth:
    """The first epoch as planned; seconds are of the recorded audio, before speed perturbation.

    The `window_…` fields describe the global batches (utterances of an optimizer step): their size, and the median and
    maximum seconds of audio in one.
    """

    utterances: int
    window_size: int
    micro_batch: int
    steps: int
    padding_share: float
    window_seconds: float
    longest_window_seconds: float


def measure_epoch(planner: EpochPlanner, micro_batch: int) -> EpochHealth:
    """Return the planner's epoch 0, with its global batches cut into micro-batches of `micro_batch` utterances."""
    # Micro-batches of a fixed number of utterances, as a numeric --batch_size gives them.
    limits = same_size(micro_batch)
    windows = [planner.durations[window] for window in planner.plan_epoch(0)]
    speech = np.array([window.sum() for window in windows])
    padded = sum(padded_seconds(window, limits) for window in windows)
    return EpochHealth(
        utterances=len(planner.durations),
        window_size=planner.global_batch_size,
        micro_batch=micro_batch,
        steps=len(windows),
        padding_share=float(1 - speech.sum() / padded) if padded else 0.0,
        window_seconds=float(np.median(speech)),
        longest_window_seconds=float(speech.max()),
    )


# --------------------
# Detection of repeated content: equal 64-bit keys of sentences, paths and audio, within and across manifests.


@dataclass(frozen=True)
class Pairing:
    """Rows of the second list whose key occurs in the first; `pairs` has the first few as indices (first, second)."""

    count: int
    pairs: tuple[tuple[int, int], ...]


def text_key(text: str) -> int:
    """Return the key of a text; 0 for the empty text."""
    if not text:
        return 0
    # surrogatepass: JSON may contain lone surrogates.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def repeats_within(keys: np.ndarray, most: int) -> Pairing:
    """Return the rows whose key an earlier row has, each paired with the first row of that key."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    again = np.flatnonzero((first[inverse] != np.arange(len(keys))) & (keys != 0))
    return Pairing(len(again), tuple((int(first[inverse[i]]), int(i)) for i in again[:most]))


def repeats_across(first: np.ndarray, second: np.ndarray, most: int) -> Pairing:
    """Return the rows of `second` whose key occurs in `first`."""
    again = np.flatnonzero(np.isin(second, first) & (second != 0))
    shown = again[:most]
    # The search in `first` is linear, but only for the few pairs shown.
    return Pairing(len(again), tuple((int(np.flatnonzero(first == second[i])[0]), int(i)) for i in shown))


def span_key(source: AudioSource) -> str:
    """Return the span and channel of the source as text; the same for all whole files."""
    # Milliseconds, so that rounding in a manifest does not hide a repeat.
    span = "whole" if source.start is None else f"{source.start:.3f} {source.seconds:.3f}"
    return span if source.channel is None else f"{span} channel {source.channel}"


def extent_key(source: AudioSource, size: int) -> int:
    """Return a key of the audio's byte count and span; equal for equal audio, without reading it."""
    return text_key(f"{source.byte_count or size} {span_key(source)}")


def occur_again(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each array of keys a bool mask: keys that occur more than once in all arrays together."""
    together = np.concatenate(parts)
    _, inverse, counts = np.unique(together, return_inverse=True, return_counts=True)
    again = (counts[inverse] > 1) & (together != 0)
    return np.split(again, np.cumsum([len(keys) for keys in parts])[:-1])


def file_size(source: AudioSource) -> int | None:
    """Return the bytes of the regular file that contains the audio; None if there is none."""
    try:
        status = os.stat(source.path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def content_key(source: AudioSource) -> int:
    """Return the key of the audio file's bytes and the span in them; 0 if they cannot be read.

    Two utterances have the same audio if the bytes of their files (or shard members) and their spans are equal.
    """
    try:
        return text_key(f"{content_digest(source)} {span_key(source)}")
    except (OSError, ValueError):
        return 0
