"""Recordings whose header does not state their length are read to their end, within the length limits."""

import io
import json
import struct
import tarfile
from collections.abc import Callable

import numpy as np
import pytest
import soundfile

from konkanivani.data.audio import files
from konkanivani.data.audio.files import AudioSource, UnusableAudio, read_blocks, read_header, read_samples
from konkanivani.data.audio.waveform import load_audio, stream_audio, stream_samples
from konkanivani.errors import DataError
from tests.conftest import checked, run_in_process, speak

RATE = 16_000
FRAMES = 24_000
LIST_CHUNK = b"LIST" + struct.pack("<L", 18) + b"INFOISFT" + struct.pack("<L", 6) + b"Lavf58"


def encode(container: str, samples: np.ndarray, subtype: str = "PCM_16", **options: str) -> bytearray:
    """Return the bytes of a file with correct lengths in its header."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=container, subtype=subtype, **options)
    return bytearray(file.getvalue())


def recording(channels: int = 1) -> np.ndarray:
    """Return FRAMES frames of noise, float32."""
    noise = 0.1 * np.random.default_rng(0).standard_normal((FRAMES, channels))
    return noise.astype(np.float32)


def set_field(name: bytes, offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    """Return a function that sets the header field `offset` bytes after the first `name`."""

    def change(content: bytearray) -> None:
        struct.pack_into(form, content, content.index(name) + offset, value)

    return change


def clear_flac_total(content: bytearray) -> None:
    """Set the total number of samples in STREAMINFO, 36 bits, to 0: unknown."""
    content[21] &= 0xF0
    content[22:26] = bytes(4)


WAV_ZERO = set_field(b"data", 4, "<L", 0)
WAV_MOST = set_field(b"data", 4, "<L", 0xFFFFFFFF)
CASES = {
    "flac": ("FLAC", {}, [clear_flac_total]),
    "wav": ("WAV", {}, [WAV_ZERO]),
    "wav, RIFF size 0": ("WAV", {}, [WAV_ZERO, set_field(b"RIFF", 4, "<L", 0)]),
    "wav, RIFF size of the header": ("WAV", {}, [WAV_ZERO, set_field(b"RIFF", 4, "<L", 36)]),
    "wav, all ones": ("WAV", {}, [WAV_MOST, set_field(b"RIFF", 4, "<L", 0xFFFFFFFF)]),
    "wav, mu-law": ("WAV", {"subtype": "ULAW"}, [WAV_ZERO]),
    "wav, float": ("WAV", {"subtype": "FLOAT"}, [WAV_ZERO]),
    "wav, ADPCM": ("WAV", {"subtype": "IMA_ADPCM"}, [WAV_ZERO]),
    "wav, GSM": ("WAV", {"subtype": "GSM610"}, [WAV_ZERO]),
    "rifx": ("WAV", {"endian": "BIG"}, [set_field(b"data", 4, ">L", 0)]),
    "rf64": ("RF64", {}, [set_field(b"ds64", 8, "<Q", 0), set_field(b"ds64", 16, "<Q", 0)]),
    "rf64, all ones": ("RF64", {}, [set_field(b"ds64", 8, "<Q", 2**64 - 1), set_field(b"ds64", 16, "<Q", 2**64 - 1)]),
    "w64": ("W64", {}, [set_field(b"data\xf3", 16, "<Q", 0)]),
    "w64, size of the header": ("W64", {}, [set_field(b"data\xf3", 16, "<Q", 24)]),
    "au": ("AU", {}, [set_field(b".snd", 8, ">L", 0)]),
    "au, all ones": ("AU", {}, [set_field(b".snd", 8, ">L", 0xFFFFFFFF)]),
    "au, little endian": ("AU", {"endian": "LITTLE"}, [set_field(b"dns.", 8, "<L", 0)]),
    "aiff, no frames": ("AIFF", {}, [set_field(b"COMM", 10, ">L", 0)]),
    "aiff, no bytes": ("AIFF", {}, [set_field(b"COMM", 10, ">L", 0), set_field(b"SSND", 4, ">L", 0)]),
    "aiff, eight bytes": ("AIFF", {}, [set_field(b"COMM", 10, ">L", 0), set_field(b"SSND", 4, ">L", 8)]),
    "caf, -1": ("CAF", {}, [set_field(b"data", 4, ">q", -1)]),
    "caf, 0": ("CAF", {}, [set_field(b"data", 4, ">q", 0)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_shard", [False, True], ids=["file", "shard"])
def test_all_samples_are_read_if_header_length_is_unset(tmp_path, case, in_shard):
    container, options, changes = CASES[case]
    content = encode(container, recording(2 if case in ("flac", "wav") else 1), **options)
    expected, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    for change in changes:
        change(content)
    place = (tmp_path / "a.audio").as_posix(), 0, 0
    if in_shard:
        place = (tmp_path / "a.tar").as_posix(), *write_tar(tmp_path / "a.tar", bytes(content))
    else:
        (tmp_path / "a.audio").write_bytes(content)
    source = AudioSource(*place)
    header = read_header(source)
    assert (header.frames, header.rate, header.missing) == (len(expected), RATE, 0.0)
    samples, rate = read_samples(source)
    assert rate == RATE
    assert np.array_equal(samples, expected)
    assert np.array_equal(np.concatenate(list(read_blocks(source, 0.1))), expected)
    assert np.array_equal(read_samples(AudioSource(*place, 0.5, 0.25))[0], expected[8000:12000])
    assert np.array_equal(read_samples(AudioSource(*place, None, len(expected) / RATE))[0], expected)
    with pytest.raises(UnusableAudio, match=r"it lasts 1\.5. s, not 100000\.00 s as in its row"):
        read_samples(AudioSource(*place, None, 1e5))
    with pytest.raises(UnusableAudio, match="it ends at"):
        read_samples(AudioSource(*place, 1.0, 5.0))


def write_tar(path, content: bytes) -> tuple[int, int]:
    """Write a tar of three members and return the offset and the size of the second."""
    with tarfile.open(path, "w") as shard:
        for name, member in (("first", b"1234567"), ("second", content), ("third", b"x" * 5000)):
            info = tarfile.TarInfo(name)
            info.size = len(member)
            shard.addfile(info, io.BytesIO(member))
    with tarfile.open(path) as shard:
        second = shard.getmember("second")
    return second.offset_data, second.size


@pytest.mark.parametrize(
    ("container", "tail"),
    [("WAV", b""), ("AU", b""), ("RF64", b""), ("CAF", b""), ("WAV", LIST_CHUNK), ("RF64", LIST_CHUNK)],
)
def test_file_without_samples_is_rejected(tmp_path, container, tail):
    content = encode(container, np.zeros((0, 1), np.float32))
    (tmp_path / "a.wav").write_bytes(content + tail)
    with pytest.raises(UnusableAudio, match="it contains no samples"):
        read_header(AudioSource(str(tmp_path / "a.wav")))


def test_wav_of_digital_silence_is_not_parsed_as_chunks(tmp_path):
    content = encode("WAV", np.zeros((4000, 1), np.float32))
    WAV_ZERO(content)
    (tmp_path / "a.wav").write_bytes(content)
    assert read_header(AudioSource(str(tmp_path / "a.wav"))).frames == 4000


def test_trailing_chunk_of_unset_length_wav_is_read_as_samples(tmp_path):
    content = encode("WAV", recording())
    WAV_ZERO(content)
    (tmp_path / "a.wav").write_bytes(content + LIST_CHUNK)
    samples, _ = read_samples(AudioSource(str(tmp_path / "a.wav")))
    assert len(samples) == FRAMES + len(LIST_CHUNK) // 2


def long_flac(path, seconds: int) -> AudioSource:
    """Write silence of unset length, 14 bytes per second."""
    with soundfile.SoundFile(path, "w", 4000, 1, format="FLAC") as file:
        for _ in range(seconds // 600):
            file.write(np.zeros(600 * 4000, np.int16))
    content = bytearray(path.read_bytes())
    clear_flac_total(content)
    path.write_bytes(content)
    return AudioSource(str(path))


def test_length_limits_apply_while_streaming(tmp_path, monkeypatch):
    source = long_flac(tmp_path / "a.flac", 7200)
    assert read_header(source).seconds == 7200
    assert max(map(len, read_blocks(source, 1.0))) == 4000
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    with pytest.raises(UnusableAudio, match="are too much for one read"):
        read_samples(source)
    monkeypatch.setattr(files, "MAX_BYTES", 2**30)
    for name, most in (("MAX_FILE_SECONDS", 3600), ("MAX_FRAMES_PER_BYTE", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, most)
            for read in (read_header, read_samples, lambda each: list(read_blocks(each, 1.0))):
                with pytest.raises(UnusableAudio, match=r"its \d+ bytes decode to more than \d+ s"):
                    read(source)


def test_mp3_without_length_header_is_read_to_its_end(tmp_path):
    samples = recording()[:, 0].repeat(10)
    samples[: len(samples) // 2] = 0.0  # decoders estimate the length from the first frames, which have a low bit rate
    content = encode("MP3", samples, "MPEG_LAYER_III", bitrate_mode="VARIABLE")
    (tmp_path / "said.mp3").write_bytes(content)
    reference, _ = read_samples(AudioSource(str(tmp_path / "said.mp3")))
    at = max(content.find(b"Xing"), content.find(b"Info"))
    content[at : at + 4] = bytes(4)
    (tmp_path / "unsaid.mp3").write_bytes(content)
    source = AudioSource(str(tmp_path / "unsaid.mp3"))
    frames = read_header(source).frames
    # The delay and padding of the encoder are kept, and the header is a frame.
    assert abs(frames - len(reference)) <= 3 * 1152
    headerless, _ = read_samples(source)
    assert len(headerless) == frames == sum(map(len, read_blocks(source, 0.5)))
    assert np.abs(headerless[: len(reference) // 3]).max() < 0.01
    assert np.isclose(headerless[-8000:-4000].std(), reference[-8000:-4000].std(), rtol=0.1)


@pytest.mark.parametrize("shape", [(2, RATE), (1, RATE)])
def test_torchaudio_channel_order_is_rejected_with_a_hint(shape):
    with pytest.raises(DataError, match=r"Give samples\.T\."):
        stream_samples(np.zeros(shape, np.float32), RATE)
    assert sum(map(len, stream_samples(np.zeros(shape, np.float32).T, RATE))) == RATE


def test_prepare_and_transcribe_read_files_of_unset_length(tmp_path, base):
    reference = speak(["एक", "दोन", "घर"])
    (tmp_path / "corpus").mkdir()
    rows = ["audio,text,split"]
    kinds = {"flac": clear_flac_total, "wav": WAV_ZERO}
    for suffix, change in kinds.items():
        content = encode(suffix.upper(), reference)
        (tmp_path / f"whole.{suffix}").write_bytes(content)
        change(content)
        for split in ("train", "valid", "test"):
            (tmp_path / "corpus" / f"{split}.{suffix}").write_bytes(content)
            rows.append(f"{split}.{suffix},एक दोन घर {split} {suffix},{split}")
    (tmp_path / "corpus" / "all.csv").write_text("\n".join(rows), encoding="utf-8")
    flags = ("--format", "csv", "--source", "corpus", "--output", "out", "--table", "all.csv")
    checked(run_in_process("training_scripts/prepare_data.py", *flags, cwd=tmp_path))
    written = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text("utf-8").splitlines()]
    assert [row["duration"] for row in written] == [round(len(reference) / RATE, 4)] * 2
    for suffix in kinds:
        whole, unset = tmp_path / f"whole.{suffix}", tmp_path / "corpus" / f"train.{suffix}"
        assert load_audio(AudioSource(str(unset))).equal(load_audio(AudioSource(str(whole))))
        assert sum(map(len, stream_audio(AudioSource(str(unset))))) == len(reference)
        transcripts = [transcribe(path, base) for path in (whole, unset)]
        assert transcripts[0] == transcripts[1]


def transcribe(path, checkpoint) -> str:
    """Return the transcript that the command prints."""
    flags = (str(path), "--checkpoint", str(checkpoint), "--device", "cpu")
    return checked(run_in_process("training_scripts/transcribe.py", *flags)).stdout
