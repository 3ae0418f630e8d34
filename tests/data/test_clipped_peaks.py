"""Clipped peaks are restored, in whole recordings and in streams alike, and other samples are never changed."""

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.data.audio.effects import UNCHANGED, scale_and_clip
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.waveform import (
    CLIP_LEVEL,
    CLIP_MAX_GAIN,
    CLIP_MAX_SECONDS,
    PeakRestorer,
    load_audio,
    restore_peaks,
    stream_audio,
    stream_samples,
)
from konkanivani.data.dataset import EvalDataset
from tests.conftest import speak
from tests.data.test_augmentation import enable_only, light, training_set

RATE = 16_000


def voice(seconds: float = 2.0, rate: int = RATE, seed: int = 0) -> torch.Tensor:
    """Return a sum of harmonics of 120 Hz with a changing level, float32, at most 0.9."""
    generator = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    phases = generator.uniform(0, 2 * np.pi, 12)
    wave = sum(np.sin(2 * np.pi * 120 * n * time + phases[n - 1]) / n for n in range(1, 13))
    wave *= 0.6 + 0.4 * np.sin(2 * np.pi * 2.3 * time)
    return torch.from_numpy((0.9 * wave / np.abs(wave).max()).astype(np.float32))


def clipped(decibels: float = 18.0, rate: int = RATE) -> torch.Tensor:
    return scale_and_clip(voice(rate=rate), decibels)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the ratio of the energies of the difference and of the expected samples."""
    return float((actual - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("decibels", [3.0, 6.0, 12.0])
@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
def test_restored_peaks_are_closer_to_the_recording(decibels, rate):
    original = voice(rate=rate) * 10 ** (decibels / 20)
    cut = scale_and_clip(voice(rate=rate), decibels)
    restored = restore_peaks(cut, rate)
    assert error(restored, original) < 0.5 * error(cut, original)
    changed = restored != cut
    assert changed.any() and (cut[changed].abs() >= CLIP_LEVEL).all()
    assert restored.abs().max() <= CLIP_MAX_GAIN and torch.equal(restored.sign(), cut.sign())


@pytest.mark.parametrize(
    "waveform",
    [
        voice(),
        torch.from_numpy(speak(["उदक"])),
        torch.zeros(4000),
        torch.ones(4000),  # a constant is no peak
        torch.tensor([1.0, -1.0]).repeat(2000),
        torch.linspace(-1, 1, 4000),
        0.5 * clipped(),  # not at full scale: may be the steps of a quiet recording
        torch.zeros(0),
        torch.ones(1),
    ],
    ids=["voice", "chords", "silence", "constant", "square wave", "ramp", "clipped and quieter", "none", "one"],
)
def test_other_samples_are_unchanged(waveform):
    assert restore_peaks(waveform, RATE) is waveform


def test_restored_peaks_are_not_restored_again():
    restored = restore_peaks(clipped(), RATE)
    torch.testing.assert_close(restore_peaks(restored, RATE), restored, rtol=0, atol=0.02)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 37, 1000, 40_000])
@pytest.mark.parametrize("edges", ["voice", "plateaus at both ends", "long plateau"])
def test_stream_gives_the_samples_of_the_whole(size, edges):
    waveform = clipped()[:6000].clone()
    if edges == "plateaus at both ends":
        waveform[:20] = 1.0
        waveform[-20:] = -1.0
    if edges == "long plateau":
        waveform[3000 : 3000 + round(CLIP_MAX_SECONDS * RATE) + 1] = 1.0
    restorer = PeakRestorer(RATE)
    blocks = [restorer.accept(block) for block in waveform.split(size)]
    assert torch.equal(torch.cat([*blocks, restorer.finish()]), restore_peaks(waveform, RATE))


def test_a_peak_waits_for_two_samples_after_it_and_nothing_else_waits():
    restorer = PeakRestorer(RATE)
    peak = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0, 0.5])
    assert len(restorer.accept(peak)) == 2
    assert len(restorer.accept(torch.tensor([0.0]))) == 5
    assert len(restorer.accept(torch.zeros(3))) == 3 and len(restorer.finish()) == 0


@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_files_and_samples_are_restored_before_they_are_resampled(tmp_path, rate):
    cut = clipped(rate=rate)
    soundfile.write(tmp_path / "clipped.wav", cut.numpy(), rate, subtype="PCM_16")
    soundfile.write(tmp_path / "quiet.wav", 0.5 * cut.numpy(), rate, subtype="PCM_16")
    source = AudioSource(str(tmp_path / "clipped.wav"))
    loaded = load_audio(source)
    assert loaded.abs().max() > 1.3
    # Negative control: below full scale, the same peaks stay flat.
    assert load_audio(AudioSource(str(tmp_path / "quiet.wav"))).abs().max() < 0.7
    torch.testing.assert_close(torch.cat(list(stream_audio(source))), loaded, rtol=0, atol=5e-5)
    samples = soundfile.read(tmp_path / "clipped.wav", dtype="float32")[0]
    torch.testing.assert_close(torch.cat(list(stream_samples(samples, rate))), loaded, rtol=0, atol=5e-5)


def test_clipping_of_augmentation_is_restored_half_of_the_time(monkeypatch):
    enable_only(monkeypatch, "clipping")
    augment = light()
    quiet = 0.1 * voice(1.0)
    results = [augment(quiet, 0, str(number), lambda _: None).waveform for number in range(60)]
    flat = [bool(result.abs().eq(result.abs().max()).sum() >= 3) for result in results]
    assert 15 < sum(flat) < 45
    assert all(result.abs().max() < 0.1 for result in results)


@pytest.mark.parametrize("condition, is_restored", [("clipped", True), ("level", False), (UNCHANGED, False)])
def test_a_simulated_condition_is_read_like_a_file(condition, is_restored, corpus):
    training, kept = training_set(corpus)
    waveform = EvalDataset(kept, training.tokenizer, training.manifest, condition)[0].waveform
    assert bool(waveform.abs().max() > 1.1) is is_restored
