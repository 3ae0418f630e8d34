"""Augmentation of waveforms as pure functions of a value and its generator.

S samples, R samples of an impulse response.
"""

import torch
import torchaudio

from konkanivani.data.audio.waveform import change_rate, one_thread


def choose_speed(speeds: tuple[float, ...], generator: torch.Generator) -> float:
    """One of `speeds`, each as likely as the others."""
    return speeds[int(torch.randint(len(speeds), (), generator=generator))]


def perturb_speed(waveform: torch.Tensor, speed: float) -> torch.Tensor:
    """(S,) -> (ceil(S / speed),): played faster or slower, pitch and all (Ko et al., 2015)."""
    percent = round(speed * 100)
    if percent == 100:
        return waveform
    return change_rate(waveform, percent, 100)


def reverberate(waveform: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """(S,), (R,) -> (S,): as heard in the room whose impulse response this is, the direct path at the old time.

    The direct path is the response's largest sample. The energy is the waveform's own: the response's scale says how
    it was recorded, nothing of the room. A silent response or waveform leaves everything as it is.
    """
    direct = int(response.abs().argmax())
    if response[direct] == 0:
        return waveform
    with one_thread():
        # The direct path as 1: then no response is too quiet or too loud for what follows.
        reverberant = torchaudio.functional.fftconvolve(waveform, response / response[direct].abs())
        reverberant = reverberant[direct : direct + len(waveform)]
        before, after = _energy(waveform), _energy(reverberant)
    if not before > 0 or not after > 0:
        return waveform
    return reverberant * (before / after) ** 0.5


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
