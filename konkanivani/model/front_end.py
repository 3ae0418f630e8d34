"""From waveforms to the features that an encoder hears: log-mel, normalised, masked while training.

B batch, S samples, T feature frames, F mel bins.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch
import torchaudio

from konkanivani.base.config import AugmentConfig, FeatureConfig
from konkanivani.base.lengths import SAMPLE_RATE, Framing, Lengths, padding_mask

# What features depend on beside the settings, as exported models describe it.
FIXED_FEATURES = {
    "sample_rate": SAMPLE_RATE,
    "window": "hann, periodic, in the middle of the transform",
    "mel_scale": "htk, 0 Hz to half the sample rate, not normalised",
    "edges": "no padding",
    "normalisation": "mean 0 and variance 1 of each bin over the utterance",
}


def described(config: FeatureConfig) -> dict[str, object]:
    """All that features depend on, by name, for a file that goes to other programs."""
    return FIXED_FEATURES | dataclasses.asdict(config)


class FeatureExtractor(Protocol):
    """The front end: waveforms (B, S), their lengths, seeds -> features (B, T, F), their lengths."""

    def __call__(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]: ...


class LogMel(torch.nn.Module):
    """Waveforms (B, S) with their lengths -> features (B, T, F) and their lengths.

    No frame reaches past the waveform's ends (`center=False`), so nothing of the padding enters a valid frame. Each bin
    is brought to mean 0 and variance 1 over the utterance's valid frames.
    """

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.config, self.framing = config, Framing(config)
        self.power = torchaudio.transforms.MelSpectrogram(
            SAMPLE_RATE,
            n_fft=config.fft_samples,
            win_length=config.window_samples,
            hop_length=config.hop_samples,
            n_mels=config.mel_bins,
            center=False,
        )

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        features = self.power(waveforms).clamp_min_(self.config.smallest_power).log_().transpose(1, 2)
        feature_lengths = tuple(map(self.framing.feature_length, sample_lengths))
        padding = padding_mask(feature_lengths, features.shape[1], features.device)
        frames = torch.tensor(feature_lengths, dtype=features.dtype).to(features.device)
        return normalize_features(features, padding, frames), feature_lengths


def normalize_features(features: torch.Tensor, padding: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Features (B, T, F), each bin of mean 0 and variance 1 over the utterance's valid frames, 0 in the padding.

    `padding` (B, T) is True beyond an utterance's end, `frames` (B,) counts the valid ones, a float tensor.
    """
    padding, frames = padding[:, :, None], frames[:, None, None]
    features = features.masked_fill(padding, 0.0)
    features = features - features.sum(dim=1, keepdim=True) / frames
    features = features.masked_fill(padding, 0.0)
    deviation = (features.square().sum(dim=1, keepdim=True) / frames).sqrt()
    return features / (deviation + 1e-5)


@dataclass(frozen=True)
class SpecAugment:
    """Bands and spans of the features set to 0, which is the mean after normalisation (Park et al., 2019)."""

    config: AugmentConfig
    mel_bins: int

    def draw_masks(self, seeds: tuple[int, ...], lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) and (B, F) bool on the CPU, True where masked; row b depends on seeds[b] and lengths[b] alone."""
        time = torch.zeros(len(seeds), max(lengths), dtype=torch.bool)
        frequency = torch.zeros(len(seeds), self.mel_bins, dtype=torch.bool)
        for row, (seed, length) in enumerate(zip(seeds, lengths, strict=True)):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(self.config.frequency_masks):
                _mask_span(frequency[row], self.mel_bins, self.config.frequency_mask_bins, generator)
            for _ in range(self.config.time_masks):
                _mask_span(time[row], length, int(length * self.config.time_mask_share), generator)
        return time, frequency


def _mask_span(row: torch.Tensor, length: int, widest: int, generator: torch.Generator) -> None:
    width = int(torch.randint(widest + 1, (), generator=generator))
    start = int(torch.randint(length - width + 1, (), generator=generator))
    row[start : start + width] = True


class FrontEnd(torch.nn.Module):
    """Waveforms (B, S) -> features (B, T, F) and their lengths, in full precision on the waveforms' device.

    `augment_seeds` holds one seed an utterance while training and is None in evaluation.
    """

    def __init__(self, features: FeatureConfig, augment: AugmentConfig) -> None:
        super().__init__()
        self.log_mel = LogMel(features)
        self.spec_augment = SpecAugment(augment, features.mel_bins)

    @torch.no_grad()
    def forward(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]:
        with torch.autocast(waveforms.device.type, enabled=False):
            features, feature_lengths = self.log_mel(waveforms, sample_lengths)
        if augment_seeds is not None:
            time, frequency = self.spec_augment.draw_masks(augment_seeds, feature_lengths)
            features.masked_fill_(time.to(features.device, non_blocking=True)[:, :, None], 0.0)
            features.masked_fill_(frequency.to(features.device, non_blocking=True)[:, None, :], 0.0)
        return features, feature_lengths
