"""Channels of opposite phase and one-sided recordings are not averaged to silence; other channels are averaged."""

import multiprocessing
import tracemalloc
from collections.abc import Callable, Iterator
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
    for item in load_and_stream(source):
        assert np.array_equal(item, voice())
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "channel 0" in captured.err and "stereo.wav" in captured.err and "opposite" in captured.err


def test_worker_of_a_data_loader_names_only_the_first_files(tmp_path, capfd):
    samples = np.stack([voice(), -0.9 * voice()], axis=1)

    def load_five() -> None:
        for number in range(5):
            channels.mix(samples, AudioSource(str(tmp_path / f"{number}.wav")))

    worker = multiprocessing.get_context("fork").Process(target=load_five)
    worker.start()
    worker.join()
    assert worker.exitcode == 0 and capfd.readouterr().err.count("Only channel") == channels.MAX_NAMED_BY_WORKER
    # A command that reads recordings itself names each.
    load_five()
    assert capfd.readouterr().err.count("Only channel") == 5


def test_opposite_phases_with_dc_offset_are_detected(tmp_path):
    source = write_channels(tmp_path, voice() + 0.05, -0.9 * voice() + 0.05)
    for item in load_and_stream(source):
        assert np.array_equal(item, voice() + np.float32(0.05))


def test_one_sided_recording_keeps_its_level(tmp_path, capsys):
    source = write_channels(tmp_path, 0.0001 * voice(seed=1), voice())
    for item in load_and_stream(source):
        assert np.array_equal(item, voice())
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
    for item in load_and_stream(source):
        assert np.array_equal(item, mean)
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


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that NumPy and Python allocate at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_channel_powers_of_a_long_recording_take_the_memory_of_one_piece(monkeypatch):
    samples = np.zeros((10 * channels.PIECE_FRAMES, 2), np.float32)
    # Float64 samples, then these with their mean, and the squares of all.
    of_a_piece = channels.PIECE_FRAMES * (2 + 3 + 3) * 8
    assert peak_bytes(lambda: channels.choose_channel(samples)) < 1.2 * of_a_piece
    # Negative control: in one piece, the copies take several times the recording.
    monkeypatch.setattr(channels, "PIECE_FRAMES", len(samples))
    assert peak_bytes(lambda: channels.choose_channel(samples)) > 3 * samples.nbytes


@pytest.mark.parametrize(("level", "waiting"), [(1.0, "DECISION_BLOCKS"), (0.0, "MAX_WAITING_BLOCKS")])
def test_stream_holds_a_limited_number_of_blocks(level, waiting):
    read = []

    def endless() -> Iterator[np.ndarray]:
        while True:
            read.append(None)
            yield np.full((10, 2), level, np.float32)

    next(channels.mix_blocks(endless(), AudioSource("endless.wav")))
    assert len(read) == getattr(channels, waiting)


def test_channel_powers_do_not_depend_on_piece_size(monkeypatch):
    samples = np.stack([voice(), -0.5 * voice(seed=1) + 0.1], axis=1)
    whole = channels.ChannelPowers(2)
    whole.add(samples)
    monkeypatch.setattr(channels, "PIECE_FRAMES", 1000)
    pieces = channels.ChannelPowers(2)
    pieces.add(samples)
    assert np.allclose(whole.powers(), pieces.powers(), rtol=1e-9)
    assert whole.powers()[:2] == pytest.approx([0.01, 0.0025], rel=0.05)
