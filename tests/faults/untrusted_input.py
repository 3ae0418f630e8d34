"""Malicious checkpoints, made from a valid one."""

import contextlib
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED

import torch
import torch._dynamo  # creates a folder when it is first loaded, as building a model on `meta` does

from konkanivani.checkpoints.averaging import NamedCheckpoint, average_checkpoints
from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.recipe.build import build_run
from tests.run_setup import begin_run

ROOT_OF_ZIP = "archive"


@dataclass(frozen=True)
class ValidCheckpoint:
    """Records of a valid checkpoint, by their names in the zip."""

    path: Path
    records: Mapping[str, bytes]

    @property
    def pickled(self) -> bytes:
        return self.records["data.pkl"]

    def content(self) -> dict:
        return torch.load(self.path, weights_only=True)  # noqa: TID251


def read_valid_checkpoint(path: Path) -> ValidCheckpoint:
    """Read the records of a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        return ValidCheckpoint(path, {name.partition("/")[2]: archive.read(name) for name in archive.namelist()})


def write_records(path: Path, records: Mapping[str, bytes], compression: int = ZIP_STORED) -> None:
    """Write a zip of these records with correct CRCs."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(f"{ROOT_OF_ZIP}/{name}", content)


def load_in_all_ways(path: Path) -> None:
    """Use a foreign checkpoint in every way except for training; raise the first error."""
    errors = []
    uses = (
        lambda path: build_run(begin_run(["--resume", str(path), "--device", "cpu"])),
        _init_from,
        lambda path: load_recognizer(path, device="cpu"),
        lambda path: average_checkpoints([NamedCheckpoint(str(path), read_checkpoint(path))]),
    )
    for use in uses:
        try:
            use(path)
        except Exception as error:
            errors.append(error)
    # Errors without an exit code are unexpected, so they come first.
    for error in sorted(errors, key=lambda error: hasattr(error, "exit_code")):
        raise error


def _init_from(path: Path) -> None:
    fresh, manifest = path.parent / "fresh", path.parent / "train.jsonl"
    manifest.touch()
    flags = ("--init_from", str(path), "--checkpoint_dir", str(fresh), "--log_dir", str(fresh), "--preset", "minimal")
    begin_run([*flags, "--device", "cpu", "--train_manifest", str(manifest)])


class CallOnUnpickle:
    """Object that calls the function when it is unpickled."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


def with_call(function: Callable, *arguments: object, protocol: int = 2) -> Callable[[ValidCheckpoint, Path], None]:
    """Write a checkpoint whose pickle calls the function during the load, and then has the valid content."""

    def write(valid: ValidCheckpoint, path: Path) -> None:
        call = pickle.dumps(CallOnUnpickle(function, *arguments), protocol)
        # The result is dropped ("0" instead of "."), so that the rest of the pickle stays valid.
        pickled = call[:2] + call[2:].removesuffix(b".") + b"0" + valid.pickled[2:]
        write_records(path, {**valid.records, "data.pkl": pickled})

    return write


def pickled(content: bytes) -> Callable[[ValidCheckpoint, Path], None]:
    return lambda valid, path: write_records(path, {**valid.records, "data.pkl": content})


def with_part(instructions: bytes) -> Callable[[ValidCheckpoint, Path], None]:
    """Write a checkpoint with one more field, built by these pickle instructions, and a record of one byte for it."""

    def write(valid: ValidCheckpoint, path: Path) -> None:
        more = b"X\x04\x00\x00\x00more" + instructions + b"s."
        records = {**valid.records, "data/9999": b"\0"}
        write_records(path, records | {"data.pkl": valid.pickled.removesuffix(b".") + more})

    return write


def with_fields(**fields: object) -> Callable[[ValidCheckpoint, Path], None]:
    """Write a valid torch checkpoint with other fields."""
    return lambda valid, path: torch.save(valid.content() | fields, path)


def with_settings(*lines: str) -> Callable[[ValidCheckpoint, Path], None]:
    def write(valid: ValidCheckpoint, path: Path) -> None:
        content = valid.content()
        torch.save(content | {"config": content["config"] + "".join(f"{line}\n" for line in lines)}, path)

    return write


def with_states(change: Callable[[dict], None]) -> Callable[[ValidCheckpoint, Path], None]:
    def write(valid: ValidCheckpoint, path: Path) -> None:
        content = valid.content()
        change(content["states"])
        torch.save(content, path)

    return write


def _pickled_integer(value: int) -> bytes:
    """Return the pickle instruction that pushes an integer."""
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _pickled_tensor(size: int, stride: int, claimed: int = 1) -> bytes:
    """Return pickle instructions for a tensor over the storage of record 9999, which claims `claimed` elements."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nByteStorage\nX\x04\x00\x00\x009999X\x03\x00\x00\x00cpu"
    shape = _pickled_integer(size) + b"\x85" + _pickled_integer(stride) + b"\x85"
    rest = b"\x89ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + _pickled_integer(claimed)
        + b"tQK\x00"
        + shape
        + rest
        + b"tR"
    )


