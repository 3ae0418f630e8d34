"""Digital silence, band limits and channels in opposite phase are measured and reported with their rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.corpora.recordings import measure_sound
from konkanivani.corpora.statistics import band_limit, digital_silence, measure_levels
from konkanivani.data.audio.channels import CANCELLED, ONE_SIDED
from konkanivani.data.audio.effects import limit_band
from konkanivani.data.manifest import Utterance, read_manifest
from tests.conftest import checked, run_script

RATE = 16_000


def speech_shaped_noise(seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    """Return noise whose spectrum falls by 30 dB from 500 Hz to 8 kHz, as in clean speech."""
    samples = round(seconds * RATE)
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(samples))
    hertz = np.fft.rfftfreq(samples, 1 / RATE).clip(500)
    shaped = np.fft.irfft(spectrum * (500 / hertz) ** 1.25, samples)
    return (0.1 * shaped / shaped.std()).clip(-0.99, 0.99).astype(np.float32)


def band_limited_noise(rate: int = 8_000) -> np.ndarray:
    return limit_band(torch.from_numpy(speech_shaped_noise()), rate).numpy()


def noise_after_digital_silence() -> np.ndarray:
    return np.concatenate([np.zeros(RATE // 2, np.float32), speech_shaped_noise(1.5)])


SOUNDS = {
    "plain": speech_shaped_noise()[:, None],
    "gated": noise_after_digital_silence()[:, None],
    "telephone": band_limited_noise()[:, None],
    "opposite": np.stack([speech_shaped_noise(), -0.95 * speech_shaped_noise()], axis=1),
    "one_sided": np.stack([speech_shaped_noise(), 0 * speech_shaped_noise()], axis=1),
    "stereo": np.stack([speech_shaped_noise(), speech_shaped_noise(seed=1)], axis=1),
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings")
    rows = []
    for name, samples in SOUNDS.items():
        soundfile.write(folder / f"{name}.wav", samples, RATE, subtype="PCM_16")
        rows.append({"audio_filepath": f"{name}.wav", "duration": 2.0, "text": f"घर शाळा {name}"})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def example_names(listed) -> list[str]:
    return [Path(row.id).stem for row in listed.examples]


def test_each_defect_is_listed_with_its_row(manifest):
    result = measure_sound([(utterance, True) for utterance in read_manifest(str(manifest))])
    assert example_names(result.gated) == ["gated"] and result.gated.examples[0].detail == "25 % of it"
    assert example_names(result.narrow) == ["telephone"] and result.narrow.examples[0].detail == "4000 Hz"
    assert example_names(result.mixing) == ["opposite", "one_sided"]
    assert [row.detail for row in result.mixing.examples] == [CANCELLED, ONE_SIDED]
    assert example_names(result.mute) == []  # the level is measured on the channel in use
    assert [row.row for row in result.mixing.examples] == [4, 5]


def test_shares_of_the_corpus_are_weighted_by_seconds(tmp_path):
    for name, samples in (("clipped", np.ones(RATE)), ("long", np.full(9 * RATE, 0.1))):
        soundfile.write(tmp_path / f"{name}.wav", samples, RATE, subtype="PCM_16")
    utterances = [Utterance(f"{name}.wav", str(tmp_path / f"{name}.wav"), 1.0, "घर") for name in ("clipped", "long")]
    result = measure_sound([(utterance, True) for utterance in utterances])
    assert result.full_scale_share == pytest.approx(0.1)


def test_level_is_measured_on_the_channel_in_use(manifest):
    levels = {Path(row.id).stem: measure_levels(row).level for row in read_manifest(str(manifest))}
    for name in ("opposite", "one_sided", "gated"):
        assert levels[name] == pytest.approx(levels["plain"], abs=1.5)


def test_report_names_defective_recordings(manifest, tmp_path):
    page = tmp_path / "page.html"
    words = ("--train_manifest", str(manifest), "--html", str(page))
    output = checked(run_script("training_scripts/inspect_data.py", *words)).stdout
    assert "interrupted by digital silence" in output and "used with one channel only" in output
    shown = page.read_text(encoding="utf-8")
    for title in ("Recordings with digital silence", "with a limited band", "reduced to one channel"):
        assert title in shown


@pytest.mark.parametrize(("rate", "band"), [(8_000, 4000.0), (10_000, 5500.0), (16_000, np.inf)])
def test_band_limit_is_highest_frequency_with_energy(rate, band):
    samples = speech_shaped_noise() if rate == RATE else band_limited_noise(rate)
    assert band_limit(samples.astype(np.float64), RATE) == band
    with_noise = samples + 0.001 * np.random.default_rng(1).standard_normal(len(samples))
    assert band_limit(with_noise, RATE) == np.inf  # negative control: noise fills the spectrum above the band


def test_8_khz_or_very_short_audio_has_no_band_limit():
    assert band_limit(speech_shaped_noise().astype(np.float64), 8_000) == np.inf
    assert band_limit(np.zeros(10), RATE) == np.inf


def test_quiet_noise_is_not_digital_silence():
    assert digital_silence(noise_after_digital_silence().astype(np.float64), RATE) == pytest.approx(0.25, abs=0.01)
    noise = np.round(np.random.default_rng(0).standard_normal(RATE)) / 32_768
    assert digital_silence(noise, RATE) == 0
    assert digital_silence(np.full(RATE, 0.01), RATE) == 1  # a DC offset counts as silence
