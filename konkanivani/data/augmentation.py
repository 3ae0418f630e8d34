"""Augmentation that simulates other recordings: silence, rooms, noise, other speakers, lines, levels and codecs.

S samples at 16 kHz. Each kind is drawn with its own probability from its own generator, a function of (seed, epoch,
utterance), so that changing one kind does not change the others. It needs no other corpus: the speech of other people
comes from other utterances of the training set.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from konkanivani.data.audio.effects import (
    CODECS,
    add_noise,
    can_encode,
    clip_peaks,
    colored_noise,
    companded,
    encoded_and_decoded,
    energy,
    hum,
    limit_band,
    reverberate,
    room_response,
    scale_and_clip,
)
from konkanivani.data.audio.waveform import restore_peaks
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.randomness import utterance_generator

Strength = Literal["none", "light", "strong"]
Kind = Literal["room", "silence", "noise", "babble", "floor", "hum", "band", "offset", "level", "clipping", "codec"]

# Probability of each kind; digital and recorded silence share theirs.
PROBABILITIES: dict[Strength, dict[Kind, float]] = {
    "none": {},
    "light": {
        "room": 0.15,
        "silence": 0.15,
        "noise": 0.2,
        "babble": 0.05,
        "floor": 0.15,
        "hum": 0.05,
        "band": 0.1,
        "offset": 0.05,
        "level": 0.2,
        "clipping": 0.1,
        "codec": 0.05,
    },
    "strong": {
        "room": 0.3,
        "silence": 0.3,
        "noise": 0.4,
        "babble": 0.15,
        "floor": 0.3,
        "hum": 0.1,
        "band": 0.2,
        "offset": 0.1,
        "level": 0.4,
        "clipping": 0.2,
        "codec": 0.1,
    },
}
# Ranges, drawn uniformly.
T60_SECONDS = (0.1, 0.8)
DIRECT_TO_REVERBERANT_DB = (-2.0, 10.0)
BEFORE_SECONDS = (0.0, 1.0)
AFTER_SECONDS = (0.0, 2.0)
NOISE_EXPONENT = (0.0, 2.0)
SNR_DB = (5.0, 30.0)
FLOOR_DBFS = (-80.0, -45.0)
MIN_FLOOR_SNR_DB = 10.0
HUM_HERTZ = (50.0, 60.0)
HUM_SNR_DB = (15.0, 40.0)
OFFSET = (-0.02, 0.02)
LEVEL_DB = (-30.0, 10.0)
CLIPPING_DB = (3.0, 20.0)
BAND_RATES = (8_000, 8_000, 10_000, 12_000)  # Hz; telephones twice
COMPRESSION = (0.3, 0.97)  # about 200 to 20 kbit/s with Opus, 60 to 30 with MP3
MAX_TALKERS = 3
SILENCES = ("digital", "inserted", "recorded")  # equally often

Talker = Callable[[torch.Generator], torch.Tensor | None]
"""Draws another training utterance and returns its waveform (S,); None if it is unusable."""


@dataclass(frozen=True)
class AugmentedWaveform:
    """A waveform (S,), and the seconds that its speech starts later than before."""

    waveform: torch.Tensor
    delay: float = 0.0


@dataclass(frozen=True)
class RecordingAugmentation:
    """Simulation of another recording of an utterance; silence never makes it longer than `longest_seconds`.

    The memory plan and the model's window allow for `longest_seconds`, the longest utterance at the slowest speed.
    """

    seed: int = 0
    strength: Strength = "none"
    longest_seconds: float = 0.0

    def __call__(self, waveform: torch.Tensor, epoch: int, utterance_id: str, talker: Talker) -> AugmentedWaveform:
        """Return this epoch's recording of the utterance with waveform (S,)."""
        if self.strength == "none":
            return AugmentedWaveform(waveform)
        draws = Draws(self.seed, epoch, utterance_id, PROBABILITIES[self.strength])
        if generator := draws.of("room"):
            waveform = _reverberant(waveform, generator)
        silence = draws.of("silence")
        if silence is None:
            return AugmentedWaveform(_transmitted(_noisy(waveform, draws, talker), draws))
        sides = self._silence(len(waveform), silence)
        kind = SILENCES[draw_index(len(SILENCES), silence)]
        # Digital silence comes after all other changes; other noise covers recorded silence, too.
        if kind != "digital":
            waveform = _with_recorded_silence(waveform, sides, kind == "inserted", silence)
        waveform = _transmitted(_noisy(waveform, draws, talker), draws)
        if kind == "digital":
            waveform = torch.nn.functional.pad(waveform, sides)
        return AugmentedWaveform(waveform, sides[0] / SAMPLE_RATE)

    def _silence(self, samples: int, generator: torch.Generator) -> tuple[int, int]:
        """Return the samples of silence before and after a waveform of `samples` samples."""
        before = draw_uniform(BEFORE_SECONDS, generator)
        after = draw_uniform(AFTER_SECONDS, generator)
        allowed = max(0.0, self.longest_seconds - samples / SAMPLE_RATE)
        share = min(1.0, allowed / (before + after)) if before + after > 0 else 0.0
        return int(before * share * SAMPLE_RATE), int(after * share * SAMPLE_RATE)


