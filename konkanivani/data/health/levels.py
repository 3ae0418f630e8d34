"""How recordings sound, in numbers: level, clipping, silence, offset, and whether they are what the manifest says.

Levels are dBFS: 20 log10 of a root mean square, where 0 is the square wave at full scale (a full sine is -3).
"""

from dataclasses import dataclass, replace

import numpy as np

from konkanivani.data.audio.files import read_header, read_samples
from konkanivani.data.audio.silence import FRAME_SECONDS, silent_frames
from konkanivani.data.utterance import Utterance

FULL_SCALE = 32_767 / 32_768  # the largest positive value of 16 bits; what a float file holds beyond 1 counts as well
FLOOR = -120.0
MAX_SECONDS = 600.0  # decoded of one file


@dataclass(frozen=True)
class SoundLevels:
    """What one utterance's samples say; seconds, dBFS, shares of the samples or of the time.

    `file_seconds` is by the file's header; None where the utterance is a span of the file.
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
    """The utterance's sound, of its first ten minutes where it is longer; a DataError says why it cannot be read.

    A whole file is heard whatever its row says of its duration.
    """
    source, file_seconds = utterance.source, None
    if source.start is None:
        source, file_seconds = replace(source, seconds=None), read_header(source).seconds
    samples, rate = read_samples(source, MAX_SECONDS)
    mono = samples.mean(axis=1, dtype=np.float64)
    silent = silent_frames(mono, rate)
    speech = np.flatnonzero(~silent)
    first, last = (speech[0], speech[-1] + 1) if len(speech) else (len(silent), len(silent))
    return SoundLevels(
        rate=rate,
        channels=samples.shape[1],
        seconds=len(samples) / rate,
        file_seconds=file_seconds,
        level=decibels(float(mono.std())),
        full_scale_share=float((np.abs(samples) >= FULL_SCALE).mean()),
        clipped_runs=sum(clipped_runs(channel) for channel in samples.T),
        leading_silence=float(first * FRAME_SECONDS),
        trailing_silence=float((len(silent) - last) * FRAME_SECONDS),
        silence_share=float(silent.mean()),
        offset=float(mono.mean()),
    )


def decibels(amplitude: float) -> float:
    """The amplitude's dBFS, at least -120."""
    return max(FLOOR, 20 * float(np.log10(max(amplitude, 1e-9))))


def clipped_runs(samples: np.ndarray) -> int:
    """How many times three or more samples in a row lie at full scale on the same side."""
    side = np.sign(samples) * (np.abs(samples) >= FULL_SCALE)
    same = (side[1:] == side[:-1]) & (side[1:] != 0)
    three = same[1:] & same[:-1]
    return int(three[:1].sum() + (three[1:] & ~three[:-1]).sum())
