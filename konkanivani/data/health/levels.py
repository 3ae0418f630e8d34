"""Measurements of a recording's audio: level, clipping, silence, DC offset, and its duration.

Levels are in dBFS: 20 log10 of the root mean square, with 0 for a full-scale square wave (a full-scale sine is -3).
"""

from dataclasses import dataclass, replace

import numpy as np

from konkanivani.data.audio.files import read_header, read_samples
from konkanivani.data.audio.silence import FRAME_SECONDS, silent_frames
from konkanivani.data.utterance import Utterance

FULL_SCALE = 32_767 / 32_768  # the largest positive value of 16 bits; float samples beyond 1 are at full scale, too
FLOOR = -120.0
MAX_SECONDS = 600.0  # decoded per file


@dataclass(frozen=True)
class SoundLevels:
    """Measurements of an utterance's audio: seconds, dBFS, shares of the samples or of the time.

    `file_seconds` is from the file's header; None if the utterance is a span of the file.
    """

    rate: int
    channels: int
    seconds: float
    file_seconds: float | None
    level: float
    full_scale_share: float
    clipped_runs: int
    leading_silence: float
    trailing_silence: float
    silence_share: float
    offset: float


def measure_levels(utterance: Utterance) -> SoundLevels:
    """Return the measurements of an utterance, from at most its first ten minutes.

    Raises:
        DataError: If the audio cannot be read.
    """
    source = utterance.source
    file_seconds = None
    if source.start is None:
        # Decode the whole file, whatever duration its row states: the difference is a finding.
        source, file_seconds = replace(source, seconds=None), read_header(source).seconds
    samples, rate = read_samples(source, MAX_SECONDS)
    mono = samples.mean(axis=1, dtype=np.float64)
    silent = silent_frames(mono, rate)
    speech = np.flatnonzero(~silent)
    # An utterance without speech counts as leading silence.
    first, last = (speech[0], speech[-1] + 1) if len(speech) else (len(silent), len(silent))
    return SoundLevels(
        rate=rate,
        channels=samples.shape[1],
        seconds=len(samples) / rate,
        file_seconds=file_seconds,
        # The standard deviation is the root mean square without the DC offset.
        level=decibels(float(mono.std())),
        full_scale_share=float((np.abs(samples) >= FULL_SCALE).mean()),
        clipped_runs=sum(clipped_runs(channel) for channel in samples.T),
        leading_silence=float(first * FRAME_SECONDS),
        trailing_silence=float((len(silent) - last) * FRAME_SECONDS),
        silence_share=float(silent.mean()),
        offset=float(mono.mean()),
    )


def decibels(amplitude: float) -> float:
    """Return an amplitude in dBFS, at least -120."""
    return max(FLOOR, 20 * float(np.log10(max(amplitude, 1e-9))))


def clipped_runs(samples: np.ndarray) -> int:
    """Return the number of runs of three or more consecutive samples at full scale with the same sign."""
    side = np.sign(samples) * (np.abs(samples) >= FULL_SCALE)
    same = (side[1:] == side[:-1]) & (side[1:] != 0)
    three = same[1:] & same[:-1]
    # A run is counted at its first triple.
    return int(three[:1].sum() + (three[1:] & ~three[:-1]).sum())
