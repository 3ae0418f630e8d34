"""A header that claims more than its file contains, or more than any header does, costs only an error message."""

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
from tests.faults.watching import watch

BLOCK = 512


def header(name: str = "a.wav", size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytearray:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return bytearray(member.tobuf(tarfile.GNU_FORMAT))


def summed(block: bytearray) -> bytes:
    """Return the block with the correct checksum after a change."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def sized(block: bytearray, size: int) -> bytes:
    """Return the block with a size in base 256, which may be negative."""
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
    return summed(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def pax(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return bytes(header("x", len(data), kind)) + padded(data)


def record(key: str, value: str) -> bytes:
    """Return a PAX record, its length first."""
    rest = f" {key}={value}\n"
    length = next(n for n in range(len(rest), len(rest) + 12) if len(f"{n}{rest}".encode()) == n)
    return f"{length}{rest}".encode()


END = bytes(2 * BLOCK)
PLAIN = bytes(header(size=4)) + padded(b"RIFF")
SPARSE_BYTES = 3 * 2**30  # size of a sparse file: no disk space, but all of it in memory when read

BOMBS: dict[str, tuple[bytes, int]] = {  # start of the file, and its size
    "a PAX header of 2^60 bytes": (sized(header("x", 0, tarfile.XHDTYPE), 2**60) + PLAIN + END, 0),
    "a PAX header of 3 GiB that are there": (
        sized(header("x", 0, tarfile.XHDTYPE), SPARSE_BYTES - 4096) + PLAIN,
        SPARSE_BYTES,
    ),
    "a long name of 2^60 bytes": (sized(header("x", 0, tarfile.GNUTYPE_LONGNAME), 2**60) + PLAIN + END, 0),
    "a long name of 3 GiB that are there": (
        sized(header("x", 0, tarfile.GNUTYPE_LONGNAME), SPARSE_BYTES - 4096) + PLAIN,
        SPARSE_BYTES,
    ),
    "a PAX header of negative size": (sized(header("x", 0, tarfile.XHDTYPE), -512) + PLAIN + END, SPARSE_BYTES),
    "a member of negative size": (PLAIN + sized(header(), -512) + PLAIN + END, 0),
    "a member that leads back to itself": (sized(header(), -1024) + PLAIN + END, 0),
    "a PAX size below zero": (pax(record("size", "-1536")) + PLAIN + END, 0),
    "PAX headers in each other": (pax(record("comment", "x")) * 3000 + PLAIN + END, 0),
    "long names in each other": (
        (bytes(header("x", 4, tarfile.GNUTYPE_LONGNAME)) + padded(b"abc\0")) * 3000 + PLAIN + END,
        0,
    ),
    "a sparse member without an end": (
        summed(header("s", 0, tarfile.GNUTYPE_SPARSE)[:482] + b"\1" + bytes(29))
        + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * 200_000,
        0,
    ),
    "a sparse map without an end": (
        pax(record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.name", "a.wav"))
        + bytes(header(size=2**30))
        + b"9" * 2**20,
        SPARSE_BYTES,
    ),
    "digits for a slow expression": (pax(b"9" * 2**22) + PLAIN + END, 0),
    "a header in the middle that is none": (PLAIN * 3 + b"\xff" * BLOCK + PLAIN * 3 + END, 0),
    "a member cut off": ((PLAIN * 3)[:-600], 0),
    "a size that is no number": (summed(header()[:124] + b"99999999999\0" + header()[136:]) + PLAIN + END, 0),
}

OVERLOOKED = ("a PAX size below zero",)  # accepted by Ubuntu's Python 3.12.3, in a millisecond


@pytest.mark.parametrize("name", BOMBS)
def test_a_tar_is_refused_in_a_sentence(name, tmp_path):
    path = tmp_path / "audio_0.tar"
    begin, length = BOMBS[name]
    path.write_bytes(begin)
    os.truncate(path, max(length, len(begin)))
    verdict = watch(lambda: list(read_members(path)), tmp_path)
    outcomes = ("DataError", "taken") if name in OVERLOOKED else ("DataError",)
    assert verdict.outcome in outcomes and verdict.fault is None, verdict
    if verdict.outcome == "taken":
        return
    assert "cannot be read as a tar" in verdict.message and "\n" not in verdict.message.strip()
    assert len(verdict.message) < 400


def test_headers_for_all_that_pile_up_cost_no_more_each(tmp_path):
    """Global records apply to all later members; tarfile copies them into each."""
    rounds = 600
    globals_ = (
        pax(b"".join(record(f"k{n}.{m}", "v") for m in range(400)), tarfile.XGLTYPE) + PLAIN for n in range(rounds)
    )
    path = tmp_path / "audio_0.tar"
    path.write_bytes(b"".join(globals_) + END)
    found = []
    verdict = watch(lambda: found.append(len(list(read_members(path)))), tmp_path)
    assert (verdict.outcome, verdict.fault) == ("taken", None), verdict
    assert len(list(read_members(path))) == rounds


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_negative_control_a_sound_tar_is_read_as_tarfile_reads_it(kind, tmp_path):
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


def test_negative_control_without_the_bound_a_header_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_HEADER_BYTES", 2**62)
    path = tmp_path / "audio_0.tar"
    path.write_bytes(sized(header("x", 0, tarfile.GNUTYPE_LONGNAME), 2**29) + PLAIN)
    os.truncate(path, 2**29 + 2**20)
    verdict = watch(lambda: list(read_members(path)), tmp_path)
    assert verdict.fault is not None, verdict


def bundle(head: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(head) if claimed is None else claimed) + head


def entries(thousands: int, value: bytes) -> bytes:
    """Return entries with distinct names, each with this value."""
    thousand = b",".join(b'"####%03d":%s' % (number, value) for number in range(1000))
    return b",".join(thousand.replace(b"####", b"%04d" % number) for number in range(thousands))


def tensors(**shapes: object) -> bytes:
    entry = {"__metadata__": {"konkanivani": json.dumps({"format": 1})}}
    return json.dumps(entry | shapes).encode()


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BUNDLES: dict[str, Callable[[], bytes]] = {
    "a header of 2^60 bytes": lambda: bundle(b"{}", 2**60),
    "a header of 2^64 - 1 bytes": lambda: bundle(b"{}", 2**64 - 1),
    "a header of 2 GiB": lambda: bundle(b'{"__metadata__":{}}', 2**31),
    "a header of 0 bytes": lambda: bundle(b'{"__metadata__":{}}', 0),
    "100 MB of JSON": lambda: bundle(b'{"__metadata__":{"a":"' + b"x" * 10**8 + b'"}}'),
    "99 MB of small entries": lambda: bundle(b"{" + entries(9000, b"[]") + b"}"),
    "99 MB of metadata entries": lambda: bundle(b'{"__metadata__":{' + entries(7500, b'""') + b"}}"),
    "brackets in brackets": lambda: bundle(b"[" * 10**6 + b"]" * 10**6),
    "objects in objects": lambda: bundle(b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    "a description in brackets": lambda: bundle(
        json.dumps({"__metadata__": {"konkanivani": "[" * 10**6 + "]" * 10**6}}).encode()
    ),
    "overlapping offsets": lambda: bundle(tensors(a=tensor([4], 0, 16), b=tensor([4], 8, 24))) + bytes(24),
    "a gap between offsets": lambda: bundle(tensors(a=tensor([4], 0, 16), b=tensor([4], 32, 48))) + bytes(48),
    "offsets beyond the file": lambda: bundle(tensors(a=tensor([2**40], 0, 2**42))) + bytes(16),
    "offsets that run back": lambda: bundle(tensors(a=tensor([4], 16, 0))) + bytes(16),
    "a shape whose product overflows": lambda: bundle(tensors(a=tensor([2**32, 2**32, 4], 0, 16))) + bytes(16),
    "a shape of negative numbers": lambda: bundle(tensors(a=tensor([-2, -2], 0, 16))) + bytes(16),
    "a shape of 10^5 axes": lambda: bundle(tensors(a=tensor([1] * 10**5, 0, 4))) + bytes(4),
    "nothing, 2^60 times": lambda: bundle(tensors(a=tensor([0, 2**60], 0, 0))),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_is_refused_in_a_sentence(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BUNDLES[name]())
    verdict = watch(lambda: load_recognizer(path, device="cpu"), tmp_path)
    assert (verdict.outcome, verdict.fault) == ("CheckpointError", None), verdict
    assert "\n" not in verdict.message.strip() and len(verdict.message) < 600
