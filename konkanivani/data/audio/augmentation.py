"""Waveform augmentation as pure functions of a waveform and drawn parameters.

S samples, R samples of an impulse response.
"""

import torch
import torchaudio

from konkanivani.data.audio.waveform import change_rate, one_thread


def choose_speed(speeds: tuple[float, ...], generator: torch.Generator) -> float:
    """Return one of `speeds`, drawn uniformly."""
    return speeds[int(torch.randint(len(speeds), (), generator=generator))]


def perturb_speed(waveform: torch.Tensor, speed: float) -> torch.Tensor:
    """Return the waveform (S,) as (ceil(S / speed),), changed in tempo and pitch (Ko et al., 2015)."""
    percent = round(speed * 100)
    if percent == 100:
        return waveform
    return change_rate(waveform, percent, 100)


def reverberate(waveform: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Convolve a waveform (S,) with a room's impulse response (R,) and return (S,).

    The response's largest sample is taken as the direct path and keeps its time. A silent response or waveform leaves
    the waveform unchanged.
    """
    direct = int(response.abs().argmax())
    if response[direct] == 0:
        return waveform
    with one_thread():
        # Normalise the direct path to 1: responses of any scale stay within the range of float32.
        reverberant = torchaudio.functional.fftconvolve(waveform, response / response[direct].abs())
        reverberant = reverberant[direct : direct + len(waveform)]
        before = _energy(waveform)
        after = _energy(reverberant)
    if not before > 0 or not after > 0:
        return waveform
    # Keep the waveform's energy: the scale of a response depends on its recording, not on the room.
    return reverberant * (before / after) ** 0.5


def add_noise(waveform: torch.Tensor, noise: torch.Tensor, snr: float) -> torch.Tensor:
    """Return waveform plus noise, all (S,), with the noise scaled to a signal-to-noise ratio of `snr` dB.

    The ratio is 10 log10(P_speech / P_noise) with the mean powers P. If either is silent, it is undefined and the
    waveform is returned unchanged.
    """
    with one_thread():
        speech_energy = _energy(waveform)
        noise_energy = _energy(noise)
    if not speech_energy > 0 or not noise_energy > 0:
        return waveform
    factor = (speech_energy / noise_energy * 10 ** (-snr / 10)) ** 0.5
    return waveform + (noise.double() * factor).to(waveform.dtype)  # for very quiet noise, the factor exceeds float32


def scale_and_clip(waveform: torch.Tensor, decibels: float) -> torch.Tensor:
    """Return the waveform (S,) amplified by `decibels` and clipped to [-1, 1], as a recording would be."""
    return (waveform * 10 ** (decibels / 20)).clamp(-1.0, 1.0)


def _energy(waveform: torch.Tensor) -> float:
    return float(waveform.double().square().sum())
