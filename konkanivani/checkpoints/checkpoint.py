"""Checkpoint files: reading, writing, verification, and the provenance of their weights.

A checkpoint has torch's zip format and contains tensors, strings, bytes (as a uint8 tensor) and plain numbers only.
Reading checks the CRC of every record first, because torch.load does not, and refuses content that torch.save never
writes.
"""

import contextlib
import errno
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from konkanivani.errors import CheckpointError, ResourceError
from konkanivani.files import conversion_hint

# --------------------
# Validation of torch.save archives before torch.load reads them.
#
# A checkpoint may come from an untrusted source. `weights_only` prevents its pickle from running code, but not more:
# torch inflates compressed records to any size that they declare, allocates byte arrays of any length that a pickle
# contains, and builds tensors of any size with strides of 0. Everything that torch.save never writes is refused here,
# at the cost of reading the file once.


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
    tensors = dict(dict.items(record))
    if not all(type(name) is str and isinstance(value, torch.Tensor) for name, value in tensors.items()):
        raise ValueError("it contains other objects than named tensors")
    claimed = sum(_bytes_of(tensor, set(), 0) for tensor in tensors.values())
    # Tied weights are stored once and counted twice. Contiguous tensors exclude strides of 0.
    if claimed > 2 * size or not all(tensor.is_contiguous() for tensor in tensors.values()):
        raise ValueError(f"its tensors need {claimed} bytes, more than the file has")
    return tensors


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


# --------------------
# Checkpoint file: named stateful parts in one verified file.


PRETRAINED_STATE = "pretrained"  # key of the description of a pretrained model in `states`
FORMAT = 2  # in format 1 the layer norm that is now at the input of a block was at its output
DAMAGE = (None, errno.EINVAL, errno.EIO)  # errno of a read error that is caused by the content of the file


class ScoreKind(IntEnum):
    """Kind of a validation score. Lower is better; scores of different kinds cannot be compared."""

    UNKNOWN = 0
    """No epoch was validated, or by an older version."""
    EPOCH = 1
    """Negative number of the epoch, without validation: the latest is the best."""
    CER = 2
    LOSS = 3


class OtherVersionError(CheckpointError):
    """A checkpoint of another version of this trainer, valid as far as this version can check."""


class Stateful(Protocol):
    """A part of the training run whose state is saved, with the state_dict protocol of torch."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file.

    Args:
        config: text of `config_to_text`.
        plan_digest: digest of the epoch plan (order of the data); if it differs on resumption, the epoch is restarted.
        states: state by name of the part.
    """

    config: str
    tokenizer: bytes
    vocab_size: int
    step: int
    plan_digest: int
    states: dict[str, dict[str, object]]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write and fsync `path`; on failure remove the file and raise a ResourceError."""
    record = {"format": FORMAT} | vars(checkpoint)
    record["tokenizer"] = torch.frombuffer(bytearray(checkpoint.tokenizer), dtype=torch.uint8)
    record["states"] = {name: dict(state) for name, state in checkpoint.states.items()}
    try:
        with open(path, "wb") as file:
            torch.save(record, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # a full disk raises either
        with contextlib.suppress(OSError):  # read-only file system
            path.unlink(missing_ok=True)
        if error.__context__ is not None and not isinstance(error.__context__, Exception):
            # A signal handler's exception, which torch's zip writer replaces by an error of its own.
            raise error.__context__ from None
        # The message of torch's own error names source lines of PyTorch, not the cause.
        reasons = (getattr(cause, "strerror", None) for cause in (error, error.__context__))
        reason = next(filter(None, reasons), str(error).splitlines()[0])
        target = str(path).removesuffix(".partial")
        raise ResourceError(
            f"The checkpoint {target} could not be written: {reason}. Free disk space, or repair the folder."
        ) from None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the verified checkpoint at `path`, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or not a checkpoint of this version.
        ResourceError: the file cannot be read now (permissions, not enough memory).
    """
    path = Path(path)
    check_is_there(path)
    try:
        return _parse_record(load_archive(path), path)
    except CheckpointError:
        raise
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno in DAMAGE:
            raise _damage_error(path, error) from None
        # The file may be valid, so the caller must not rename it to *.damaged.
        reason = error.strerror or error if isinstance(error, OSError) else "not enough memory"
        raise ResourceError(f"The checkpoint {path} cannot be read: {reason}. Fix that and start again.") from None
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        raise _damage_error(path, error) from None


def read_step(path: Path) -> int | None:
    """Return the step of the checkpoint at `path` without reading its tensors; None if it cannot be read."""
    try:
        return first_number(path, "step")
    except Exception:  # a damaged zip or pickle can raise nearly anything
        return None


