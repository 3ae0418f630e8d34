"""Statistics over the audio of many recordings, and the recordings that stand out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from konkanivani.base.console import show_text
from konkanivani.base.errors import DataError
from konkanivani.data.audio.files import duration_tolerance
from konkanivani.data.health.examples import MAX_EXAMPLES, Listed, Tally, example, tallies
from konkanivani.data.health.histogram import Histogram, build_histogram
from konkanivani.data.health.levels import SoundLevels, measure_levels
from konkanivani.data.utterance import Utterance

# dBFS
QUIET = -40.0
LOUD = -10.0
MUTE = -80.0
MAX_OFFSET = 0.01  # as a share of full scale
MAX_SILENCE = 0.6  # as a share of the time


@dataclass(frozen=True)
class SpeakerLevel:
    """Loudness of a speaker: the median level in dBFS of `heard` recordings."""

    name: str
    heard: int
    level: float


@dataclass(frozen=True)
class SoundHealth:
    """Audio statistics of `heard` recordings, evenly spaced in the manifest; each list is of utterances.

    Attributes:
        asked: Number of sampled recordings.
        left_out: Recordings that the trainer would open and reject: unreadable, or of another duration than their row
            states.
        speaker_levels: The quietest twenty labelled speakers, quietest first.
    """

    asked: int
    heard: int
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
    deviating: Listed


def measure_sound(chosen: list[tuple[Utterance, bool]]) -> SoundHealth:
    """Return the audio statistics of these recordings; unreadable ones are listed with the reason.

    Args:
        chosen: Utterances, each with a flag whether it is within the trainer's limits, so that the trainer opens it.
    """
    unreadable = []
    heard = []
    for utterance, _ in chosen:
        try:
            heard.append((utterance, measure_levels(utterance)))
        except DataError as error:
            # The example names the file; keep only the reason.
            reason = str(error).split(" cannot be read: ", 1)[-1].removesuffix(" Repair the file, or leave it out.")
            unreadable.append(example(utterance, reason.rstrip(".")))
    deviations = [_deviation(utterance, sound) for utterance, sound in heard]
    as_told = {utterance.row for (utterance, _), deviation in zip(heard, deviations, strict=True) if not deviation}
    levels = np.array([sound.level for _, sound in heard])
    silence = np.array([sound.silence_share for _, sound in heard])
    seconds = np.array([sound.seconds for _, sound in heard])
    # The median of no values is NaN, with a warning.
    middle = np.median if heard else lambda _: 0.0
    return SoundHealth(
        asked=len(chosen),
        heard=len(heard),
        left_out=sum(is_usable and utterance.row not in as_told for utterance, is_usable in chosen),
        unreadable=Listed(len(unreadable), tuple(unreadable[:MAX_EXAMPLES])),
        rates=tallies(Counter(sound.rate for _, sound in heard)),
        channels=tallies(Counter(sound.channels for _, sound in heard)),
        levels=build_histogram(levels, finest=1.0),
        silence=build_histogram(100 * silence, finest=1.0),
        median_level=float(middle(levels)),
        speaker_levels=_speaker_levels(heard),
        median_leading=float(middle([sound.leading_silence for _, sound in heard])),
        median_trailing=float(middle([sound.trailing_silence for _, sound in heard])),
        silence_share=float((silence * seconds).sum() / seconds.sum()) if heard else 0.0,
        full_scale_share=float(np.mean([sound.full_scale_share for _, sound in heard])) if heard else 0.0,
        clipped=_worst(heard, [s.clipped_runs for _, s in heard], 0, "{:.0f} clipped runs"),
        # A silent recording is listed in `mute` only, so its value here is 0.
        quiet=_worst(heard, [-s.level * (s.level > MUTE) for _, s in heard], -QUIET, "-{:.1f} dBFS"),
        loud=_worst(heard, [s.level for _, s in heard], LOUD, "{:.1f} dBFS"),
        mute=_worst(heard, [-s.level for _, s in heard], -MUTE, "silent"),
        silent=_worst(heard, 100 * silence * (levels > MUTE), 100 * MAX_SILENCE, "{:.0f} % silence"),
        offset=_worst(heard, [abs(s.offset) for _, s in heard], MAX_OFFSET, "{:.3f} of full scale"),
        deviating=_worst(heard, deviations, 0, "off by {:.2f} s"),
    )


def _speaker_levels(heard: list[tuple[Utterance, SoundLevels]]) -> tuple[SpeakerLevel, ...]:
    levels: dict[str, list[float]] = {}
    for utterance, sound in heard:
        if utterance.speaker:
            levels.setdefault(utterance.speaker, []).append(sound.level)
    found = [SpeakerLevel(show_text(name, 40), len(own), float(np.median(own))) for name, own in levels.items()]
    return tuple(sorted(found, key=lambda speaker: speaker.level)[:MAX_EXAMPLES])


def _deviation(utterance: Utterance, sound: SoundLevels) -> float:
    """Return the difference in seconds between manifest and file header; 0 if the trainer tolerates it."""
    if sound.file_seconds is None:
        return 0.0
    deviation = abs(sound.file_seconds - utterance.duration)
    return deviation if deviation > duration_tolerance(utterance.duration) else 0.0


def _worst(heard: list[tuple[Utterance, SoundLevels]], values: Iterable[float], most: float, words: str) -> Listed:
    """Return the utterances with a value above `most`, worst first."""
    values = np.array([*values], dtype=float)
    found = np.flatnonzero(values > most)
    order = found[np.argsort(-values[found], kind="stable")][:MAX_EXAMPLES]
    return Listed(len(found), tuple(example(heard[i][0], words.format(values[i])) for i in order))
