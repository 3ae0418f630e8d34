"""Index of a manifest: its rows as utterances, with their offsets in the file.

A row is a JSON object with the fields

- `audio_filepath`: relative to the manifest's folder, or absolute
- `duration`: in seconds
- `text`: the transcript
- `offset` (optional): start of the utterance in the audio file, in seconds
- `byte_offset`, `byte_count` (optional): location of the audio file in a tar shard, which `audio_filepath` then names
- `channel` (optional): the only channel to use, from 0, for recordings with one speaker per channel; without it, the
  mean of all channels
- `speaker` (optional)
- `pattern` (optional): `seen` or `unseen` in training; set by the built-in corpus

A row of a text-to-text manifest has two fields with texts, which `TextFields` names, and no audio.

For a manifest of `SMALL_BYTES` or more, the index is stored as plain arrays in the folder MANIFEST.index and
memory-mapped. It is opened in constant time, shared by all processes, and rebuilt when the manifest changes.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from heapq import nsmallest
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from konkanivani.console import progress_bar, say
from konkanivani.data.audio.files import AudioSource, as_label, parse_channel
from konkanivani.data.audio.paths import OUTSIDE, audio_roots, existing_path, is_named_inside
from konkanivani.data.text import FormatCharacterCount, find_removed, forbidden_character, forbidden_in_transcript
from konkanivani.files import exclusive_lock
from konkanivani.worker_processes import worker_pool

# --------------------
# Rows of a JSONL manifest in NeMo's format: parsing and serialization of one utterance.


MAX_SECONDS = 1e9


class BadRow(Exception):
    """Invalid row; `audio_filepath` is the row's path, empty if it has none."""

    def __init__(self, reason: str, audio_filepath: str = "") -> None:
        super().__init__(reason)
        self.audio_filepath = audio_filepath


@dataclass(frozen=True)
class TextFields:
    """Names of the fields with the input and the target in a text-to-text manifest."""

    input: str = "input"
    target: str = "text"


@dataclass(frozen=True)
class Utterance:
    """Row of a manifest; `duration` and `offset` are in seconds, `offset` is None for a whole audio file.

    `audio_filepath` is the path as written in the manifest, `audio_path` the path to open. `row` is the line number
    from 1 (0: not from a file). Audio must be inside one of the `roots` (None: anywhere). `row` and `roots` are
    excluded from comparison.

    A row of a text-to-text manifest has `input_text` in place of audio, and its row number as `audio_filepath`.
    """

    audio_filepath: str
    audio_path: str
    duration: float
    text: str
    speaker: str = ""
    pattern: str = ""
    offset: float | None = None
    byte_offset: int = 0
    byte_count: int = 0
    channel: int | None = None
    input_text: str | None = None
    row: int = field(default=0, compare=False)
    roots: tuple[str, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        """Return the unique name: the path, then byte offset, start in seconds and channel if the row has them."""
        member = f"#{self.byte_offset}" if self.byte_count else ""
        begin = "" if self.offset is None else f"@{self.offset:g}"
        # Rows of one recording with different channels have different audio.
        return f"{self.audio_filepath}{member}{begin}" + ("" if self.channel is None else f":ch{self.channel}")

    @property
    def mark(self) -> int:
        """Return a 56-bit hash that survives moving the corpus, converting its audio and correcting its text.

        Of a text-to-text row, it survives moving the row.
        """
        if self.input_text is not None:
            both = f"{self.input_text}\0{self.text}"
            return int.from_bytes(hashlib.blake2b(both.encode(), digest_size=7).digest(), "big")
        stem = os.path.splitext(os.path.basename(self.audio_filepath))[0]
        identity: tuple[object, ...] = (stem, self.byte_offset, self.offset or 0.0, round(self.duration, 2))
        # Only with a channel, so that the hashes of older checkpoints stay valid.
        if self.channel is not None:
            identity += (self.channel,)
        return int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=7).digest(), "big")

    @property
    def source(self) -> AudioSource:
        location = self.audio_path, self.byte_offset, self.byte_count
        # The user names the manifest, and with it its absolute paths; only relative paths are confined to its folder.
        roots = None if os.path.isabs(self.audio_filepath) else self.roots
        return AudioSource(*location, self.offset, self.duration, roots, self.channel)


