"""Content of a .nemo file: archive, configuration and tokenizer."""

import base64
import contextlib
import gzip
import importlib.util
import io
import re
import shutil
import struct
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, TypeVar

import sentencepiece

from konkanivani.data.text import OUR_TOKENS, Tokenizer
from konkanivani.errors import CheckpointError, ResourceError, explained
from konkanivani.files import conversion_hint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# --------------------
# Reader of .nemo files: plain or gzipped tar archives of a configuration, weights and tokenizers.
#
# Members are found from their headers alone and identified by the last part of their names. No file is extracted to a
# path of the archive's choice, and no code in it is run.


CONFIG = "model_config.yaml"
WEIGHTS = "model_weights.ckpt"
TOKENIZER = "tokenizer.model"
LICENCE = re.compile("LICEN[CS]E")
BLOCK = tarfile.BLOCKSIZE
MOST_MEMBER_BYTES = 2**33
MOST_CONFIG_BYTES = 2**20
MOST_SMALL_BYTES = 2**25
MOST_MEMBERS = 1000
MOST_NOTES_BYTES = 2**16
MOST_INFLATED = 100  # maximum compression ratio; weights hardly compress
# Records of an extended header that would override the name or size in the member's own header.
CHANGES = re.compile(rb"\d+ (path|linkpath|size|GNU\.[^=]*)=")


@dataclass(frozen=True)
class NemoArchive:
    """Contents of a .nemo file: configuration text, tokenizers by name, first line of the licence, and weights."""

    path: Path
    config: bytes
    tokenizers: dict[str, bytes]
    licence: str
    weights: BinaryIO


def refused(path: Path, reason: str, advice: str = "Download it again, or use another") -> CheckpointError:
    """Return the error for a file that cannot be used."""
    return CheckpointError(f"The model {path} cannot be used: {reason}{conversion_hint(path)}. {advice}.")


