"""Simulated recording conditions: effect of each, determinism, and the audio effects they use."""

import math

import pytest
import torch

from konkanivani.data.audio import effects
from konkanivani.data.audio.effects import CONDITIONS, FASTEST, LONGEST_SILENCE, SLOWEST, condition_named
from konkanivani.lengths import SAMPLE_RATE


def speech(seconds: float = 1.0, level: float = 0.1) -> torch.Tensor:
    """Return a chirp from 200 to 7000 Hz."""
    times = torch.arange(round(seconds * SAMPLE_RATE), dtype=torch.float64) / SAMPLE_RATE
    return (level * torch.sin(2 * math.pi * (200 + 3400 * times / seconds) * times)).float()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decibels(ratio: float) -> float:
    return 10 * math.log10(ratio)


def test_fourteen_conditions_have_unique_names():
    assert len({condition.name for condition in CONDITIONS}) == len(CONDITIONS) == 14
    assert torch.equal(CONDITIONS[0].apply(speech(), "a"), speech())


@pytest.mark.parametrize("condition", CONDITIONS[1:], ids=lambda condition: condition.name)
def test_condition_changes_the_waveform_deterministically(condition):
    changed = condition.apply(speech(), "a")
    assert changed.dtype == torch.float32 and changed.isfinite().all()
    assert not torch.equal(changed, speech())
    assert torch.equal(changed, condition.apply(speech(), "a"))


def test_noise_differs_between_utterances_and_conditions():
    white = condition_named("noise_20")
    assert not torch.equal(white.apply(speech(), "a"), white.apply(speech(), "b"))
    noises = [condition_named(name).apply(speech(), "a") - speech() for name in ("noise_20", "noise_10")]
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 0.1


@pytest.mark.parametrize("snr", [30, 20, 10])
def test_noise_condition_has_the_snr_of_its_name(snr):
    noise = condition_named(f"noise_{snr}").apply(speech(), "a") - speech()
    assert decibels(effects.energy(speech()) / effects.energy(noise)) == pytest.approx(snr, abs=0.01)


def test_silence_and_speed_conditions_keep_length_within_limits():
    samples = len(speech())
    assert len(condition_named("digital_silence").apply(speech(), "a")) == samples + 2 * SAMPLE_RATE
    longest = (len(condition.apply(speech(), "a")) for condition in CONDITIONS)
    assert max(longest) <= max(samples + LONGEST_SILENCE * SAMPLE_RATE, samples / SLOWEST + 1)
    assert len(condition_named("faster").apply(speech(), "a")) == math.ceil(samples / FASTEST)


def test_telephone_band_limit_removes_high_frequencies():
    def share_above(waveform: torch.Tensor) -> float:
        power = torch.fft.rfft(waveform).abs().square()
        return float(power[len(power) * 45 // 80 :].sum() / power.sum())

    assert share_above(speech()) > 0.3  # negative control
    assert share_above(effects.limit_band(speech(), 8_000)) < 1e-3


def test_companding_error_is_small_for_quiet_and_larger_for_loud_samples():
    quiet, loud = (effects.companded(speech(level=level)) - speech(level=level) for level in (0.001, 1.0))
    assert quiet.abs().max() < 2e-4 < 1e-2 < loud.abs().max() < 0.05


def test_room_response_has_given_reverberation_time_and_direct_ratio():
    response = effects.room_response(0.4, 3.0, generator())
    assert response[0] == 1 and not response[1 : round(effects.EARLIEST_REFLECTION * SAMPLE_RATE)].any()
    tail = response[1:]
    assert decibels(1 / effects.energy(tail)) == pytest.approx(3.0, abs=1e-3)
    # Schroeder integral over the first half: 30 dB in 0.2 s.
    remaining = tail.square().flip(0).cumsum(0).flip(0)
    first, half = (float(remaining[round(seconds * SAMPLE_RATE)]) for seconds in (0.01, 0.21))
    assert decibels(first / half) == pytest.approx(30, abs=1.5)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_colored_noise_spectrum_falls_with_its_exponent(exponent):
    power = torch.fft.rfft(effects.colored_noise(16 * SAMPLE_RATE, exponent, generator())).abs().square()
    octaves = [power[16 * low : 16 * 2 * low].mean() for low in (200, 400, 800, 1600, 3200)]
    steps = [decibels(float(low / high)) for low, high in zip(octaves, octaves[1:], strict=False)]
    assert sum(steps) / len(steps) == pytest.approx(3.01 * exponent, abs=0.3)


def test_clip_peaks_lowers_the_peak_by_given_decibels():
    clipped = effects.clip_peaks(speech(), 6.0)
    assert float(clipped.abs().max()) == pytest.approx(0.0501, abs=1e-4)
    for unchanged in (torch.zeros(5), torch.zeros(0)):
        assert torch.equal(effects.clip_peaks(unchanged, 6.0), unchanged)


@pytest.mark.parametrize("codec", effects.CODECS)
def test_codec_keeps_timing_and_error_grows_with_compression(codec):
    if not effects.can_encode(codec):
        pytest.skip(f"the installed libsndfile does not write {codec}")
    voiced = effects.hum(2 * SAMPLE_RATE, 120.0) * torch.linspace(0, 0.2, 2 * SAMPLE_RATE)
    fine, coarse = (effects.encoded_and_decoded(voiced, codec, compression) for compression in (0.0, 0.97))
    assert fine.shape == coarse.shape == voiced.shape
    errors = [effects.energy(coded - voiced) / effects.energy(voiced) for coded in (fine, coarse)]
    assert 0 < errors[0] < errors[1] < 0.2
    late = torch.nn.functional.pad(voiced, (8, 0))[: len(voiced)]  # negative control: half a millisecond late
    assert effects.energy(late - voiced) / effects.energy(voiced) > errors[1]
    assert torch.equal(effects.encoded_and_decoded(voiced, codec, 0.97), coarse)


@pytest.mark.parametrize("codec", effects.CODECS)
@pytest.mark.parametrize("samples", [0, 1, 7, 575, 1152])
def test_codec_accepts_short_and_silent_waveforms(codec, samples):
    if not effects.can_encode(codec):
        pytest.skip(f"the installed libsndfile does not write {codec}")
    noise = 3 * torch.randn(samples, generator=generator())  # beyond full scale
    coded = effects.encoded_and_decoded(noise, codec, 0.9)
    assert coded.shape == (samples,) and coded.isfinite().all()
    assert (effects.encoded_and_decoded(torch.zeros(samples), codec, 0.9).abs() < 1e-6).all()