class Utterances(Protocol):
    """Utterances by index from 0: a list, or rows of a manifest that are read when they are accessed."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Utterance: ...

    def __iter__(self) -> Iterator[Utterance]: ...


def row_of(utterance: Utterance) -> dict[str, object]:
    """Return the fields of the utterance's row."""
    row = {"audio_filepath": utterance.audio_filepath, "duration": round(utterance.duration, 4), "text": utterance.text}
    if utterance.offset is not None:
        row["offset"] = round(utterance.offset, 4)
    if utterance.byte_count:
        row |= {"byte_offset": utterance.byte_offset, "byte_count": utterance.byte_count}
    if utterance.channel is not None:
        row["channel"] = utterance.channel
    marks = {"speaker": utterance.speaker, "pattern": utterance.pattern}
    return row | {name: mark for name, mark in marks.items() if mark}


def parse_row(
    line: bytes, folder: str, row: int, roots: tuple[str, ...] | None = None, needs_text: bool = True
) -> Utterance:
    """Parse a line of the manifest in `folder`; raise `BadRow` with the reason if it is invalid.

    `roots` are the folders that may contain its audio, the manifest's own first. With `needs_text=False`, rows without
    text are accepted (noise).
    """
    fields: dict[str, Any] = _parse_object(line)
    if not needs_text and fields.get("text") is None:
        fields["text"] = ""
    audio = fields.get("audio_filepath")
    if not isinstance(audio, str) or not audio or forbidden_character(audio):
        instead = "; the row is of text, for a T5 model" if audio is None and "input" in fields else ""
        raise BadRow(f"audio_filepath must be a string with a path, not {audio!r:.200}{instead}")
    if roots is not None and not is_named_inside(audio, roots):
        raise BadRow(OUTSIDE, audio)
    reason = _reason_to_refuse(fields)
    if reason:
        raise BadRow(reason, audio)
    try:
        channel = parse_channel(fields)
    except ValueError as error:
        raise BadRow(str(error), audio) from None
    offset = fields.get("offset")
    return Utterance(
        audio_filepath=audio,
        audio_path=os.path.join(folder, audio),
        duration=float(fields["duration"]),
        text=fields["text"],
        speaker=as_label(fields.get("speaker")),
        pattern=as_label(fields.get("pattern")),
        offset=None if offset is None else float(offset),
        byte_offset=fields.get("byte_offset", 0),
        byte_count=fields.get("byte_count", 0),
        channel=channel,
        row=row,
        roots=roots,
    )


def parse_text_row(line: bytes, names: TextFields, row: int) -> Utterance:
    """Parse a line of a text-to-text manifest; raise `BadRow` with the reason if it is invalid."""
    fields = _parse_object(line)
    texts = []
    for name in (names.input, names.target):
        text = fields.get(name)
        if not isinstance(text, str):
            instead = "; the row is of speech, for another model" if "audio_filepath" in fields else ""
            raise BadRow(f"{name} must be a string with a text, not {text!r:.200}{instead}")
        if not text.strip():
            raise BadRow(f"{name} is empty")
        character = forbidden_in_transcript(text)
        if character:
            raise BadRow(f"{name} contains the control character U+{ord(character):04X}: remove it")
        texts.append(text)
    return Utterance(f"row {row}", "", 0.0, texts[1], input_text=texts[0], row=row)


def _parse_object(line: bytes) -> dict[str, object]:
    """Return the JSON object of a line; raise `BadRow` if it is none."""
    try:
        fields = json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
        raise BadRow(f"not a line of JSON ({error}); konkanivani prepare converts a table to a manifest") from None
    if not isinstance(fields, dict):
        raise BadRow(f"a {type(fields).__name__}, but a JSON object is expected")
    return fields


