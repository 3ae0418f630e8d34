"""Augmentation as pure functions of a value and its generator, and the front end that the training step runs.

B batch, S samples, T feature frames, F mel bins.
"""

from dataclasses import dataclass

import torch
import torchaudio

from konkanivani.base.config import AugmentConfig
from konkanivani.base.lengths import Lengths
from konkanivani.data.audio.waveform import MEL_BINS, LogMel, change_rate, one_thread


def choose_speed(speeds: tuple[float, ...], generator: torch.Generator) -> float:
    """One of `speeds`, each as likely as the others."""
    return speeds[int(torch.randint(len(speeds), (), generator=generator))]


def perturb_speed(waveform: torch.Tensor, speed: float) -> torch.Tensor:
    """(S,) -> (ceil(S / speed),): played faster or slower, pitch and all (Ko et al., 2015)."""
    percent = round(speed * 100)
    if percent == 100:
        return waveform
    return change_rate(waveform, percent, 100)


def add_room(waveform: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """(S,), (R,) -> (S,): as heard in the room whose impulse response this is, the direct path at the old time.

    The direct path is the response's largest sample. The energy is the waveform's own: the response's scale says how
    it was recorded, nothing of the room. A silent response or waveform leaves everything as it is.
    """
    direct = int(response.abs().argmax())
    if response[direct] == 0:
        return waveform
    with one_thread():
        # The direct path as 1: then no response is too quiet or too loud for what follows.
        heard = torchaudio.functional.fftconvolve(waveform, response / response[direct].abs())
        heard = heard[direct : direct + len(waveform)]
        before, after = _energy(waveform), _energy(heard)
    if not before > 0 or not after > 0:
        return waveform
    return heard * (before / after) ** 0.5


def add_noise(waveform: torch.Tensor, noise: torch.Tensor, snr: float) -> torch.Tensor:
    """(S,), (S,) -> (S,): the sum, the noise scaled to `snr` dB: 10 log10(mean power of speech over that of noise).

    Silent noise or a silent waveform leaves the waveform as it is: there the ratio has no meaning.
    """
    with one_thread():
        speech_energy, noise_energy = _energy(waveform), _energy(noise)
    if not speech_energy > 0 or not noise_energy > 0:
        return waveform
    factor = (speech_energy / noise_energy * 10 ** (-snr / 10)) ** 0.5
    return waveform + (noise.double() * factor).to(waveform.dtype)  # the factor of very quiet noise outgrows float32


def scale_and_clip(waveform: torch.Tensor, decibels: float) -> torch.Tensor:
    """(S,) -> (S,): so many dB louder, and clipped at full scale, -1 to 1, as a recording would be."""
    return (waveform * 10 ** (decibels / 20)).clamp(-1.0, 1.0)


def _energy(waveform: torch.Tensor) -> float:
    """The sum of squares, in float64."""
    return float(waveform.double().square().sum())


@dataclass(frozen=True)
class SpecAugment:
    """Bands and spans of the features set to 0, which is the mean after normalisation (Park et al., 2019)."""

    config: AugmentConfig

    def draw_masks(self, seeds: tuple[int, ...], lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) and (B, F) bool on the CPU, True where masked; row b depends on seeds[b] and lengths[b] alone."""
        time = torch.zeros(len(seeds), max(lengths), dtype=torch.bool)
        frequency = torch.zeros(len(seeds), MEL_BINS, dtype=torch.bool)
        for row, (seed, length) in enumerate(zip(seeds, lengths, strict=True)):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(self.config.frequency_masks):
                _mask_span(frequency[row], MEL_BINS, self.config.frequency_mask_bins, generator)
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

    def __init__(self, augment: AugmentConfig) -> None:
        super().__init__()
        self.log_mel = LogMel()
        self.spec_augment = SpecAugment(augment)

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
