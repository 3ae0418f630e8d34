"""Audio files as 16 kHz mono waveforms, and waveforms as normalised log-mel features.

B batch, S samples, T feature frames, F mel bins.
"""

import contextlib
from collections.abc import Iterator

import torch
import torchaudio

from konkanivani.audio_file import AudioSource, read_samples
from konkanivani.lengths import (
    FFT_SAMPLES,
    HOP_SAMPLES,
    SAMPLE_RATE,
    WINDOW_SAMPLES,
    Lengths,
    feature_length,
    padding_mask,
)

MEL_BINS = 80
SMALLEST_POWER = 1e-10
# What features depend on; a model that was trained on features of other constants hears nothing here.
FEATURES = {
    "sample_rate": SAMPLE_RATE,
    "fft_samples": FFT_SAMPLES,
    "window_samples": WINDOW_SAMPLES,
    "hop_samples": HOP_SAMPLES,
    "window": "hann, periodic, in the middle of the transform",
    "mel_bins": MEL_BINS,
    "mel_scale": "htk, 0 Hz to half the sample rate, not normalised",
    "smallest_power": SMALLEST_POWER,
    "edges": "no padding",
    "normalisation": "mean 0 and variance 1 of each bin over the utterance",
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread, so that a transform gives the same bits in a worker and in the training process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_audio(source: AudioSource) -> torch.Tensor:
    """The source's (S,) float32 waveform at 16 kHz, channels averaged; a DataError names one that cannot be used."""
    samples, rate = read_samples(source)
    return resample(torch.from_numpy(samples).mean(dim=1), rate)


def resample(waveform: torch.Tensor, rate: int) -> torch.Tensor:
    """The waveform (S,) of `rate` Hz at 16 kHz."""
    if rate == SAMPLE_RATE:
        return waveform
    with one_thread():
        return torchaudio.functional.resample(waveform, rate, SAMPLE_RATE)


class LogMel(torch.nn.Module):
    """Waveforms (B, S) with their lengths -> features (B, T, F) and their lengths.

    80 mel bins over 25 ms every 10 ms. No frame reaches past the waveform's ends (`center=False`), so nothing of the
    padding enters a valid frame. Each bin is brought to mean 0 and variance 1 over the utterance's valid frames.
    """

    def __init__(self) -> None:
        super().__init__()
        self.power = torchaudio.transforms.MelSpectrogram(
            SAMPLE_RATE,
            n_fft=FFT_SAMPLES,
            win_length=WINDOW_SAMPLES,
            hop_length=HOP_SAMPLES,
            n_mels=MEL_BINS,
            center=False,
        )

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        features = self.power(waveforms).clamp_min_(SMALLEST_POWER).log_().transpose(1, 2)
        feature_lengths = tuple(map(feature_length, sample_lengths))
        padding = padding_mask(feature_lengths, features.shape[1], features.device)
        frames = torch.tensor(feature_lengths, dtype=features.dtype).to(features.device)
        return normalized(features, padding, frames), feature_lengths


def normalized(features: torch.Tensor, padding: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Features (B, T, F), each bin of mean 0 and variance 1 over the utterance's valid frames, 0 in the padding.

    `padding` (B, T) is True beyond an utterance's end, `frames` (B,) counts the valid ones, a float tensor.
    """
    padding, frames = padding[:, :, None], frames[:, None, None]
    features = features.masked_fill(padding, 0.0)
    features = features - features.sum(dim=1, keepdim=True) / frames
    features = features.masked_fill(padding, 0.0)
    deviation = (features.square().sum(dim=1, keepdim=True) / frames).sqrt()
    return features / (deviation + 1e-5)
