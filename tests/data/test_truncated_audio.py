"""Truncated files are detected from their header, and MP3 decodes equally in blocks and as a whole."""

import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.audio.files import AudioSource, ShortAudio, UnusableAudio, read_blocks, read_header, read_samples
from tests.data.test_audio_file import RATE, tones
from tests.data.test_unknown_lengths import clear_flac_total


def write_truncated(path: Path, file_format: str, share: float = 0.5, **fields: str) -> Path:
    """Write ten seconds of a rising tone, truncated to this share of the bytes."""
    content = io.BytesIO()
    soundfile.write(content, tones(10.0), RATE, format=file_format, **fields)
    path.write_bytes(content.getvalue()[: round(share * len(content.getvalue()))])
    return path


@pytest.mark.parametrize("file_format", ["WAV", "RIFX", "AIFF", "W64", "RF64", "WAVEX", "AU", "DNS", "CAF", "NIST"])
def test_truncated_file_is_detected_from_its_header(file_format, tmp_path):
    fields = {"RIFX": {"endian": "BIG"}, "DNS": {"endian": "LITTLE"}}.get(file_format, {})
    path = write_truncated(tmp_path / "cut.wav", {"RIFX": "WAV", "DNS": "AU"}.get(file_format, file_format), **fields)
    header = read_header(AudioSource(str(path)))
    # The headers of CAF and NIST are long.
    assert header.seconds == pytest.approx(5.0, abs=0.1) and header.missing == pytest.approx(5.0, abs=0.1)
    shorter = r"it lasts (5\.0|4\.9). s, not 10\.00 s as in its row: it is 5\.[01] s shorter"
    with pytest.raises(UnusableAudio, match=shorter):
        read_samples(AudioSource(str(path), seconds=10.0))
    with pytest.warns(ShortAudio, match=r"cut\.wav is truncated: it is 5\.[01] s shorter than its header"):
        assert sum(map(len, read_blocks(AudioSource(str(path)), 1.0))) == header.frames
    assert len(read_samples(AudioSource(str(path), start=1.0, seconds=2.0))[0]) == 2 * RATE


@pytest.mark.parametrize("claimed", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 36])
def test_streaming_placeholder_size_is_not_a_truncation(claimed, tmp_path):
    path = write_truncated(tmp_path / "stream.wav", "WAV", 1.0)
    content = path.read_bytes()
    place = content.index(b"data") + 4
    path.write_bytes(content[:place] + struct.pack("<L", claimed) + content[place + 4 :])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            header = read_header(AudioSource(str(path)))
        except UnusableAudio:
            assert claimed == 0  # libsndfile trusts the header
            return
        assert header.missing == 0 and sum(map(len, read_blocks(AudioSource(str(path)), 1.0))) == header.frames


@pytest.mark.parametrize(
    ("file_format", "name", "offset", "extra"),
    [("RF64", b"ds64", 16, 0), ("W64", b"data\xf3", 16, 24), ("CAF", b"data", 4, 0)],
)
def test_64_bit_length_of_2_to_4_gib_is_not_taken_for_a_placeholder(file_format, name, offset, extra, tmp_path):
    path = write_truncated(tmp_path / "cut.wav", file_format, 1.0)
    content = bytearray(path.read_bytes())
    claimed = 3 * 2**30
    form = ">Q" if file_format == "CAF" else "<Q"
    struct.pack_into(form, content, content.index(name) + offset, claimed + extra)
    path.write_bytes(content)
    header = read_header(AudioSource(str(path)))
    assert header.seconds + header.missing == pytest.approx(claimed / 2 / RATE, rel=1e-3)


@pytest.mark.parametrize("bitrate_mode", ["CONSTANT", "VARIABLE"])
def test_truncated_mp3_is_rejected_beyond_the_tolerance_of_durations(bitrate_mode, tmp_path):
    path = write_truncated(tmp_path / "cut.mp3", "MP3", 0.95, bitrate_mode=bitrate_mode)
    with pytest.raises(UnusableAudio, match=r"it is truncated after 9\.\d\d s"):
        read_samples(AudioSource(str(path)))
    with pytest.raises(UnusableAudio, match=r"it is truncated after"):
        read_samples(AudioSource(str(path), start=8.0, seconds=2.0))
    assert len(read_samples(AudioSource(str(path), start=2.0, seconds=2.0))[0]) == 2 * RATE


