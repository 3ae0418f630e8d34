"""Digital silence, limited bands and channels of opposite phase are measured, listed and reported with their rows."""

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
from konkanivani.data.manifest import read_manifest
from tests.conftest import checked, run_script

RATE = 16_000


def voice(seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    """Return noise that falls by 30 dB from 500 Hz to 8 kHz, like clean speech."""
    samples = round(seconds * RATE)
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(samples))
    hertz = np.fft.rfftfreq(samples, 1 / RATE).clip(500)
    shaped = np.fft.irfft(spectrum * (500 / hertz) ** 1.25, samples)
    return (0.1 * shaped / shaped.std()).clip(-0.99, 0.99).astype(np.float32)


def telephone(rate: int = 8_000) -> np.ndarray:
    return limit_band(torch.from_numpy(voice()), rate).numpy()


def gated() -> np.ndarray:
    return np.concatenate([np.zeros(RATE // 2, np.float32), voice(1.5)])


SOUNDS = {
    "plain": voice()[:, None],
    "gated": gated()[:, None],
    "telephone": telephone()[:, None],
    "opposite": np.stack([voice(), -0.95 * voice()], axis=1),
    "one_sided": np.stack([voice(), 0 * voice()], axis=1),
    "stereo": np.stack([voice(), voice(seed=1)], axis=1),
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


def names(listed) -> list[str]:
    return [Path(row.id).stem for row in listed.examples]


def test_each_defect_is_listed_with_its_row(manifest):
    found = measure_sound([(utterance, True) for utterance in read_manifest(str(manifest))])
    assert names(found.gated) == ["gated"] and found.gated.examples[0].detail == "25 % of it"
    assert names(found.narrow) == ["telephone"] and found.narrow.examples[0].detail == "4000 Hz"
    assert names(found.mixing) == ["opposite", "one_sided"]
    assert [row.detail for row in found.mixing.examples] == [CANCELLED, ONE_SIDED]
    assert names(found.mute) == []  # the level is that of the channel in use
    assert [row.row for row in found.mixing.examples] == [4, 5]


def test_the_level_is_that_of_the_channel_in_use(manifest):
    levels = {Path(row.id).stem: measure_levels(row).level for row in read_manifest(str(manifest))}
    for name in ("opposite", "one_sided", "gated"):
        assert levels[name] == pytest.approx(levels["plain"], abs=1.5)


def test_the_report_names_them(manifest, tmp_path):
    page = tmp_path / "page.html"
    words = ("--train_manifest", str(manifest), "--html", str(page))
    said = checked(run_script("training_scripts/inspect_data.py", *words)).stdout
    assert "interrupted by digital silence" in said and "used with one channel only" in said
    shown = page.read_text(encoding="utf-8")
    for title in ("Recordings with digital silence", "with a limited band", "reduced to one channel"):
        assert title in shown


@pytest.mark.parametrize(("rate", "band"), [(8_000, 4000.0), (10_000, 5500.0), (16_000, np.inf)])
def test_a_band_is_where_the_sound_ends(rate, band):
    samples = voice() if rate == RATE else telephone(rate)
    assert band_limit(samples.astype(np.float64), RATE) == band
    with_noise = samples + 0.001 * np.random.default_rng(1).standard_normal(len(samples))
    assert band_limit(with_noise, RATE) == np.inf  # negative control: noise above the band is sound


def test_a_file_of_8_khz_has_no_limit_below_its_rate():
    assert band_limit(voice().astype(np.float64), 8_000) == np.inf
    assert band_limit(np.zeros(10), RATE) == np.inf


def test_quiet_noise_is_no_digital_silence():
    assert digital_silence(gated().astype(np.float64), RATE) == pytest.approx(0.25, abs=0.01)
    noise = np.round(np.random.default_rng(0).standard_normal(RATE)) / 32_768
    assert digital_silence(noise, RATE) == 0
    assert digital_silence(np.full(RATE, 0.01), RATE) == 1  # a DC offset is no sound