def _reason_to_refuse(fields: dict[str, object]) -> str | None:
    """Return why the fields other than the path and channel are invalid; None if they are valid."""
    text = fields.get("text")
    duration = fields.get("duration")
    offset = fields.get("offset")
    if not isinstance(text, str):
        return f"text must be a string with the transcript, not {text!r:.200}"
    character = forbidden_in_transcript(text)
    if character:
        return f"the transcript contains the control character U+{ord(character):04X}: remove it"
    if not _is_seconds(duration):
        return f"duration must be a number of seconds, not {duration!r:.200}"
    if offset is not None and not _is_seconds(offset):
        return f"offset must be a number of seconds, not {offset!r:.200}"
    for name in ("byte_offset", "byte_count"):
        value = fields.get(name, 0)
        # `type`, because a bool is an int; 2**63 is the bound of a file offset.
        if type(value) is not int or not 0 <= value < 2**63:
            return f"{name} must be a number of bytes, not {value!r:.200}"
    return None


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_SECONDS


# --------------------
# Index of a manifest: byte offset, size and duration of each row.


# Earlier versions: 5 had a sketch of 256 hashes; 4 had no channels and no counts of format characters; 3 rejected rows
# with format characters or absolute paths; 2 had no sketch; 1 was validated by the modification time alone, which
# unpacking an archive restores.
VERSION = 6
SMALL_BYTES = 4 * 2**20  # smaller manifests are scanned at each start in under a second, without stored files
BLOCK_BYTES = 16 * 2**20
SKETCHED = 2**16  # hashes: exact for corpora of up to about 90 hours; 600 kB in a checkpoint
MAX_LINE = 2**20  # bytes; the transcript of hours of speech is shorter
MISSING = "the audio file does not exist"
FORMAT_CHARACTERS = "format_characters.json"
ARRAYS = {"starts": np.int64, "sizes": np.int32, "rows": np.int32, "durations": np.float64}


@dataclass(frozen=True)
class BrokenRow:
    """Invalid row: its line number from 1, its audio path (empty if it has none) and the reason.

    `is_missing` means that the audio file does not exist; it may appear later.
    """

    row: int
    audio_filepath: str
    reason: str
    is_missing: bool = False


@dataclass(frozen=True)
class ManifestIndex:
    """Index of a manifest's valid rows.

    Args:
        starts: Byte offset of each row's line (rows,).
        sizes: Bytes of each line (rows,).
        rows: Line numbers from 1 (rows,).
        durations: Seconds (rows,).
        broken: The invalid rows.
        sketch: The smallest hashes of the utterances, ascending, at most `SKETCHED`, for comparing corpora.
        folder: Folder of the stored arrays; None if they are not stored.
        format_characters: Counts of the format characters that normalisation removes from the transcripts.
    """

    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    durations: np.ndarray
    broken: tuple[BrokenRow, ...]
    sketch: tuple[int, ...]
    folder: Path | None
    format_characters: FormatCharacterCount = field(default_factory=FormatCharacterCount)


def open_index(manifest: Path, named_roots: tuple[str, ...] = (), fields: TextFields | None = None) -> ManifestIndex:
    """Load the manifest's stored index if it is valid, or build it; raise an `OSError` if the manifest is unreadable.

    Rows whose audio is neither in the manifest's folder nor in one of the `named_roots` count as broken. With `fields`,
    rows are of texts.
    """
    status = manifest.stat()
    roots = audio_roots(str(manifest.parent), named_roots)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError("it is not a file")  # opening a pipe would block
    if status.st_size < SMALL_BYTES or not manifest.is_file():
        return _join_blocks(list(_scan_blocks(manifest, roots, fields)))
    # Inode and ctime, which unpacking an archive does not restore: an index from elsewhere is not trusted.
    identity: dict[str, object] = {
        "version": VERSION,
        "bytes": status.st_size,
        "inode": status.st_ino,
        "changed_ns": status.st_ctime_ns,
        "roots": list(roots),
    }
    if fields is not None:
        identity["fields"] = asdict(fields)
    folder = manifest.with_name(manifest.name + ".index")
    if (index := _read(folder, manifest, identity)) is not None:
        return index
    try:
        # Ranks, or two commands, may open a new manifest at once.
        with exclusive_lock(manifest, is_required=False):
            if (index := _read(folder, manifest, identity)) is None:
                say(f"Indexing {manifest} ({status.st_size / 2**30:.2f} GiB), once.")
                index = _write(folder, manifest, identity, roots, fields)
            return index
    except OSError as error:
        shutil.rmtree(f"{folder}.partial", ignore_errors=True)  # checkpoints need the space of a full disk
        say(f"The index cannot be stored in {folder} ({error.strerror or error}); it is rebuilt at each start.")
        return _join_blocks(list(_scan_blocks(manifest, roots, fields)))


