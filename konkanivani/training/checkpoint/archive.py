"""The zip that torch.save writes, looked over before torch believes a word of it.

A checkpoint may come from a stranger. `weights_only` keeps its pickle from running code, and no more: torch inflates
compressed records to any size that they claim, makes byte arrays of any length that a pickle asks for, and tensors of
any size whose strides are 0. What torch.save never writes is refused here, at the cost of reading the file once.
"""

import contextlib
import os
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

MAX_DIRECTORY_BYTES = 2**21  # of the zip's list of records: some 70 a tensor
MAX_PICKLE_BYTES = 2**21  # of data.pkl: some 130 a tensor, of which the largest preset's checkpoint has 1,800
MAX_DEPTH = 16
RECORD = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
# All that the pickle names: tensors, over typed storages, and the hooks of each, of which there are none.
GLOBAL = re.compile(r"torch [A-Z][A-Za-z0-9]*Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
INTEGERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
BUILDING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4"})
# A zip ends with these three, the first two where it may be larger than 4 GiB; in both ends its directory's size.
END_64, LOCATOR_BYTES, END = struct.Struct("<40xQ8x"), 20, struct.Struct("<4s8xL6x")


def load_archive(path: Path) -> object:
    """What torch.save wrote to `path`, tensors on the CPU; nearly any exception where the file is not as it wrote it.

    A tree of dicts, lists and tuples, with plain numbers, strings and tensors that take no more memory than the file.
    """
    with open(path, "rb") as file:
        _check(file, BUILDING)
    record = _load(path)
    claimed = _bytes_of(record, set(), MAX_DEPTH)
    if claimed > path.stat().st_size:
        raise ValueError(f"its tensors need {claimed} bytes, more than the file has")
    return record


def load_tensors(file: BinaryIO) -> dict[str, torch.Tensor]:
    """The tensors by name that torch.save wrote of another program's module to `file`, on the CPU.

    Nearly any exception where the file is not as it wrote it. A parameter that is in two places has two names.
    """
    _check(file, BUILDING - {"BUILD"})  # of the notes that a module's state carries
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    record = _load(file)
    if not isinstance(record, dict):
        raise ValueError("it contains no named tensors")
    found = dict(dict.items(record))
    if not all(type(name) is str and isinstance(value, torch.Tensor) for name, value in found.items()):
        raise ValueError("it contains other objects than named tensors")
    claimed = sum(_bytes_of(tensor, set(), 0) for tensor in found.values())
    if claimed > 2 * size or not all(tensor.is_contiguous() for tensor in found.values()):
        raise ValueError(f"its tensors need {claimed} bytes, more than the file has")
    return found


def _load(source: Path | BinaryIO) -> object:
    return torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251


def _check(file: BinaryIO, forbidden: frozenset[str]) -> None:
    """Reads the whole file once and refuses what torch.save never writes; `forbidden` are orders of its pickle."""
    _check_end(file)
    with zipfile.ZipFile(file) as archive:
        _check_records(archive.infolist())
        _check_sums(archive)
        _check_pickle(archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl"))), forbidden)


def first_number(path: Path, name: str) -> int:
    """Return the first integer that follows the string `name` in the pickle of what torch.save wrote to `path`.

    Reads no tensor. Raises nearly any exception if the file is not as torch.save wrote it.
    """
    with open(path, "rb") as file:
        _check_end(file)
        with zipfile.ZipFile(file) as archive:
            _check_records(archive.infolist())
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    is_next = False
    for opcode, argument, _ in pickletools.genops(pickled):
        if is_next and opcode.name in INTEGERS:
            return argument
        is_next = is_next or argument == name
    raise ValueError(f"it has no {name}")


def is_whole(path: Path) -> bool:
    """Whether every byte of what torch.save wrote to `path` is on the disk as it was written.

    The disk is asked, not what the system still holds in memory of the file, where that lets itself be forgotten.
    """
    try:
        with open(path, "rb") as file:
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            _check_end(file)
            with zipfile.ZipFile(file) as archive:
                _check_records(archive.infolist())
                _check_sums(archive)
    except Exception:  # a damaged zip can raise nearly anything
        return False
    return True


def _check_end(file: BinaryIO) -> None:
    """Refuses a list of records that alone would fill the memory."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LOCATOR_BYTES - END.size - END_64.size))
    tail = file.read()
    if len(tail) < END.size:
        raise ValueError("it is truncated")
    signature, size = END.unpack(tail[-END.size :])
    if len(tail) == LOCATOR_BYTES + END.size + END_64.size:
        size = max(size, *END_64.unpack(tail[: END_64.size])) if tail.startswith(b"PK\x06\x06") else size
    if signature != b"PK\x05\x06" or size > MAX_DIRECTORY_BYTES:
        raise ValueError("it does not end like a torch.save archive")


def _check_records(records: list[zipfile.ZipInfo]) -> None:
    """Refuses a record that is compressed, is there twice, or has a name that torch.save does not give."""
    folders, names = set(), set()
    for record in records:
        folder, _, name = record.orig_filename.partition("/")
        if not RECORD.fullmatch(name) or name in names:
            raise ValueError(f"its record {record.orig_filename!r:.80} is not from torch.save, or is duplicated")
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(f"its record {name} is compressed")
        if record.external_attr:  # one bit makes it a folder, and torch leaves its tensor as the memory was
            raise ValueError(f"its record {name} has attributes, which torch.save never sets")
        if name == "data.pkl" and record.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"its data.pkl has more than {MAX_PICKLE_BYTES} bytes")
        folders.add(folder)
        names.add(name)
    if len(folders) != 1 or "data.pkl" not in names:
        raise ValueError("it is not a torch.save archive")


def _check_sums(archive: zipfile.ZipFile) -> None:
    damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the CRC of its record {damaged} does not match")


def _check_pickle(pickled: bytes, forbidden: frozenset[str]) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in forbidden or (opcode.name == "GLOBAL" and not GLOBAL.fullmatch(argument)):
            raise ValueError(f"its pickle needs {argument or opcode.name!r:.80}")


def _bytes_of(value: object, seen: set[int], depth: int) -> int:
    """What the tensors of a tree take when each has memory of its own; a ValueError where it is no tree of ours.

    A container that hangs in two places is refused: thirty that each hold the next one twice are a billion to whoever
    goes through them.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            raise ValueError("it contains an unsupported type of tensor")
        return value.numel() * value.element_size()
    if value is None or type(value) in (str, int, float, bool):
        return 0
    if type(value) not in (dict, list, tuple) or id(value) in seen or depth == 0:
        raise ValueError(f"it contains a {type(value).__name__}, or a repeated or too deeply nested object")
    if value:  # there is one empty tuple
        seen.add(id(value))
    if type(value) is dict and not all(type(name) is str for name in value):
        raise ValueError("it contains keys that are not strings")
    parts = value.values() if type(value) is dict else value
    return sum(_bytes_of(part, seen, depth - 1) for part in parts)