@contextlib.contextmanager
def open_nemo(path: Path, folder: Path) -> Iterator[NemoArchive]:
    """Open a .nemo file and yield its contents; the weights can be read until the end of the block.

    Args:
        folder: place of the temporary file, without a name, into which gzipped weights are unpacked.

    Raises a CheckpointError that states the problem of the file.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no model at {path}. Give the path of a .nemo file.")
    with contextlib.ExitStack() as stack:
        with explained(ResourceError, f"The model {path} cannot be read", "Fix that and start again."):
            raw = stack.enter_context(open(path, "rb"))
            file: io.BufferedIOBase = raw
            is_packed = raw.read(2) == b"\x1f\x8b"
            spool: BinaryIO | None = None
            raw.seek(0)
            # torch.load reads a zip archive in any order, but seeking back in a gzip stream decompresses it again.
            if is_packed:
                file = gzip.open(raw)
                spool = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            try:
                archive = _read_members(file, path, spool)
            except (gzip.BadGzipFile, EOFError, zlib.error):
                raise refused(path, "it is truncated or damaged") from None
        yield archive


def _read_members(file: io.BufferedIOBase, path: Path, spool: BinaryIO | None) -> NemoArchive:
    """Return the required members; gzipped weights are copied to `spool`."""
    contents: dict[str, bytes] = {}
    weights: BinaryIO | None = None
    small = 0
    max_bytes = MOST_INFLATED * path.stat().st_size
    for count, member in enumerate(_walk_members(file, path)):
        folder, _, name = member.name.rpartition("/")
        # Names are never used as paths; a suspicious one is rejected nevertheless.
        if ".." in folder.split("/") or member.name.startswith("/"):
            raise refused(path, f"its member {member.name!r:.80} has a path outside of the archive")
        if member.isdir():
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise refused(path, f"its member {name!r:.80} is a link or a device")
        if name in contents or count == MOST_MEMBERS:
            raise refused(path, f"its member {name!r:.80} is duplicated, or it has more than {MOST_MEMBERS} members")
        # Check stated sizes before reading. The offset in a gzipped file counts decompressed bytes, which bounds the
        # ratio.
        if member.size > MOST_MEMBER_BYTES or file.tell() + member.size > max_bytes:
            raise refused(path, f"its member {name!r:.80} states {member.size} bytes")
        contents[name] = b""
        if name == WEIGHTS:
            weights = _weights(file, member.size, spool)
        elif name == CONFIG or name.endswith(TOKENIZER) or LICENCE.match(name):
            small += member.size
            if small > MOST_SMALL_BYTES or (name == CONFIG and member.size > MOST_CONFIG_BYTES):
                raise refused(path, f"its {name:.80} has {member.size} bytes, more than the limit")
            contents[name] = _read_exactly(file, member.size)
    for name in (CONFIG, WEIGHTS):
        if name not in contents:
            raise refused(path, f"it contains no {name}", "Use a file saved by NeMo")
    assert weights is not None  # set together with found[WEIGHTS]
    licence = next((text for name, text in contents.items() if LICENCE.match(name)), b"").decode(errors="replace")
    tokenizers = {name: text for name, text in contents.items() if name.endswith(TOKENIZER)}
    first = next((line.strip() for line in licence.splitlines() if line.strip()), "")
    return NemoArchive(path, contents[CONFIG], tokenizers, first[:200], weights)


def _walk_members(file: io.BufferedIOBase, path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield every member's header with `file` positioned at its data; only headers and extended headers are read."""
    # `tarfile` would read an extended header of any stated length into memory.
    while True:
        try:
            member = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed lacks it
            # A block of zeros marks the end.
            while file.read(2**20):  # reads to the end of a gzipped file, so that its checksum is verified
                pass
            return
        except (tarfile.HeaderError, ValueError):
            raise refused(
                path, "it is truncated, or not a tar archive", "Download it again, or use a .nemo file"
            ) from None
        start = file.tell()
        if member.size < 0:
            raise refused(path, f"its member {member.name!r:.80} states {member.size} bytes")
        if member.type in (tarfile.XHDTYPE, tarfile.XGLTYPE):
            if member.size > MOST_NOTES_BYTES or CHANGES.search(_read_exactly(file, member.size)):
                raise refused(path, "an extended header changes the name or size of a member")
        else:
            yield member
        # Data is padded to full blocks of 512 bytes.
        file.seek(start + -(-member.size // BLOCK) * BLOCK)


def _read_exactly(file: io.BufferedIOBase, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _weights(file: io.BufferedIOBase, size: int, spool: BinaryIO | None) -> BinaryIO:
    """Return the weights as a seekable file: a part of `file`, or of a gzipped archive the copy in `spool`."""
    if spool is None:
        return io.BufferedReader(_Part(file, file.tell(), size))
    shutil.copyfileobj(io.BufferedReader(_Part(file, file.tell(), size)), spool, 2**20)
    if spool.tell() < size:
        raise EOFError
    return spool


class _Part(io.RawIOBase):
    """Read-only view of `size` bytes of an open file from offset `start`."""

    def __init__(self, file: io.BufferedIOBase, start: int, size: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        self._file.seek(self._start + self._place)
        data = self._file.read(max(0, min(len(view), self._size - self._place)))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


# --------------------
# Safe reading of the YAML configuration of a .nemo file, with checks that every setting is known.


MAX_DEPTH = 64
PACKAGE = "PyYAML"  # the extra `import` of setup.cfg

Value = TypeVar("Value")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float; a bool, which `isinstance` would accept, is neither."""
    return type(value) in (int, float)


class Section:
    """One mapping of a configuration; keys that have not been read yet are in `left`, and `finish` rejects them."""

    def __init__(self, path: Path, name: str, values: object) -> None:
        if not isinstance(values, dict):
            raise refused(path, f"its configuration has no {name}", "Use a file saved by NeMo")
        self._path = path
        self._name = name
        self.unread = dict(values)

    def get(self, key: str, default: object = None) -> object:
        """Return the value of `key` and mark it as read, or return the default if the key is missing."""
        return self.unread.pop(key, default)

    def only(self, key: str, *built: Value) -> Value:
        """Return the value of `key`, which must be one of the supported values `built`; the first is the default."""
        value = self.get(key, built[0])
        for supported in built:
            # Compare types too: in Python True == 1 and 1 == 1.0.
            if type(value) is type(supported) and value == supported:
                return supported
        raise self.unbuilt(key, value, " or ".join(map(repr, built)))

    def only_all(self, built: Mapping[str, tuple[object, ...]]) -> None:
        """Apply `only` to several keys."""
        for key, values in built.items():
            self.only(key, *values)

    def number(self, key: str, default: float | None, least: float, most: float) -> int | float:
        """Return a number from `least` to `most`."""
        value = self.get(key, default)
        # A NaN fails the comparison.
        if not is_number(value) or not least <= value <= most:
            raise self.unbuilt(key, value, f"a number from {least} to {most}")
        return value

    def count(self, key: str, default: int | None, least: int = 1) -> int:
        """Return an integer from `least` to 65,536."""
        value = self.number(key, default, least, 2**16)
        if type(value) is not int:
            raise self.unbuilt(key, value, "a whole number")
        return value

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that do not change the recognised text."""
        for key in keys:
            self.get(key)

    def unbuilt(self, key: str, value: object, built: str) -> CheckpointError:
        """Return the error for an unsupported value."""
        reason = f"its {self._name}.{key} is {value!r:.80}, but only {built} is supported"
        return refused(self._path, reason, "Use another model")

    def finish(self) -> None:
        """Raise a CheckpointError if a key has not been read."""
        for key, value in self.unread.items():
            reason = f"its {self._name}.{key!s:.80} is {value!r:.80}, which this version does not know"
            raise refused(self._path, reason, "Use another model, or a newer version")


def read_yaml(text: bytes, path: Path) -> object:
    """Parse YAML into plain values.

    Raises a CheckpointError for aliases, tags of classes, or nesting deeper than `MAX_DEPTH`, and a ResourceError with
    an install command if PyYAML is missing.
    """
    if importlib.util.find_spec("yaml") is None:
        raise ResourceError(
            f"Reading a .nemo file needs the package {PACKAGE}, which is not installed. Install: "
            f"{sys.executable} -m pip install {PACKAGE}"
        )
    import yaml

    # Safe loaders construct no Python objects. libyaml, if available, is faster.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    depth = 0
    try:
        # First pass over events only, before any value is built. Ten nested aliases that each refer ten times to the
        # next expand to 10^10 items when the result is traversed.
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise refused(path, "its configuration has an alias, or is nested too deeply")
        reader = loader(text)
        try:
            return reader.get_single_data()
        finally:
            reader.dispose()
    # Malformed dates raise ValueError, unhashable keys TypeError.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise refused(path, f"its configuration is not plain YAML ({reason:.200})") from None


# --------------------
# Conversion of SentencePiece models to this project's layout: blank, unknown, start and end tokens, then the pieces.
#
# A model is a protocol buffer (sentencepiece_model.proto). Field 1 holds the pieces in the order of their ids, and a
# later occurrence of a field overrides an earlier one. Pieces can therefore be inserted and ids overridden without
# parsing the rest.


PIECE = 1
TRAINER = 2
TEXT = 1
CONTROL = 3
assert OUR_TOKENS.blank is not None and OUR_TOKENS.unknown is not None  # only Whisper's vocabulary lacks them
# Fields 40 to 43 of TrainerSpec: ids of the unknown, start, end and padding tokens. Fields 46 to 48: their pieces.
IDS = {40: OUR_TOKENS.unknown, 41: OUR_TOKENS.start, 42: OUR_TOKENS.end, 43: OUR_TOKENS.blank}
NAMES = {46: "<s>", 47: "</s>", 48: "<blank>"}


@dataclass(frozen=True)
class Pieces:
    """Converted tokenizer, and for each of its tokens the id in the original model, None for an added token."""

    tokenizer: Tokenizer
    old_ids: tuple[int | None, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of pieces of the original model."""
        return len(self.names)


def read_pieces(model: bytes) -> Pieces:
    """Convert a SentencePiece model to this project's layout.

    Raises a ValueError unless its first piece is the unknown token, followed by start and end tokens or by neither.
    """
    try:
        old = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ValueError("its tokenizer is not a SentencePiece model") from None
    ids = old.unk_id(), old.bos_id(), old.eos_id(), old.pad_id()
    names = tuple(map(old.id_to_piece, range(old.get_piece_size())))
    if ids not in ((0, -1, -1, -1), (0, 1, 2, -1)) or NAMES[48] in names or not model.startswith(b"\x0a"):
        raise ValueError(
            f"its tokenizer has the ids {ids} for <unk>, <s>, </s> and <pad>, but only (0, -1, -1, -1) and (0, "
            "1, 2, -1) are supported"
        )
    # The model starts with the tag of the first piece and its length.
    size, start = _read_number(model, 1)
    is_bare = old.bos_id() < 0
    added = b"".join(_control_piece(NAMES[number]) for number in (46, 47)) if is_bare else b""
    trainer = b"".join(field(number, token) for number, token in IDS.items())
    trainer += b"".join(field(number, name.encode()) for number, name in NAMES.items())
    unknown = model[: start + size]
    remainder = model[start + size :]
    # A later TrainerSpec is merged with the model's own and overrides its ids.
    extended = _control_piece(NAMES[48]) + unknown + added + remainder + field(TRAINER, trainer)
    old_ids = (None, 0, *((None, None) if is_bare else ()), *range(1, len(names)))
    return Pieces(_check_pieces(extended, names, old_ids), old_ids, names)


def _check_pieces(model: bytes, names: tuple[str, ...], old_ids: tuple[int | None, ...]) -> Tokenizer:
    """Return the tokenizer after checking that every original piece has kept its spelling."""
    tokenizer = Tokenizer(model)
    pieces = tuple(tokenizer.piece(token) for token, old in enumerate(old_ids) if old is not None)
    if tokenizer.size != len(old_ids) or pieces != names:
        raise ValueError("its tokenizer lists its tokens in a different order than SentencePiece")
    return tokenizer


def _control_piece(name: str) -> bytes:
    """Return a control piece, which has no text."""
    return field(PIECE, field(TEXT, name.encode()) + field(KIND, CONTROL))


def field(number: int, value: int | bytes) -> bytes:
    """Return an encoded field of a protocol buffer, with a number or bytes as its value."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a varint: 7 bits per byte, lowest first, the high bit set in all bytes but the last."""
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + _varint(value >> 7)


def _read_number(data: bytes, start: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    value = shift = 0
    for position in range(start, min(len(data), start + 5)):  # at most 35 bits
        value |= (data[position] & 127) << shift
        shift += 7
        if data[position] < 128:
            return value, position + 1
    raise ValueError("its tokenizer is not a SentencePiece model")


# --------------------
# Conversion of a byte-pair tokenizer.json to a SentencePiece model, from which it was made.


# Field numbers and enumeration values in sentencepiece_model.proto.
SCORE = 2
KIND = 3
NORMALIZER = 3
MODEL_TYPE = 3
SIZE = 4
BYTES = 35
CHARACTERS = 2
UNKNOWN = 2
BYTE = 6
BYTE_PAIRS = 2
UNCHANGING = {"Strip", "Replace"}  # SentencePiece normalises spaces in the same way by itself


def sentencepiece_of(tokenizer: Any) -> bytes:
    """Return the serialized SentencePiece model; raise a ValueError for another kind of tokenizer.

    Args:
        tokenizer: content of a tokenizer.json, not yet checked.
    """
    try:
        model = tokenizer["model"]
        added = tokenizer["normalizer"]
        kind = model["type"]
        names = sorted(model["vocab"], key=model["vocab"].get)
        merges = model["merges"]
        are_bytes = bool(model.get("byte_fallback"))
        spaces = tokenizer["pre_tokenizer"]["type"], tokenizer["pre_tokenizer"].get("prepend_scheme")
        characters = _characters(added)
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            pair = pair.split(" ") if isinstance(pair, str) else pair
            # Of two merges with the same result, the earlier one counts.
            ranks.setdefault("".join(pair), rank)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError("its tokenizer.json is not byte-pair encoding with marked spaces") from None
    # SentencePiece always adds a space marker before the text, the scheme "always" here.
    if kind != "BPE" or spaces != ("Metaspace", "always") or list(model["vocab"].values()).count(0) != 1:
        raise ValueError("its tokenizer.json is not byte-pair encoding with marked spaces")
    if [model["vocab"][name] for name in names] != list(range(len(names))) or names[0] != model.get("unk_token"):
        raise ValueError("its tokenizer.json has gaps between its tokens, or does not start with the unknown token")
    pieces = b""
    for number, name in enumerate(names):
        # SentencePiece merges the pair with the highest score first, byte-pair encoding the pair that was merged
        # earliest in training: the score is the negative rank. 0x15 is the tag of a float field.
        score = field(TEXT, name.encode()) + b"\x15" + struct.pack("<f", -ranks.get(name, len(merges) + number))
        is_byte = are_bytes and re.fullmatch("<0x[0-9A-F]{2}>", name)
        special = UNKNOWN if number == 0 else BYTE if is_byte else 1
        pieces += field(PIECE, score + field(KIND, special))
    has_bytes = field(BYTES, 1) if are_bytes and "<0x00>" in names else b""
    trainer = field(MODEL_TYPE, BYTE_PAIRS) + field(SIZE, len(names)) + has_bytes + field(45, names[0].encode())
    return pieces + field(TRAINER, trainer) + field(NORMALIZER, field(CHARACTERS, characters))


def _characters(normalizer: Any) -> bytes:
    """Return the precompiled character map of the normalizer, b"" without one."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= {*UNCHANGING, "Precompiled"}:
        raise ValueError(f"its tokenizer.json uses an unsupported normalisation: {kinds}")
    return b"".join(base64.b64decode(s["precompiled_charsmap"]) for s in steps if s["type"] == "Precompiled")
