"""Silence detection by frame energy, and the span of an utterance that contains speech."""

import numpy as np
import torch

from konkanivani.base.lengths import SAMPLE_RATE

FRAME_SECONDS = 0.010
# Relative threshold: a quiet speaker's words are not silence, whereas pauses in background noise are.
SILENCE_BELOW_SPEECH = 30.0  # dB below the 95th percentile of the utterance's frame levels
DIGITAL_SILENCE = -80.0  # dBFS: silence below this level, whatever the other frames are


def silent_frames(mono: np.ndarray, rate: int) -> np.ndarray:
    """Return which 10 ms frames of samples (S,) are silent, bool (frames,); the last frame may be longer."""
    size = max(1, round(rate * FRAME_SECONDS))
    count = max(1, len(mono) // size)
    # A DC offset is inaudible but would raise the level of every frame.
    centred = np.square(mono - mono.mean())
    power = np.add.reduceat(centred, np.arange(count) * size) / np.diff([*(np.arange(count) * size), len(mono)])
    # The floor of 1e-12 (-120 dB) keeps the logarithm of digital silence finite.
    levels = 10 * np.log10(np.maximum(power, 1e-12))
    return (levels < np.quantile(levels, 0.95) - SILENCE_BELOW_SPEECH) | (levels < DIGITAL_SILENCE)


def speech_span(waveform: torch.Tensor) -> tuple[float, float]:
    """Return start and end of the speech in a 16 kHz waveform (S,), in seconds; the whole waveform if all is silent."""
    speech = np.flatnonzero(~silent_frames(waveform.double().numpy(), SAMPLE_RATE))
    if not len(speech):
        return 0.0, len(waveform) / SAMPLE_RATE
    return float(speech[0] * FRAME_SECONDS), float((speech[-1] + 1) * FRAME_SECONDS)