def _read(folder: Path, manifest: Path, identity: dict[str, object]) -> ManifestIndex | None:
    """Load the index in `folder`; return None if it is absent or stale, or if a missing audio file exists now."""
    try:
        if json.loads((folder / "index.json").read_text()) != identity:
            return None
        lines = (folder / "broken.jsonl").read_text(encoding="utf-8").splitlines()
        broken = tuple(BrokenRow(**json.loads(line)) for line in lines)
        sketch = tuple(json.loads((folder / "sketch.json").read_text()))
        removed = FormatCharacterCount.from_json((folder / FORMAT_CHARACTERS).read_text(encoding="utf-8"))
        arrays = {name: _memory_map(folder / name, kind) for name, kind in ARRAYS.items()}
    except (OSError, ValueError, TypeError):
        return None
    # If a missing audio file has been added since, its row must become usable.
    missing = (existing_path(str(manifest.parent / row.audio_filepath)) for row in broken if row.is_missing)
    # Files are not synced: a power failure may cut them.
    if len({len(array) for array in arrays.values()}) > 1 or any(map(os.path.exists, missing)):
        return None
    return ManifestIndex(**arrays, broken=broken, sketch=sketch, folder=folder, format_characters=removed)


def _memory_map(path: Path, kind: type) -> np.ndarray:
    # mmap rejects empty files.
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.empty(0, kind)


