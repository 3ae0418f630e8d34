"""A header that claims more bytes than its file, or than any valid header, gives one error message."""

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable

import pytest

from konkanivani.corpora import toolkits as shards
from konkanivani.corpora.toolkits import read_members
from konkanivani.inference.recognizer import load_recognizer
from tests.faults.watched_process import watch

BLOCK = 512


def tar_header(name: str = "a.wav", size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytearray:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return bytearray(member.tobuf(tarfile.GNU_FORMAT))


def with_checksum(block: bytearray) -> bytes:
    """Return the block with the correct checksum after a change."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def with_size(block: bytearray, size: int) -> bytes:
    """Return the block with a size in base 256, which may be negative."""
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
    return with_checksum(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def pax_header(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return bytes(tar_header("x", len(data), kind)) + padded(data)


def pax_record(key: str, value: str) -> bytes:
    """Return a PAX record, its length first."""
    rest = f" {key}={value}\n"
    length = next(n for n in range(len(rest), len(rest) + 12) if len(f"{n}{rest}".encode()) == n)
    return f"{length}{rest}".encode()


END = bytes(2 * BLOCK)
PLAIN = bytes(tar_header(size=4)) + padded(b"RIFF")
SPARSE_BYTES = 3 * 2**30  # size of a sparse file: no disk space, but all of it in memory when read

BOMBS: dict[str, tuple[bytes, int]] = {  # start of the file, and its size
    "a PAX header of 2^60 bytes": (with_size(tar_header("x", 0, tarfile.XHDTYPE), 2**60) + PLAIN + END, 0),
    "a PAX header of 3 GiB of existing data": (
        with_size(tar_header("x", 0, tarfile.XHDTYPE), SPARSE_BYTES - 4096) + PLAIN,
        SPARSE_BYTES,
    ),
    "a long name of 2^60 bytes": (with_size(tar_header("x", 0, tarfile.GNUTYPE_LONGNAME), 2**60) + PLAIN + END, 0),
    "a long name of 3 GiB of existing data": (
        with_size(tar_header("x", 0, tarfile.GNUTYPE_LONGNAME), SPARSE_BYTES - 4096) + PLAIN,
        SPARSE_BYTES,
    ),
    "a PAX header of negative size": (with_size(tar_header("x", 0, tarfile.XHDTYPE), -512) + PLAIN + END, SPARSE_BYTES),
    "a member of negative size": (PLAIN + with_size(tar_header(), -512) + PLAIN + END, 0),
    "a member that points back to itself": (with_size(tar_header(), -1024) + PLAIN + END, 0),
    "a PAX size below zero": (pax_header(pax_record("size", "-1536")) + PLAIN + END, 0),
    "nested PAX headers": (pax_header(pax_record("comment", "x")) * 3000 + PLAIN + END, 0),
    "nested long names": (
        (bytes(tar_header("x", 4, tarfile.GNUTYPE_LONGNAME)) + padded(b"abc\0")) * 3000 + PLAIN + END,
        0,
    ),
    "a sparse member without an end": (
        with_checksum(tar_header("s", 0, tarfile.GNUTYPE_SPARSE)[:482] + b"\1" + bytes(29))
        + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * 200_000,
        0,
    ),
    "a sparse map without an end": (
        pax_header(
            pax_record("GNU.sparse.major", "1")
            + pax_record("GNU.sparse.minor", "0")
            + pax_record("GNU.sparse.name", "a.wav")
        )
        + bytes(tar_header(size=2**30))
        + b"9" * 2**20,
        SPARSE_BYTES,
    ),
    "digits for a slow regular expression": (pax_header(b"9" * 2**22) + PLAIN + END, 0),
    "an invalid header in the middle": (PLAIN * 3 + b"\xff" * BLOCK + PLAIN * 3 + END, 0),
    "a member cut off": ((PLAIN * 3)[:-600], 0),
    "a size that is not a number": (
        with_checksum(tar_header()[:124] + b"99999999999\0" + tar_header()[136:]) + PLAIN + END,
        0,
    ),
}

ACCEPTED_BY_SOME_VERSIONS = ("a PAX size below zero",)  # accepted by Ubuntu's Python 3.12.3, in a millisecond


@pytest.mark.parametrize("name", BOMBS)
def test_tar_is_rejected_with_one_sentence(name, tmp_path):
    path = tmp_path / "audio_0.tar"
    begin, length = BOMBS[name]
    path.write_bytes(begin)
    os.truncate(path, max(length, len(begin)))
    verdict = watch(lambda: list(read_members(path)), tmp_path)
    outcomes = ("DataError", "taken") if name in ACCEPTED_BY_SOME_VERSIONS else ("DataError",)
    assert verdict.outcome in outcomes and verdict.fault is None, verdict
    if verdict.outcome == "taken":
        return
    assert "cannot be read as a tar" in verdict.message and "\n" not in verdict.message.strip()
    assert len(verdict.message) < 400


def test_many_global_pax_headers_are_read_within_the_limits(tmp_path):
    """Global records apply to all later members; tarfile copies them into each."""
    rounds = 600
    globals_ = (
        pax_header(b"".join(pax_record(f"k{n}.{m}", "v") for m in range(400)), tarfile.XGLTYPE) + PLAIN
        for n in range(rounds)
    )
    path = tmp_path / "audio_0.tar"
    path.write_bytes(b"".join(globals_) + END)
    results = []
    verdict = watch(lambda: results.append(len(list(read_members(path)))), tmp_path)
    assert (verdict.outcome, verdict.fault) == ("taken", None), verdict
    assert len(list(read_members(path))) == rounds


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_negative_control_a_valid_tar_is_read_like_tarfile(kind, tmp_path):
    path = tmp_path / "audio_0.tar"
    names = ["a.wav", "नमस्कार/देव.wav", "l" * 90 + "/" + "n" * 90 + ".wav", "p" * 90 + "/" + "q" * 60]
    names += [] if kind == tarfile.USTAR_FORMAT else ["d/" * 1500 + "deep.wav", "ä" * 200 + ".wav"]
    with tarfile.open(path, "w", format=kind, encoding="utf-8", pax_headers={"comment": "ours"}) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = number * 700
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
            folder = tarfile.TarInfo(f"folder{number}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
    with tarfile.open(path, encoding="utf-8") as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    assert [(m.name, m.byte_offset, m.byte_count) for m in read_members(path)] == expected
    assert [name for name, *_ in expected] == names


def test_negative_control_without_the_size_limit_a_header_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_HEADER_BYTES", 2**62)
    path = tmp_path / "audio_0.tar"
    path.write_bytes(with_size(tar_header("x", 0, tarfile.GNUTYPE_LONGNAME), 2**29) + PLAIN)
    os.truncate(path, 2**29 + 2**20)
    verdict = watch(lambda: list(read_members(path)), tmp_path)
    assert verdict.fault is not None, verdict


def safetensors_file(head: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(head) if claimed is None else claimed) + head


def json_entries(thousands: int, value: bytes) -> bytes:
    """Return entries with distinct names, each with this value."""
    thousand = b",".join(b'"####%03d":%s' % (number, value) for number in range(1000))
    return b",".join(thousand.replace(b"####", b"%04d" % number) for number in range(thousands))


def tensor_header(**shapes: object) -> bytes:
    entry = {"__metadata__": {"konkanivani": json.dumps({"format": 1})}}
    return json.dumps(entry | shapes).encode()


def tensor_entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS_BOMBS: dict[str, Callable[[], bytes]] = {
    "a header of 2^60 bytes": lambda: safetensors_file(b"{}", 2**60),
    "a header of 2^64 - 1 bytes": lambda: safetensors_file(b"{}", 2**64 - 1),
    "a header of 2 GiB": lambda: safetensors_file(b'{"__metadata__":{}}', 2**31),
    "a header of 0 bytes": lambda: safetensors_file(b'{"__metadata__":{}}', 0),
    "100 MB of JSON": lambda: safetensors_file(b'{"__metadata__":{"a":"' + b"x" * 10**8 + b'"}}'),
    "99 MB of small entries": lambda: safetensors_file(b"{" + json_entries(9000, b"[]") + b"}"),
    "99 MB of metadata entries": lambda: safetensors_file(b'{"__metadata__":{' + json_entries(7500, b'""') + b"}}"),
    "nested lists": lambda: safetensors_file(b"[" * 10**6 + b"]" * 10**6),
    "nested objects": lambda: safetensors_file(b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    "a description of nested lists": lambda: safetensors_file(
        json.dumps({"__metadata__": {"konkanivani": "[" * 10**6 + "]" * 10**6}}).encode()
    ),
    "overlapping offsets": lambda: (
        safetensors_file(tensor_header(a=tensor_entry([4], 0, 16), b=tensor_entry([4], 8, 24))) + bytes(24)
    ),
    "a gap between offsets": lambda: (
        safetensors_file(tensor_header(a=tensor_entry([4], 0, 16), b=tensor_entry([4], 32, 48))) + bytes(48)
    ),
    "offsets beyond the file": lambda: safetensors_file(tensor_header(a=tensor_entry([2**40], 0, 2**42))) + bytes(16),
    "decreasing offsets": lambda: safetensors_file(tensor_header(a=tensor_entry([4], 16, 0))) + bytes(16),
    "a shape whose product overflows": lambda: (
        safetensors_file(tensor_header(a=tensor_entry([2**32, 2**32, 4], 0, 16))) + bytes(16)
    ),
    "a shape of negative numbers": lambda: safetensors_file(tensor_header(a=tensor_entry([-2, -2], 0, 16))) + bytes(16),
    "a shape of 10^5 axes": lambda: safetensors_file(tensor_header(a=tensor_entry([1] * 10**5, 0, 4))) + bytes(4),
    "an empty tensor with 2^60 columns": lambda: safetensors_file(tensor_header(a=tensor_entry([0, 2**60], 0, 0))),
}


@pytest.mark.parametrize("name", SAFETENSORS_BOMBS)
def test_safetensors_file_is_rejected_with_one_sentence(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(SAFETENSORS_BOMBS[name]())
    verdict = watch(lambda: load_recognizer(path, device="cpu"), tmp_path)
    assert (verdict.outcome, verdict.fault) == ("CheckpointError", None), verdict
    assert "\n" not in verdict.message.strip() and len(verdict.message) < 600