# A list of two references to a list of two references, and so on: exponential size.
NESTED_LISTS = b"]" + b"".join(b"q%c0](h%ch%ce" % (level, level, level) for level in range(100, 160))


def _with_duplicate_record(valid: ValidCheckpoint, path: Path) -> None:
    write_records(path, valid.records)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{ROOT_OF_ZIP}/data.pkl", pickle.dumps(CallOnUnpickle(os.system, "touch exploded"), 2))


def with_records(
    make: Callable[[], dict[str, bytes]], compression: int = ZIP_STORED
) -> Callable[[ValidCheckpoint, Path], None]:
    """Write a checkpoint with these records added or replaced."""
    return lambda valid, path: write_records(path, {**valid.records, **make()}, compression)


def _with_false_directory_size(valid: ValidCheckpoint, path: Path) -> None:
    """Claim 2^60 bytes of directory in the end record of the zip."""
    write_records(path, valid.records)
    end = bytearray(path.read_bytes())
    directory = len(end) - 22
    long_end = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2**50, 2**50, 2**60, 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, directory, 1)
    path.write_bytes(bytes(end[:directory]) + long_end + locator + bytes(end[directory:]))


def _with_false_record_size(valid: ValidCheckpoint, path: Path) -> None:
    write_records(path, valid.records)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02") + 20  # both sizes of the last record in the directory
    content[place : place + 8] = struct.pack("<LL", 2**32 - 2, 2**32 - 2)
    path.write_bytes(bytes(content))


def _legacy_pickle(valid: ValidCheckpoint, path: Path) -> None:
    torch.save(
        {"format": 1, "config": CallOnUnpickle(os.system, "touch exploded")}, path, _use_new_zipfile_serialization=False
    )


def _with_tokenizer(content: bytes) -> Callable[[ValidCheckpoint, Path], None]:
    return with_fields(tokenizer=torch.frombuffer(bytearray(content), dtype=torch.uint8))


SPARSE = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2**40,))
ZERO_STRIDE = torch.zeros(1).expand(2**40)


