"""Audio files: invalid headers are rejected before decoding, and spans are exact."""

import io
import os
import struct
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.audio.files import AudioSource, read_header, read_samples
from konkanivani.errors import DataError
from tests.conftest import checked
from tests.fork_server import fork_server

RATE = 16_000


def tones(seconds: float, channels: int = 1) -> np.ndarray:
    """Return rising tones with a little noise, so that all parts differ; (frames, channels) float32."""
    time = np.arange(round(seconds * RATE)) / RATE
    waveform = 0.4 * np.sin(2 * np.pi * (200 + 150 * time) * time)
    waveform += 0.01 * np.random.default_rng(0).standard_normal(len(time))
    return np.repeat(waveform[:, None], channels, axis=1).astype(np.float32)


def make_source(path: Path, **place: float) -> AudioSource:
    return AudioSource(str(path), **place)


# Rejected files


def _write_wav(
    path: Path, channels: int = 1, rate: int = RATE, data_bytes: int = 3200, claimed: int | None = None
) -> None:
    """Write a 16-bit WAV whose header fields can be wrong."""
    claimed = data_bytes if claimed is None else claimed
    head = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate * channels & 0xFFFFFFFF, 2 * channels, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", claimed)
    path.write_bytes(b"RIFF" + struct.pack("<I", min(36 + claimed, 2**32 - 1)) + chunks + bytes(data_bytes))


def _write_flac_with_frame_count(path: Path, frames: int) -> None:
    """Write a FLAC of one second whose STREAMINFO states `frames` samples.

    The field has 36 bits: 4 in byte 21, then bytes 22 to 25.
    """
    content = io.BytesIO()
    soundfile.write(content, tones(1.0), RATE, format="FLAC")
    whole = bytearray(content.getvalue())
    whole[21] = whole[21] & 0xF0 | frames >> 32
    whole[22:26] = struct.pack(">I", frames & 0xFFFFFFFF)
    path.write_bytes(whole)


def _write_wav_with_nan(path: Path) -> None:
    samples = tones(1.0)
    samples[100] = np.nan
    soundfile.write(path, samples, RATE, subtype="FLOAT")


def _write_truncated_flac(path: Path) -> None:
    soundfile.write(path, tones(4.0), RATE, format="FLAC")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


HEADERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (lambda path: None, "does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be opened as audio"),
    "text": (lambda path: path.write_text("नमस्कार"), "cannot be opened as audio"),
    "folder": (lambda path: path.mkdir(), "it is not a file"),
    "FIFO": (lambda path: os.mkfifo(path), "it is not a file"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a file"),
    "no samples": (lambda path: soundfile.write(path, np.zeros(0), RATE), "contains no samples"),
    "1024 channels": (lambda path: _write_wav(path, channels=1024, data_bytes=2 * 1024 * 100), "1024 channels"),
    "33 channels": (lambda path: _write_wav(path, channels=33, data_bytes=2 * 33 * 100), "33 channels"),
    "3999 Hz": (lambda path: _write_wav(path, rate=3_999), "3999 Hz"),
    "384001 Hz": (lambda path: _write_wav(path, rate=384_001), "384001 Hz"),
    "too many frames": (lambda path: _write_flac_with_frame_count(path, 2**36 - 1), "states 1193 hours"),
    "too many frames for the file size": (
        lambda path: _write_flac_with_frame_count(path, 10**10),
        "too much for .* bytes",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_header_outside_limits_is_rejected_without_decoding(name, tmp_path, monkeypatch):
    write, message = HEADERS[name]
    path = tmp_path / "spoilt.wav"
    write(path)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("samples were decoded"))
    started = time.process_time()
    for read in (read_header, read_samples):
        with pytest.raises(DataError, match=message) as caught:
            read(make_source(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "write",
    [
        lambda path: _write_wav(path, channels=32, data_bytes=6400),
        lambda path: _write_wav(path, rate=4_000),
        lambda path: _write_wav(path),
    ],
    ids=["32 channels", "4000 Hz", "plain"],
)
def test_negative_control_headers_within_limits_are_read(write, tmp_path):
    write(tmp_path / "sound.wav")
    assert (
        len(read_samples(make_source(tmp_path / "sound.wav"))[0])
        == read_header(make_source(tmp_path / "sound.wav")).frames
    )


def test_highly_compressed_flac_of_silence_is_accepted(tmp_path):
    soundfile.write(tmp_path / "silence.flac", np.zeros(100 * RATE), RATE)
    assert read_header(make_source(tmp_path / "silence.flac")).seconds == 100
    assert len(read_samples(make_source(tmp_path / "silence.flac"))[0]) == 100 * RATE


@pytest.mark.parametrize("claimed", [2**32 - 100, 2**31, 10**6])
def test_wav_with_false_data_size_is_read_to_its_end_or_rejected(claimed, tmp_path):
    _write_wav(tmp_path / "claims.wav", claimed=claimed)
    tracemalloc.start()
    try:
        samples, _ = read_samples(make_source(tmp_path / "claims.wav"))
        assert len(samples) == 1600
    except DataError as error:
        assert "claims.wav cannot be read" in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6


@pytest.mark.parametrize(
    "write, message", [(_write_wav_with_nan, "NaN or infinite"), (_write_truncated_flac, "cannot be read")]
)
def test_nan_and_truncated_samples_are_rejected(write, message, tmp_path):
    write(tmp_path / "spoilt.wav")
    with pytest.raises(DataError, match=message):
        read_samples(make_source(tmp_path / "spoilt.wav"))
    assert read_header(make_source(tmp_path / "spoilt.wav")).seconds >= 1


# Spans

TOLERANCES = {"wav": 0.0, "flac": 0.0, "ogg": 0.01, "mp3": 0.02}  # allowed mean absolute difference by file suffix


def write_and_read_back(path: Path, seconds: float = 20.0) -> np.ndarray:
    soundfile.write(path, tones(seconds), RATE)
    return soundfile.read(path, dtype="float32", always_2d=True)[0]


@pytest.mark.parametrize("suffix", TOLERANCES)
@pytest.mark.parametrize("start, seconds", [(0.0, 1.5), (7.25, 2.0), (18.5, 1.5), (19.0, 1.05)])
def test_span_equals_slice_of_the_whole_file(suffix, start, seconds, tmp_path):
    path = tmp_path / f"whole.{suffix}"
    whole = write_and_read_back(path)
    span, rate = read_samples(make_source(path, start=start, seconds=seconds))
    expected = whole[round(start * RATE) : round((start + seconds) * RATE)]
    assert rate == RATE
    if TOLERANCES[suffix] == 0:
        assert np.array_equal(span, expected)
    else:
        assert abs(len(span) - len(expected)) <= RATE // 20
        shared = min(len(span), len(expected))
        # A decoder that starts within a stream needs time to settle.
        assert np.abs(span[800:shared] - expected[800:shared]).mean() < TOLERANCES[suffix]


@pytest.mark.parametrize("start, seconds", [(19.5, 1.0), (20.0, 0.5), (25.0, 1.0)])
def test_span_beyond_end_of_file_is_rejected(start, seconds, tmp_path):
    write_and_read_back(tmp_path / "whole.flac")
    with pytest.raises(DataError, match="it ends at 20.00 s"):
        read_samples(make_source(tmp_path / "whole.flac", start=start, seconds=seconds))


def peak_read_bytes(source: AudioSource) -> int:
    """Return the peak of bytes allocated by Python and numpy while the samples are read."""
    tracemalloc.start()
    read_samples(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_reading_a_span_allocates_memory_for_the_span_only(tmp_path):
    soundfile.write(tmp_path / "long.wav", tones(120.0), RATE)  # 3.8 MB, twice that when decoded
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "long.wav", "long.wav")
    with tarfile.open(tmp_path / "shard.tar") as tar:
        member = tar.getmember("long.wav")
    place = {"byte_offset": member.offset_data, "byte_count": member.size}
    for source in (make_source(tmp_path / "long.wav"), make_source(tmp_path / "shard.tar", **place)):
        whole = peak_read_bytes(source)
        span = peak_read_bytes(AudioSource(source.path, source.byte_offset, source.byte_count, 60.0, 1.0))
        assert whole > 120 * RATE * 4  # negative control: the peak of a whole file is larger
        assert span < 4 * RATE * 4, source


# Members of shards


@pytest.mark.parametrize("suffix", TOLERANCES)
def test_tar_member_reads_the_same_as_the_file(suffix, tmp_path):
    names = [f"{number}.{suffix}" for number in range(3)]
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for number, name in enumerate(names):
            write_and_read_back(tmp_path / name, 2.0 + number)
            tar.add(tmp_path / name, name)
    with tarfile.open(tmp_path / "shard.tar") as tar:
        members = tar.getmembers()
    for name, member in zip(names, members, strict=True):
        inside = make_source(tmp_path / "shard.tar", byte_offset=member.offset_data, byte_count=member.size)
        assert read_header(inside) == read_header(make_source(tmp_path / name))
        assert np.array_equal(read_samples(inside)[0], read_samples(make_source(tmp_path / name))[0])
        span = AudioSource(inside.path, inside.byte_offset, inside.byte_count, 0.5, 1.0)
        assert np.array_equal(
            read_samples(span)[0], read_samples(make_source(tmp_path / name, start=0.5, seconds=1.0))[0]
        )


@pytest.mark.parametrize("offset, count", [(0, 700), (10**9, 5000), (100, 3), (2**62, 2**62), (1536, 10**9)])
def test_invalid_tar_member_range_is_rejected_without_decoder_output(offset, count, tmp_path, capfd):
    write_and_read_back(tmp_path / "0.flac", 2.0)
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "0.flac", "0.flac")
    with pytest.raises(DataError, match="shard.tar at byte"):
        read_samples(make_source(tmp_path / "shard.tar", byte_offset=offset, byte_count=count))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rate", [15_999, 44_099, 44_100])
def test_resampling_odd_rates_is_accurate_and_needs_little_memory(rate):
    script = (
        "import math, torch\n"
        "from konkanivani.data.audio.waveform import resample\n"
        "from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib\n"
        f"heard = torch.sin(2 * math.pi * 440 * torch.arange({rate}) / {rate})\n"
        "resample(heard[:1000], 48_000)\n"  # loads torchaudio
        "before = resident_mib()\n"
        "reset_peak_resident()\n"
        f"found = resample(heard, {rate})\n"
        "wanted = torch.sin(2 * math.pi * 440 * torch.arange(16_000) / 16_000)\n"
        "print(len(found), float((found - wanted)[100:-100].abs().max()), peak_resident_mib() - before)\n"
    )
    done = checked(fork_server().run_program(script))
    count, error, growth = map(float, done.stdout.split())
    assert count == 16_000 and error < 2e-3 and growth < 100