@dataclass(frozen=True)
class Draws:
    """Generators of one utterance in one epoch."""

    seed: int
    epoch: int
    utterance_id: str
    probabilities: dict[Kind, float]

    def of(self, kind: Kind) -> torch.Generator | None:
        """Return the generator of the kind's parameters; None if the kind is not drawn."""
        generator = utterance_generator(self.seed, self.epoch, self.utterance_id, f"augmentation {kind}")
        return generator if draw_number(generator) < self.probabilities[kind] else None


def _reverberant(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    t60 = draw_uniform(T60_SECONDS, generator)
    ratio = draw_uniform(DIRECT_TO_REVERBERANT_DB, generator)
    return reverberate(waveform, room_response(t60, ratio, generator))


def _noisy(waveform: torch.Tensor, draws: Draws, talker: Talker) -> torch.Tensor:
    """Return the waveform (S,) with noise, other speakers, a noise floor and hum, as drawn."""
    samples = len(waveform)
    if generator := draws.of("noise"):
        snr = draw_uniform(SNR_DB, generator)
        exponent = draw_uniform(NOISE_EXPONENT, generator)
        waveform = add_noise(waveform, colored_noise(samples, exponent, generator), snr)
    if generator := draws.of("babble"):
        snr = draw_uniform(SNR_DB, generator)
        waveform = add_noise(waveform, _babble(samples, generator, talker), snr)
    if generator := draws.of("floor"):
        waveform = _with_noise_floor(waveform, generator)
    if generator := draws.of("hum"):
        hertz = HUM_HERTZ[draw_index(len(HUM_HERTZ), generator)]
        waveform = add_noise(waveform, hum(samples, hertz), draw_uniform(HUM_SNR_DB, generator))
    return waveform


def _with_recorded_silence(
    waveform: torch.Tensor, sides: tuple[int, int], is_inserted: bool, generator: torch.Generator
) -> torch.Tensor:
    """Return the waveform (S,) with the microphone's noise on both sides.

    The noise is also below the speech, or only at the sides if silence is inserted, as by a noise gate or an editor.
    """
    padded = torch.nn.functional.pad(waveform, sides)
    recorded = _with_noise_floor(padded, generator)
    if is_inserted:
        recorded[sides[0] : sides[0] + len(waveform)] = waveform
    return recorded


def _with_noise_floor(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the waveform (S,) with the noise of a microphone and its amplifier, at a level relative to full scale."""
    level = 10 * math.log10(max(energy(waveform) / max(1, len(waveform)), 1e-30))
    # A quiet recording has a quieter floor, which does not hide its speech.
    snr = max(MIN_FLOOR_SNR_DB, level - draw_uniform(FLOOR_DBFS, generator))
    exponent = draw_uniform(NOISE_EXPONENT, generator)
    return add_noise(waveform, colored_noise(len(waveform), exponent, generator), snr)


def _babble(samples: int, generator: torch.Generator, talker: Talker) -> torch.Tensor:
    """Return the sum (samples,) of one to three other utterances, each from a random position on and repeated."""
    total = torch.zeros(samples)
    for _ in range(1 + draw_index(MAX_TALKERS, generator)):
        other = talker(generator)
        if other is not None and len(other):
            start = draw_index(len(other), generator)
            total += other[(torch.arange(samples) + start) % len(other)]
    return total


def _clipped(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the waveform (S,) with clipped peaks, in half of the cases restored as when a file is read.

    The other half stands for recordings whose peaks `restore_peaks` does not find: quieter or compressed ones.
    """
    if not len(waveform):
        return waveform
    waveform = clip_peaks(waveform, draw_uniform(CLIPPING_DB, generator))
    limit = float(waveform.abs().max())
    if limit == 0 or draw_number(generator) >= 0.5:
        return waveform
    return limit * restore_peaks(waveform / limit, SAMPLE_RATE)


def _transmitted(waveform: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return the waveform (S,) with clipping, a band limit, another level, a DC offset and a codec, as drawn."""
    if generator := draws.of("clipping"):
        waveform = _clipped(waveform, generator)
    if generator := draws.of("band"):
        rate = BAND_RATES[draw_index(len(BAND_RATES), generator)]
        waveform = limit_band(waveform, rate)
        if draw_number(generator) < 0.5:
            waveform = companded(waveform)
    if generator := draws.of("level"):
        waveform = scale_and_clip(waveform, draw_uniform(LEVEL_DB, generator))
    if generator := draws.of("offset"):
        waveform = waveform + draw_uniform(OFFSET, generator)
    if generator := draws.of("codec"):
        codec = CODECS[draw_index(len(CODECS), generator)]
        compression = draw_uniform(COMPRESSION, generator)
        if can_encode(codec):
            waveform = encoded_and_decoded(waveform, codec, compression)
    return waveform


def draw_number(generator: torch.Generator) -> float:
    """Return a random number, uniform in [0, 1)."""
    return float(torch.rand((), dtype=torch.float64, generator=generator))


def draw_uniform(ends: tuple[float, float], generator: torch.Generator) -> float:
    """Return a random number, uniform between the ends."""
    return ends[0] + (ends[1] - ends[0]) * draw_number(generator)


def draw_index(count: int, generator: torch.Generator) -> int:
    """Return a random index, uniform in 0 to `count - 1`."""
    return int(torch.randint(count, (), generator=generator))