def _write(
    folder: Path, manifest: Path, identity: dict[str, object], roots: tuple[str, ...], fields: TextFields | None
) -> ManifestIndex:
    """Build the index block by block, so that memory does not grow with the rows, and store it in `folder`."""
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    broken: list[BrokenRow] = []
    sketch: tuple[int, ...] = ()
    removed = FormatCharacterCount()
    for block in _scan_blocks(manifest, roots, fields):
        for name in ARRAYS:
            with open(partial / name, "ab") as file:
                getattr(block, name).tofile(file)
        broken += block.broken
        sketch = tuple(nsmallest(SKETCHED, {*sketch, *block.sketch}))
        removed.add_all(block.format_characters)
    with open(partial / "broken.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in broken)
    (partial / "sketch.json").write_text(json.dumps(sketch))
    (partial / FORMAT_CHARACTERS).write_text(removed.to_json())
    (partial / "index.json").write_text(json.dumps(identity))
    # An interrupted build never leaves a partial index under the final name.
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    arrays = {name: _memory_map(folder / name, kind) for name, kind in ARRAYS.items()}
    return ManifestIndex(**arrays, broken=tuple(broken), sketch=sketch, folder=folder, format_characters=removed)


def _join_blocks(blocks: list[ManifestIndex]) -> ManifestIndex:
    empty = {name: np.empty(0, kind) for name, kind in ARRAYS.items()}
    arrays = {name: np.concatenate([empty[name], *(getattr(block, name) for block in blocks)]) for name in ARRAYS}
    broken = tuple(row for block in blocks for row in block.broken)
    sketch = tuple(nsmallest(SKETCHED, {mark for block in blocks for mark in block.sketch}))
    removed = FormatCharacterCount()
    for block in blocks:
        removed.add_all(block.format_characters)
    return ManifestIndex(**arrays, broken=broken, sketch=sketch, folder=None, format_characters=removed)


def _scan_blocks(manifest: Path, roots: tuple[str, ...], fields: TextFields | None) -> Iterator[ManifestIndex]:
    """Yield the index of each block of lines in order; several blocks are scanned in parallel processes."""
    edges = _block_edges(manifest)
    lines_before = 0
    tasks = [(str(manifest), first, end, roots, fields) for first, end in pairwise(edges)]
    with ExitStack() as opened:
        scans: Iterator[tuple[ManifestIndex, int]] = (_scan(*task) for task in tasks)
        if len(tasks) > 1:
            scans = opened.enter_context(worker_pool(os.cpu_count() or 1)).run((_scan, *task) for task in tasks)
        # A block counts its lines from 1; only here the lines of all earlier blocks are known.
        for block, lines in progress_bar(scans, len(tasks), f"indexing {manifest.name}", "block"):
            broken = tuple(replace(row, row=row.row + lines_before) for row in block.broken)
            yield replace(block, rows=block.rows + np.int32(lines_before), broken=broken)
            lines_before += lines


def _block_edges(manifest: Path) -> list[int]:
    """Return the byte offsets of blocks of about `BLOCK_BYTES`, each at the start of a line, and the file's size."""
    edges = [0]
    size = manifest.stat().st_size
    with open(manifest, "rb") as file:
        while edges[-1] + BLOCK_BYTES < size:
            file.seek(edges[-1] + BLOCK_BYTES)
            for _ in _pieces_of_line(file):
                pass
            edges.append(file.tell())
    return edges if edges[-1] == size and len(edges) > 1 else [*edges, size]


def _scan(
    manifest: str, first: int, end: int, roots: tuple[str, ...], fields: TextFields | None
) -> tuple[ManifestIndex, int]:
    """Return the index of the lines in bytes `first` to `end`, rows numbered from 1, and the number of lines."""
    columns: dict[str, list] = {name: [] for name in ARRAYS}
    broken = []
    marks = set()
    start = first
    row = 0
    last_path = ""
    removed = FormatCharacterCount()
    folder = os.path.dirname(manifest)
    with open(manifest, "rb") as file:
        file.seek(first)
        # Blank lines are counted, so that a row's number is its line number in an editor.
        for row, (line, size) in enumerate(_lines(file, end), start=1):
            if line.strip():
                try:
                    if size > MAX_LINE:
                        raise BadRow(f"{size:,} bytes are too many for one row")
                    if fields is None:
                        utterance = parse_row(line, folder, row, roots)
                    else:
                        utterance = parse_text_row(line, fields, row)
                    # Consecutive rows are often spans of one file or shard: its existence is checked once.
                    if (
                        fields is None
                        and utterance.audio_path != last_path
                        and not os.path.exists(existing_path(utterance.audio_path))
                    ):
                        raise BadRow(MISSING, utterance.audio_filepath)
                    last_path = utterance.audio_path
                    marks.add(utterance.mark)
                    removed.add(find_removed(utterance.text))
                    for column, value in zip(columns.values(), (start, size, row, utterance.duration), strict=True):
                        column.append(value)
                except BadRow as error:
                    broken.append(BrokenRow(row, error.audio_filepath, str(error), str(error) == MISSING))
            start += size
    arrays = {name: np.array(columns[name], kind) for name, kind in ARRAYS.items()}
    index = ManifestIndex(
        **arrays, broken=tuple(broken), sketch=tuple(nsmallest(SKETCHED, marks)), folder=None, format_characters=removed
    )
    return index, row


def _lines(file: BinaryIO, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield each line and its size in bytes; a line above `MAX_LINE` is cut to that length."""
    position = file.tell()
    while position < end and (line := file.readline(MAX_LINE)):
        size = len(line)
        if size == MAX_LINE and not line.endswith(b"\n"):
            size += sum(map(len, _pieces_of_line(file)))
        position += size
        yield line, size


def _pieces_of_line(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a line in pieces of at most `MAX_LINE` bytes."""
    while piece := file.readline(MAX_LINE):
        yield piece
        if piece.endswith(b"\n"):
            return
