"""Where in an utterance there is silence, and so where its speech begins and ends."""

import numpy as np
import torch

from konkanivani.base.lengths import SAMPLE_RATE

FRAME_SECONDS = 0.010
# Silence is relative: a quiet speaker's words are no silence, and a noisy room's pauses are.
SILENCE_BELOW_SPEECH = 30.0  # dB under the 95th percentile of the utterance's frames
DIGITAL_SILENCE = -80.0  # dBFS: below it whatever the rest is like


def silent_frames(mono: np.ndarray, rate: int) -> np.ndarray:
    """Which frames of 10 ms are silence, bool; the last may be longer. An offset is not heard, so it is left out."""
    size = max(1, round(rate * FRAME_SECONDS))
    count = max(1, len(mono) // size)
    centred = np.square(mono - mono.mean())
    power = np.add.reduceat(centred, np.arange(count) * size) / np.diff([*(np.arange(count) * size), len(mono)])
    levels = 10 * np.log10(np.maximum(power, 1e-12))
    return (levels < np.quantile(levels, 0.95) - SILENCE_BELOW_SPEECH) | (levels < DIGITAL_SILENCE)


def speech_span(waveform: torch.Tensor) -> tuple[float, float]:
    """Seconds of the waveform (S,), of 16 kHz, at which its speech begins and ends; all of it where none is told."""
    speech = np.flatnonzero(~silent_frames(waveform.double().numpy(), SAMPLE_RATE))
    if not len(speech):
        return 0.0, len(waveform) / SAMPLE_RATE
    return float(speech[0] * FRAME_SECONDS), float((speech[-1] + 1) * FRAME_SECONDS)
