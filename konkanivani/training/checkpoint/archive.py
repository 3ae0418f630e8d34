"""Validation of torch.save archives before torch.load reads them.

A checkpoint may come from an untrusted source. `weights_only` prevents its pickle from running code, but not more:
torch inflates compressed records to any size that they declare, allocates byte arrays of any length that a pickle
contains, and builds tensors of any size with strides of 0. Everything that torch.save never writes is refused here, at
the cost of reading the file once.
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

MAX_DIRECTORY_BYTES = 2**21  # central directory of the zip: about 70 bytes per tensor
MAX_PICKLE_BYTES = 2**21  # data.pkl: about 130 bytes per tensor; the largest preset's checkpoint has 1,800 tensors
MAX_DEPTH = 16
CONTAINERS = (dict, list, tuple)
RECORD = re.compile(
    r"data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
# The only globals of the pickle: typed storages, the constructor of tensors, and their (empty) dict of hooks.
GLOBAL = re.compile(r"torch [A-Z][A-Za-z0-9]*Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict")
INTEGERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
BUILDING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4"})
# A zip ends with these three records; the first two exist only if it may exceed 4 GiB. The first and the last contain
# the size of the central directory.
END_64 = struct.Struct("<40xQ8x")
LOCATOR_BYTES = 20
END = struct.Struct("<4s8xL6x")


def load_archive(path: Path) -> object:
    """Return the object that torch.save wrote to `path`, with tensors on the CPU.

    The object is a tree of dicts, lists and tuples with plain numbers, strings and tensors whose memory does not exceed
    the size of the file. Nearly any exception is raised if the file is not as torch.save wrote it.
    """
    with open(path, "rb") as file:
        _check(file, BUILDING)
    record = _load(path)
    claimed = _bytes_of(record, set(), MAX_DEPTH)
    if claimed > path.stat().st_size:
        raise ValueError(f"its tensors need {claimed} bytes, more than the file has")
    return record


def load_tensors(file: BinaryIO) -> dict[str, torch.Tensor]:
    """Return the named tensors of a state_dict that another program saved to `file`, on the CPU.

    A parameter that is shared by two modules has two names. Nearly any exception is raised if the file is not as
    torch.save wrote it.
    """
    _check(file, BUILDING - {"BUILD"})  # a module's state_dict has a `_metadata` attribute, which BUILD sets
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    record = _load(file)
    if not isinstance(record, dict):
        raise ValueError("it contains no named tensors")
    # Not record.items(): BUILD may have set an attribute of that name. The plain dict also drops `_metadata`.
    found = dict(dict.items(record))
    if not all(type(name) is str and isinstance(value, torch.Tensor) for name, value in found.items()):
        raise ValueError("it contains other objects than named tensors")
    claimed = sum(_bytes_of(tensor, set(), 0) for tensor in found.values())
    # Tied weights are stored once and counted twice. Contiguous tensors exclude strides of 0.
    if claimed > 2 * size or not all(tensor.is_contiguous() for tensor in found.values()):
        raise ValueError(f"its tensors need {claimed} bytes, more than the file has")
    return found


def _load(source: Path | BinaryIO) -> object:
    return torch.load(source, map_location="cpu", weights_only=True)  # noqa: TID251


def _check(file: BinaryIO, forbidden: frozenset[str]) -> None:
    """Read the whole file once and refuse content that torch.save never writes; `forbidden` are pickle opcodes."""
    _check_end(file)
    with zipfile.ZipFile(file) as archive:
        _check_records(archive.infolist())
        _check_sums(archive)
        _check_pickle(archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl"))), forbidden)


def first_number(path: Path, name: str) -> int:
    """Return the first integer that follows the string `name` in the pickle that torch.save wrote to `path`.

    Reads no tensor. Raises nearly any exception if the file is not as torch.save wrote it.
    """
    with open(path, "rb") as file:
        _check_end(file)
        with zipfile.ZipFile(file) as archive:
            _check_records(archive.infolist())
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    is_next = False
    for opcode, argument, _ in pickletools.genops(pickled):
        if is_next and opcode.name in INTEGERS and isinstance(argument, int):
            return argument
        is_next = is_next or argument == name
    raise ValueError(f"it has no {name}")


def is_whole(path: Path) -> bool:
    """Return whether every byte that torch.save wrote to `path` can be read back from the disk.

    The page cache of the file is dropped first, if the system allows it, so that the disk itself is checked.
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
    """Refuse a central directory that alone would exhaust the memory."""
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
    """Refuse a record that is compressed, duplicated, or has a name that torch.save does not use."""
    folders = set()
    names = set()
    for record in records:
        # Not `filename`, which zipfile truncates at a NUL byte.
        folder, _, name = record.orig_filename.partition("/")
        if not RECORD.fullmatch(name) or name in names:
            raise ValueError(f"its record {record.orig_filename!r:.80} is not from torch.save, or is duplicated")
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(f"its record {name} is compressed")
        if record.external_attr:  # one bit marks a folder, whose tensor torch would leave uninitialized
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
        if opcode.name in forbidden or (opcode.name == "GLOBAL" and not GLOBAL.fullmatch(str(argument))):
            raise ValueError(f"its pickle needs {argument or opcode.name!r:.80}")


def _bytes_of(value: object, seen: set[int], depth: int) -> int:
    """Return the bytes of all tensors of a tree if none share memory; raise ValueError for other objects.

    A container that is referenced twice is refused: thirty nested containers that each contain the next one twice would
    be visited a billion times.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            raise ValueError("it contains an unsupported type of tensor")
        return value.numel() * value.element_size()
    if value is None or type(value) in (str, int, float, bool):
        return 0
    # isinstance() alone would accept a subclass.
    if not isinstance(value, (dict, list, tuple)) or type(value) not in CONTAINERS or id(value) in seen or depth == 0:
        raise ValueError(f"it contains a {type(value).__name__}, or a repeated or too deeply nested object")
    if value:  # the empty tuple is a singleton, so its id may repeat
        seen.add(id(value))
    if isinstance(value, dict) and not all(type(name) is str for name in value):
        raise ValueError("it contains keys that are not strings")
    parts = value.values() if isinstance(value, dict) else value
    return sum(_bytes_of(part, seen, depth - 1) for part in parts)