def _damage_error(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(
        f"The checkpoint {path} is damaged or not a KonkaniVani checkpoint "
        f"({reason:.300}){conversion_hint(path)}. Use another one, or --resume auto for the newest valid one."
    )


def check_is_there(path: Path) -> None:
    """Raise a CheckpointError if there is no file at `path`, or a file of another program."""
    advice = "Give the path of a checkpoint_*.pt file."
    if path.suffix == ".nemo":
        advice = f"It is a NeMo file: convert it with konkanivani import {path} {path.with_suffix('.pt')}."
    elif path.suffix == ".safetensors" and os.path.isfile(path) and not zipfile.is_zipfile(path):
        advice = (
            "It is a safetensors file: use a bundle with konkanivani transcribe; here give the checkpoint that it was "
            "exported from."
        )
    elif os.path.isfile(path):
        return
    elif os.path.isfile(path / "config.json"):
        advice = f"It is a model folder: use --pretrained {path} for a Whisper model, konkanivani import for others."
    elif os.path.isdir(path):
        advice = f"It is a folder: give one of its files, or --checkpoint_dir {path} --resume auto to resume training."
    raise CheckpointError(f"There is no checkpoint at {path}. {advice}")


def _parse_record(record: object, path: Path) -> Checkpoint:
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CheckpointError(f"The file {path} is not a KonkaniVani checkpoint. Give the path of one.")
    if record["format"] != FORMAT:
        age = "newer" if record["format"] > FORMAT else "older"
        raise OtherVersionError(
            f"The checkpoint {path} has format {record['format']}, of another, {age} version; this version "
            f"reads format {FORMAT}. Use the version that wrote it, or another checkpoint."
        )
    tokenizer = record["tokenizer"]
    states = record["states"]
    sound = (
        isinstance(record["config"], str)
        and isinstance(tokenizer, torch.Tensor)
        and tokenizer.dtype == torch.uint8
        and tokenizer.dim() == 1
        and all(type(record[name]) is int for name in ("vocab_size", "step", "plan_digest"))
        and 0 < record["vocab_size"] < 2**31
        and 0 <= record["step"] < 2**63
        and isinstance(states, dict)
        and all(isinstance(state, dict) for state in states.values())
    )
    if not sound:
        raise CheckpointError(f"The checkpoint {path} has missing or invalid fields. Use another one.")
    values = {field.name: record[field.name] for field in fields(Checkpoint)}
    return Checkpoint(**values | {"tokenizer": tokenizer.numpy().tobytes()})


def check_states(checkpoint: Checkpoint, known: Collection[str]) -> None:
    """Raise a CheckpointError if the checkpoint has a state of an unknown part, which the next save would lose."""
    unknown = sorted(set(checkpoint.states) - set(known))
    if unknown:
        raise CheckpointError(
            f"The checkpoint has a state of {unknown[0]!r:.80}, which this version does not support. Resume "
            "with the version that wrote it, or start a new run from its weights with --init_from."
        )


def load_states(checkpoint: Checkpoint, stateful: Mapping[str, Stateful]) -> None:
    """Load the state of every part; raise a CheckpointError if one is missing or does not fit.

    Tensors are removed from the checkpoint as soon as their part is loaded: a large model does not fit in memory twice.
    """
    for name, part in stateful.items():
        if name == "splits" and name not in checkpoint.states:
            continue  # written by an older version without an OOM history
        if name not in checkpoint.states:
            raise CheckpointError(
                f"The checkpoint has no {name} state (averaged checkpoints have none), so it cannot be "
                "resumed. Start a new run from its weights with --init_from."
            )
        try:
            if name == "scaler" and not checkpoint.states[name]:
                continue  # saved without loss scaling, resumed with it
            part.load_state_dict(state := checkpoint.states[name])
            for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
                del state[key]
        except (RuntimeError, TypeError, AttributeError) as error:
            # The first line of Module.load_state_dict's error is generic; the second names missing or unexpected keys.
            reason = (str(error) or type(error).__name__).splitlines()[:2][-1].strip().rstrip(".")
            raise CheckpointError(
                f"The checkpoint's {name} cannot be loaded: {reason:.200}. Use another checkpoint, or the version that "
                "wrote it."
            ) from None


def model_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the model weights in a checkpoint; raise a CheckpointError if one of them is not a tensor."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.states["model"].items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError("The checkpoint contains no model weights. Use another one.")
        weights[name] = tensor
    return weights


def check_finite(name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise a CheckpointError, which names the file `name`, if a weight is not a finite number."""
    for tensor_name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"The weights {tensor_name} of {name} are not finite numbers. Use another model.")


# --------------------
# Source of imported weights, stored in every file that is derived from them.


PROVENANCE_STATE = "provenance"  # key in a checkpoint's states


@dataclass(frozen=True)
class Provenance:
    """Name and SHA-256 of the file that a model was imported from, with its licence, software and language; stateful.

    `licence` is "" if the file names none, `language` is "" if one tokenizer serves all languages.
    """

    file: str
    sha256: str
    licence: str
    saved_by: str
    language: str

    def state_dict(self) -> dict[str, object]:
        """Return the fields as strings."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise a CheckpointError if the resumed run was started from another model."""
        if dict(state) != self.state_dict():
            raise CheckpointError("The run was started from another model. Use another checkpoint.")


def provenance_of(words: object) -> Provenance | None:
    """Return the provenance stored in a file, or None if there is none.

    Raises a ValueError if it does not have exactly the fields of `Provenance`, all strings.
    """
    if words is None:
        return None
    # The record comes from an untrusted file: require exactly the known fields.
    names = {field.name for field in fields(Provenance)}
    if not isinstance(words, dict) or set(words) != names or not all(type(word) is str for word in words.values()):
        raise ValueError("its provenance record has unknown fields")
    return Provenance(**words)


def read_provenance(checkpoint: Checkpoint | None) -> Provenance | None:
    """Return the provenance of a checkpoint's weights, or None; raise a CheckpointError if it is malformed."""
    try:
        return provenance_of(checkpoint.states.get(PROVENANCE_STATE)) if checkpoint else None
    except ValueError as error:
        raise CheckpointError(f"The checkpoint cannot be used: {error}. Use another one.") from None


def provenance_part(checkpoint: Checkpoint | None) -> dict[str, Provenance]:
    """Return the provenance as a stateful part of a run, which its checkpoints save; empty if there is none."""
    provenance = read_provenance(checkpoint)
    return {PROVENANCE_STATE: provenance} if provenance else {}