HUGE_MODEL_SETTINGS = ("--d_model 65536", "--attention_heads 2", "--encoder_layers 128", "--decoder_layers 128")
HOSTILE: dict[str, Callable[[ValidCheckpoint, Path], None]] = {
    "calls os.system": with_call(os.system, "touch exploded"),
    "calls eval": with_call(eval, "open('exploded', 'w')"),
    "calls exec": with_call(exec, "open('exploded', 'w')"),
    "calls open": with_call(open, "exploded", "w"),
    "calls by protocol 4": with_call(os.system, "touch exploded", protocol=4),
    "calls through an instance": pickled(b"\x80\x02(S'touch exploded'\nios\nsystem\n."),
    "calls through a new object": pickled(b"\x80\x02cposix\nsystem\nX\x0e\x00\x00\x00touch exploded\x85\x81."),
    "sets attributes": with_part(b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb"),
    "a persistent id that calls": with_part(b"cposix\nsystem\nX\x0e\x00\x00\x00touch exploded\x85RQ"),
    "nested persistent ids": with_part(b"(X\x07\x00\x00\x00storage" * 50 + b"tQ" * 50),
    "8 GiB of byte array": with_part(b"c__builtin__\nbytearray\n" + _pickled_integer(2**33) + b"\x85R"),
    "a tensor of 2^60 elements": with_part(_pickled_tensor(2**60, 1)),
    "a stride of 2^60": with_part(_pickled_tensor(2, 2**60)),
    "a size below zero": with_part(_pickled_tensor(-5, 1)),
    "a tensor with stride 0": with_part(_pickled_tensor(2**40, 0)),
    "a storage beyond its record": with_part(_pickled_tensor(2**20, 1, claimed=2**20)),
    "a storage of 2^60": with_part(_pickled_tensor(1, 1, claimed=2**60)),
    "a sparse tensor": with_fields(more=SPARSE),
    "a tensor without memory": with_fields(more=torch.empty(2**50, device="meta")),
    "a weight with stride 0": with_states(lambda s: s["model"].update({next(iter(s["model"])): ZERO_STRIDE})),
    "deeply nested lists": with_part(b"]" * 100_000 + b"a" * 99_999),
    "exponentially many list references": with_part(NESTED_LISTS),
    "a list in itself": with_part(b"]q\xf0h\xf0a"),
    "an invalid UTF-8 string": with_part(b"X\x02\x00\x00\x00\xff\xfe"),
    "a string of 4 GiB": with_part(b"X\xff\xff\xff\xff"),
    "a pickle without an end": pickled(b"\x80\x02}"),
    "a duplicate record": _with_duplicate_record,
    "a record outside the archive": with_records(lambda: {"../../exploded": b""}),
    "a record of a script": with_records(lambda: {"constants.pkl": b"."}),
    "a compressed bomb": with_records(lambda: {"data/0": bytes(2**28)}, ZIP_DEFLATED),  # a thousand times as large
    "a compressed pickle": with_records(lambda: {"data.pkl": b"\x80\x02" + b"]0" * 2**25 + b"]."}, ZIP_DEFLATED),
    "50,000 records": with_records(lambda: {f"data/{number}": b"" for number in range(10_000, 60_000)}),
    "2^60 bytes of directory": _with_false_directory_size,
    "a record longer than the file": _with_false_record_size,
    "a zip behind another file": lambda valid, path: path.write_bytes(b"#!/bin/sh\n" * 9 + valid.path.read_bytes()),
    "a TorchScript archive": lambda _, path: torch.jit.script(torch.nn.Linear(2, 2)).save(str(path)),
    "an old pickle": _legacy_pickle,
    "no fields": pickled(b"\x80\x02}X\x06\x00\x00\x00formatK\x02s."),
    "states in a list": with_fields(states=[]),
    "a state that is a list": with_fields(states={"model": []}),
    "a tokenizer of floats": with_fields(tokenizer=torch.zeros(3)),
    "a step of a thousand digits": with_fields(step=10**600),
    "a vocabulary below zero": with_fields(vocab_size=-1),
    "a vocabulary of 2^40": with_fields(vocab_size=2**40),
    "no model": with_states(lambda states: states.pop("model")),
    "counters below zero": with_states(lambda states: states["progress"].update(epoch=-1)),
    "a model of 10^13 weights": with_settings(*HUGE_MODEL_SETTINGS),
    "a model 2^60 wide": with_settings(f"--d_model {2**60}"),
    "a million layers": with_settings("--encoder_layers 1000000"),
    "no heads": with_settings("--attention_heads 0"),
    "settings with code": with_settings("--epochs __import__('os').system('touch exploded')"),
    "deeply nested settings": with_settings("--epochs " + "(" * 10_000),
    "an absolute log folder": with_settings("--log_dir '/tmp/konkanivani_elsewhere'"),
    "a log folder above": with_settings("--log_dir '../../konkanivani_elsewhere'"),
    "a run name that is a path": with_settings("--run_name '../../../elsewhere'"),
    "a tokenizer of noise": _with_tokenizer(bytes(range(256)) * 8),
    "no tokenizer": with_fields(tokenizer=torch.zeros(0, dtype=torch.uint8)),
    "a tokenizer that claims 2 GiB": _with_tokenizer(b"\x0a\xff\xff\xff\xff\x07" + bytes(64)),
}


def is_code_executed(path: Path) -> bool:
    """Return whether an unsafe load of the file runs its code: the negative control of all other tests."""
    marker, here = path.parent / "exploded", os.getcwd()
    os.chdir(path.parent)
    try:
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # errors after the call do not matter
            warnings.simplefilter("ignore")
            torch.load(path, weights_only=False)  # noqa: TID251
    finally:
        os.chdir(here)
    return marker.exists()
