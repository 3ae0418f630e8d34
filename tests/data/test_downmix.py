"""Channels of opposite phase and one-sided recordings are not averaged to silence; other channels are averaged."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from konkanivani.data.audio import channels
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.waveform import load_audio, stream_audio

RATE = 16_000


@pytest.fixture(autouse=True)
def reset_reported_files(monkeypatch):
    monkeypatch.setattr(channels, "_reported", set())


def voice(seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return (0.1 * noise).astype(np.float32)


def write_channels(folder: Path, *sides: np.ndarray) -> AudioSource:
    path = folder / "stereo.wav"
    soundfile.write(path, np.stack(sides, axis=1), RATE, subtype="FLOAT")
    return AudioSource(str(path))


def load_and_stream(source: AudioSource) -> list[np.ndarray]:
    """Return the waveform as loaded by training and as streamed by transcription."""
    return [load_audio(source).numpy(), torch.cat(list(stream_audio(source))).numpy()]


def test_opposite_phases_use_the_louder_channel_and_report_once(tmp_path, capsys):
    source = write_channels(tmp_path, voice(), -0.9 * voice())
    for found in load_and_stream(source):
        assert np.array_equal(found, voice())
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "channel 0" in captured.err and "stereo.wav" in captured.err and "opposite" in captured.err


def test_opposite_phases_with_dc_offset_are_detected(tmp_path):
    source = write_channels(tmp_path, voice() + 0.05, -0.9 * voice() + 0.05)
    for found in load_and_stream(source):
        assert np.array_equal(found, voice() + np.float32(0.05))


def test_one_sided_recording_keeps_its_level(tmp_path, capsys):
    source = write_channels(tmp_path, 0.0001 * voice(seed=1), voice())
    for found in load_and_stream(source):
        assert np.array_equal(found, voice())
    assert "only one of its channels has sound" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sides",
    [
        (voice(), voice()),
        (voice(), voice(seed=1)),
        (voice(), 0.1 * voice(seed=1)),
        (voice(), -0.6 * voice()),
        (0 * voice(), 0 * voice()),
        (voice(), voice(seed=1), voice(seed=2)),
    ],
    ids=["equal", "two voices", "one quieter", "partly cancelled", "silent", "three"],
)
def test_other_recordings_are_averaged_without_a_message(sides, tmp_path, capsys):
    source = write_channels(tmp_path, *sides)
    mean = torch.from_numpy(np.stack(sides, axis=1)).mean(dim=1).numpy()
    for found in load_and_stream(source):
        assert np.array_equal(found, mean)
    assert capsys.readouterr().err == ""


def test_explicit_channel_of_a_row_is_used(tmp_path, capsys):
    source = AudioSource(write_channels(tmp_path, voice(), -0.9 * voice()).path, channel=1)
    assert np.allclose(load_audio(source).numpy(), -0.9 * voice())
    assert capsys.readouterr().err == ""


def test_stream_chooses_channel_after_long_silence(tmp_path, monkeypatch):
    silence = np.zeros(20 * RATE, np.float32)
    left = np.concatenate([silence, voice(3.0)])
    right = np.concatenate([silence, -voice(3.0)])
    assert np.array_equal(load_and_stream(write_channels(tmp_path, left, right))[1], left)
    # Negative control: if the choice cannot wait for the sound, averaging cancels it.
    monkeypatch.setattr(channels, "MAX_WAITING_BLOCKS", 5)
    assert not load_and_stream(write_channels(tmp_path, left, right))[1].any()


def test_channel_powers_do_not_depend_on_piece_size(monkeypatch):
    samples = np.stack([voice(), -0.5 * voice(seed=1) + 0.1], axis=1)
    whole = channels.ChannelPowers(2)
    whole.add(samples)
    monkeypatch.setattr(channels, "PIECE_FRAMES", 1000)
    pieces = channels.ChannelPowers(2)
    pieces.add(samples)
    assert np.allclose(whole.powers(), pieces.powers(), rtol=1e-9)
    assert whole.powers()[:2] == pytest.approx([0.01, 0.0025], rel=0.05)
