"""Recording conditions of an evaluation: the same speech as if another microphone, room or line had recorded it.

S samples at 16 kHz. Each condition changes one property and draws its noise from a fixed seed per utterance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.data.audio.effects import (
    add_noise,
    companded,
    hum,
    limit_band,
    perturb_speed,
    quantize,
    reverberate,
    room_response,
    scale,
    scale_and_clip,
    surround,
    white_noise,
)
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.randomness import utterance_generator

UNCHANGED = "unchanged"
SEED = 1
SLOWEST = 0.9
FASTEST = 1.1
LONGEST_SILENCE = 2.0  # seconds that a condition adds
NOISE_FLOOR = -60.0  # dBFS

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Condition:
    """A named change of a waveform (S,), described for the user."""

    name: str
    description: str
    change: Change

    def apply(self, waveform: torch.Tensor, utterance_id: str) -> torch.Tensor:
        """Return the utterance's waveform (S,) under this condition."""
        return self.change(waveform, utterance_generator(SEED, 0, utterance_id, f"condition {self.name}"))


def _noise_after(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = white_noise(round(LONGEST_SILENCE * SAMPLE_RATE), generator)
    return torch.cat([waveform, scale(noise, NOISE_FLOOR)])


def _white(snr: float) -> Change:
    return lambda waveform, generator: add_noise(waveform, white_noise(len(waveform), generator), snr)


def _reverberant(waveform: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return reverberate(waveform, room_response(0.4, 0.0, generator))


CONDITIONS = (
    Condition(UNCHANGED, "as recorded", lambda waveform, _: waveform),
    Condition("digital_silence", "1 s of zeros before and after", lambda waveform, _: surround(waveform, 1.0, 1.0)),
    Condition("noise_after", "2 s of white noise at -60 dBFS after", _noise_after),
    Condition("dc_offset", "DC offset of 0.005", lambda waveform, _: waveform + 0.005),
    Condition("level", "34 dB quieter, in 16 bits", lambda waveform, _: quantize(scale(waveform, -34.0))),
    Condition("hum", "mains hum of 50 Hz at 30 dB", lambda waveform, _: add_noise(waveform, hum(len(waveform)), 30.0)),
    Condition("clipped", "18 dB louder, clipped", lambda waveform, _: scale_and_clip(waveform, 18.0)),
    Condition("noise_30", "white noise at 30 dB", _white(30.0)),
    Condition("noise_20", "white noise at 20 dB", _white(20.0)),
    Condition("noise_10", "white noise at 10 dB", _white(10.0)),
    Condition("telephone", "8 kHz, mu-law", lambda waveform, _: companded(limit_band(waveform, 8_000))),
    Condition("reverberation", "room with a reverberation time of 0.4 s", _reverberant),
    Condition("slower", "speed 0.9", lambda waveform, _: perturb_speed(waveform, SLOWEST)),
    Condition("faster", "speed 1.1", lambda waveform, _: perturb_speed(waveform, FASTEST)),
)


def condition_named(name: str) -> Condition:
    """Return the condition of this name."""
    return next(condition for condition in CONDITIONS if condition.name == name)