@pytest.mark.parametrize("frames", [500, 3_000, RATE])
def test_mp3_whose_header_counts_the_padding_of_the_encoder_is_read(frames, tmp_path):
    path = tmp_path / "padded.mp3"
    soundfile.write(path, tones(2.0)[:frames], RATE, format="MP3", bitrate_mode="VARIABLE")
    content = bytearray(path.read_bytes())
    (stated,) = struct.unpack_from(">L", content, content.index(b"Xing") + 8)
    struct.pack_into(">L", content, content.index(b"Xing") + 8, stated + 1)  # frames of 576 samples
    path.write_bytes(content)
    read, _ = read_samples(AudioSource(str(path)))
    assert frames <= len(read) < read_header(AudioSource(str(path))).frames


@pytest.mark.parametrize("is_stated", [True, False], ids=["stated", "unknown length"])
def test_flac_is_read_up_to_its_damage_with_warning(is_stated, tmp_path):
    path = write_truncated(tmp_path / "cut.flac", "FLAC")
    if not is_stated:
        content = bytearray(path.read_bytes())
        clear_flac_total(content)
        path.write_bytes(content)
    source = AudioSource(str(path))
    with pytest.warns(ShortAudio, match=r"cut\.flac is truncated or damaged: it can be decoded for [345]\.\d s \(flac"):
        blocks = list(read_blocks(source, 0.5))
    read = np.concatenate(blocks)
    assert 3 * RATE < len(read) < 6 * RATE and np.abs(read - tones(10.0)[: len(read)]).max() < 1e-4
    with pytest.raises(UnusableAudio, match="lost sync"):
        list(read_blocks(source, 20.0))  # no block was read before
    with pytest.raises(UnusableAudio, match="lost sync"):
        read_samples(source)


def write_mp3(path: Path, rate: int) -> int:
    """Write 20 s of bursts and noise as variable-rate MP3; the bits of a frame can be in earlier frames."""
    time = np.arange(20 * rate) / rate
    bursts = 0.4 * np.sin(2 * np.pi * (200 + 150 * time) * time) * (np.arange(len(time)) // 3000 % 3 > 0)
    noise = 0.05 * np.random.default_rng(0).standard_normal(len(time))
    soundfile.write(path, bursts + noise, rate, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    return rate


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100])
def test_mp3_blocks_and_spans_equal_whole_without_decoder_messages(rate, tmp_path, capfd):
    path = tmp_path / "speech.mp3"
    write_mp3(path, rate)
    whole, _ = read_samples(AudioSource(str(path)))
    blocks = np.concatenate(list(read_blocks(AudioSource(str(path)), 0.3)))
    assert np.abs(blocks - whole[: len(blocks)]).max() < 1e-6 and len(blocks) == len(whole)
    assert capfd.readouterr().err == ""
    for start in range(0, 19):
        span, _ = read_samples(AudioSource(str(path), start=start, seconds=1.0))
        assert np.abs(span - whole[start * rate : (start + 1) * rate]).max() < 1e-5
    assert capfd.readouterr().err == ""


def test_negative_control_soundfile_blocks_of_mp3_differ_from_whole(tmp_path, capfd):
    path, values = tmp_path / "speech.mp3", {}
    for rate in (16_000, 24_000, 44_100):
        write_mp3(path, rate)
        with soundfile.SoundFile(path) as file:
            blocks = np.concatenate(list(file.blocks(int(0.3 * rate), dtype="float32")))
        values[rate] = np.abs(blocks - soundfile.read(path, dtype="float32")[0][: len(blocks)]).max()
    assert max(values.values()) > 1e-3 and "error" in capfd.readouterr().err
