"""Formats of toolkits: Kaldi's data directories, and NeMo's manifests with their tar shards.

Nothing is unpacked: a name in a tar is only a name, never a path that is opened.
"""

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from konkanivani.corpora.tables import (
    RefusedRow,
    SourceRows,
    SourceUtterance,
    SpeechFolder,
    as_seconds,
    as_text,
    parse_json,
    read_lines,
    split_named,
    split_of_path,
)
from konkanivani.data.audio.files import parse_channel, parse_channel_cell
from konkanivani.data.audio.paths import AUDIO_SUFFIXES, comparable_name, existing_path
from konkanivani.errors import DataError
from konkanivani.files import is_hidden, visible_entries

# --------------------
# Index of the members of tar shards by their headers alone: name, byte offset and byte count.
#
# tarfile trusts the lengths in headers, even if they are huge or negative. Therefore the bytes that it may read per
# member are bounded, and each member must follow the previous one.


MAX_TEXT_BYTES = 2**20
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # magic numbers of gzip, bzip2, xz, zstd
MAX_HEADER_BYTES = 2**13  # per member, including its long name and its PAX records


@dataclass(frozen=True)
class Member:
    """A regular file in a tar, of `byte_count` bytes from `byte_offset`."""

    name: str
    byte_offset: int
    byte_count: int


def read_members(path: Path) -> Iterator[Member]:
    """Yield the regular files of the tar at `path`, in order.

    Raises:
        DataError: If the file is compressed or not a tar.
    """
    try:
        # Opening a named pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("it is not a file")
        with open(path, "rb") as file:
            if file.peek(6).startswith(COMPRESSED):
                raise DataError(
                    f"{path} is compressed, so single utterances cannot be read. Decompress it (gunzip, "
                    "unzstd, …) to a plain .tar."
                )
            yield from _walk(_Headers(file), path.stat().st_size)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}. Download it again.") from None


class _Headers:
    """A tar file that permits tarfile to read only a bounded number of header bytes per member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.begin_member()
        self.seek = file.seek
        self.tell = file.tell

    def begin_member(self) -> None:
        self._remaining = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._remaining:
            raise tarfile.ReadError(f"a member's header at byte {self.tell()} is longer than {MAX_HEADER_BYTES} bytes")
        self._remaining -= size
        return self._file.read(size)


def _walk(headers: _Headers, size: int) -> Iterator[Member]:
    """Yield the regular files of a tar of `size` bytes.

    Raises:
        ValueError: If the headers are not contiguous up to the end of the file.
    """
    before = -1
    # The stub demands write() and close(), which tarfile never calls on a file object that it only reads.
    with tarfile.open(  # type: ignore[call-overload]
        fileobj=headers, mode="r:", encoding="utf-8", errors="surrogateescape"
    ) as shard:
        for member in shard:
            # tarfile keeps every header, and copies global PAX headers into each of them.
            shard.members.clear()
            shard.pax_headers.clear()
            headers.begin_member()
            # A negative size would send tarfile back to an earlier header, in an endless loop.
            if member.size < 0 or member.offset <= before:
                raise ValueError(f"its header at byte {member.offset} points backwards")
            before = member.offset
            # A sparse file has holes in its bytes; the last member of a truncated tar is incomplete.
            if member.isreg() and not member.issparse() and member.offset_data + member.size <= size:
                yield Member(member.name, member.offset_data, member.size)
        # tarfile stops at an invalid header without an error; a complete tar ends with a block of zeros.
        headers.begin_member()
        headers.seek(shard.offset)
        if headers.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise ValueError(f"there is no header at byte {shard.offset}, but {size - shard.offset} bytes follow")


def read_member_text(path: Path, member: Member) -> str:
    """Return a short text from a tar; bytes that are not UTF-8 become lone surrogates (`surrogateescape`)."""
    with open(path, "rb") as file:
        file.seek(member.byte_offset)
        # A longer text is cut, and refused later because of its length or as invalid JSON.
        return file.read(min(member.byte_count, MAX_TEXT_BYTES)).decode("utf-8-sig", errors="surrogateescape")


# --------------------
# Kaldi data folders: wav.scp and text, with optional segments, utt2spk and reco2file_and_channel.
#
# Paths in wav.scp are relative to the data folder or to a folder above it: recipes write them relative to the recipe's
# folder, egs/x/s5 for egs/x/s5/data/train. Commands (`|`) and positions in an archive (`wav.ark:123`) are refused,
# never run.
#
# A fifth column of segments is a channel of the recording, from 0, as extract-segments reads it (-1: none). Without it,
# reco2file_and_channel gives the channel of a recording: A, B, … or 1, 2, … as in STM and CTM (from 0 if the file has a
# 0). If wav.scp names a mono file, the channel is only a label and has no effect.
# Source: https://kaldi-asr.org/doc/data_prep.html and extract-segments of https://kaldi-asr.org/doc/tools.html


Entry = tuple[int, str]  # line number, and the rest of the line after its key


def find_kaldi_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the lines of `text` of all data folders.

    Raises:
        DataError: If there is no wav.scp, or a data folder has no `text`.
    """
    folders = [f for f in (source.path, *visible_entries(source.path)) if (f / "wav.scp").exists()]
    if not folders:
        raise DataError(
            f"{source.path} contains no wav.scp. Use a Kaldi data folder, or a folder of them, as --source."
        )
    for folder in folders:
        split = "" if folder == source.path else split_named(folder.name)
        yield from _read_folder(source, folder, split)


def _read_folder(source: SpeechFolder, folder: Path, split: str) -> SourceRows:
    recordings = _entries(folder / "wav.scp")
    speakers = _entries(folder / "utt2spk")
    has_segments = (folder / "segments").exists()
    segments = _entries(folder / "segments")
    channels = _labelled_channels(folder / "reco2file_and_channel")
    file = source.name_of(folder / "text")
    if not (folder / "text").exists():
        raise DataError(f"{folder} contains no transcript file `text`. Use a folder that has one as --source.")
    seen: set[str] = set()
    for row, line in read_lines(folder / "text"):
        name, *words = line.split(maxsplit=1)
        # Without segments, an utterance is a whole recording, from 0 to the end (-1).
        segment = segments.get(name) if has_segments else (row, f"{name} 0 -1")
        if name in seen:
            yield RefusedRow(file, row, "duplicate", f"the utterance {name} is listed twice", name)
        elif segment is None:
            yield RefusedRow(file, row, "missing audio", f"segments has no {name}", name)
        else:
            speaker = speakers.get(name, (0, ""))[1]
            here = SourceUtterance(file, row, Path(name), "".join(words), id=name, speaker=speaker, split=split)
            located = _locate_segment(source, folder, here, segment, recordings)
            if isinstance(located, SourceUtterance) and located.channel is None:
                # A channel column in segments has precedence.
                labelled = channels.get(segment[1].split()[0])
                located = replace(located, channel=labelled, is_channel_label=True)
            yield located
        seen.add(name)


def _locate_segment(
    source: SpeechFolder, folder: Path, utterance: SourceUtterance, segment: Entry, recordings: dict[str, Entry]
) -> SourceUtterance | RefusedRow:
    """Return the utterance with its audio path and span, or refused if they are unknown without running a command."""
    segment_row, fields = segment
    name, *numbers = fields.split() or ("",)
    start, end = map(as_seconds, numbers[:2]) if len(numbers) in (2, 3) else (None, None)
    if start is None or end is None:
        file = source.name_of(folder / "segments")
        return RefusedRow(file, segment_row, "broken row", "recording, start and end are expected", utterance.id)
    try:
        # extract-segments reads -1 as "no channel".
        channel = None if numbers[2:] in ([], ["-1"]) else parse_channel_cell(numbers[2], "channel")
    except ValueError:
        reason = f"its channel must be a number from 0, or -1, not {numbers[2]!r:.200}"
        return RefusedRow(source.name_of(folder / "segments"), segment_row, "channel", reason, utterance.id)
    if name not in recordings:
        return utterance.refused("missing audio", f"wav.scp has no {name}")
    recording_row, recording = recordings[name]
    reason = _reason_to_refuse(recording)
    if reason:
        file = source.name_of(folder / "wav.scp")
        return RefusedRow(file, recording_row, "command or archive", reason, recording)
    path = _audio(source, folder, recording)
    if path is None:
        places = f"{folder}, --source, --audio_root or a folder above"
        return utterance.refused("missing audio", f"wav.scp's {recording} is not in {places}")
    return replace(utterance, audio=path, start=start, seconds=None if end == -1.0 else end - start, channel=channel)


def _labelled_channels(path: Path) -> dict[str, int]:
    """Return the channel, from 0, of each recording with a letter or a number in reco2file_and_channel."""
    label_by_name = {
        name: words.split()[1].upper() for name, (_, words) in _entries(path).items() if len(words.split()) == 2
    }
    # STM and CTM count from 1; a single 0 shows that the whole file counts from 0.
    first = 0 if "0" in label_by_name.values() else 1
    numbers = {
        name: int(label) - first for name, label in label_by_name.items() if label.isascii() and label.isdecimal()
    }
    letters = {name: ord(label) - ord("A") for name, label in label_by_name.items() if re.fullmatch("[A-Z]", label)}
    return numbers | letters


def _audio(source: SpeechFolder, folder: Path, value: str) -> Path | None:
    """Return the path of a wav.scp entry, or None if the file is not found.

    An absolute path is returned unchecked. Whether the file is within the permitted folders is checked later.
    """
    if os.path.isabs(value):
        return Path(value)
    above = Path(os.path.abspath(folder)).parents
    # Also below --source and --audio_root: a data folder may be outside of the recipe's folder.
    paths = (base / value for base in (folder, source.path, source.audio_root or source.path, *above))
    return next((path for path in paths if os.path.lexists(existing_path(str(path)))), None)


def _reason_to_refuse(value: str) -> str:
    """Return why an entry of wav.scp is not a path of an audio file; "" if it may be one."""
    if value.startswith("|") or value.endswith("|"):
        return (
            "it is a command, and commands are not run: write its output to a file and use its path "
            "(docs/data.md, Paths and commands in wav.scp)"
        )
    if re.search(r"\.ark:\d+(\[.*\])?$", value):
        return "it is a position in an archive: extract the audio to files and use their paths"
    return "it is standard input, not a file" if value == "-" else ""


def _entries(path: Path) -> dict[str, Entry]:
    """Return the lines of a file by their first word; none if the file does not exist."""
    if not path.exists():
        return {}
    entries: dict[str, Entry] = {}
    for row, line in read_lines(path):
        key, *rest = line.split(maxsplit=1)
        entries[key] = (row, "".join(rest).strip())
    return entries


# --------------------
# NeMo's JSONL manifests, NeMo's tarred data sets, and WebDataset's tar shards, also in subfolders train, valid, test.
#
# - Manifests (*.json, *.jsonl; one JSON object per line): audio_filepath, text, duration, offset, speaker, channel (or
#   channel_selector).
# - Tarred: audio_0.tar, audio_1.tar, … and tarred_audio_manifest.json, or sharded_manifests/manifest_0.json, …, whose
#   rows have a shard_id and name a member. If a file is cut into several rows by `offset`, the second and later rows
#   are named `…-sub1`, `…-sub2`, and refer to the member without that ending.
# - WebDataset: tars without a manifest. The members key.wav (or flac, mp3, …), key.txt and key.json form an utterance;
#   the key is the name up to the first period after its folder.
#
# Tars are indexed by their headers and read without unpacking; compressed tars are refused.
# Sources: https://docs.nvidia.com/nemo/speech/latest/asr/datasets.html, NeMo's convert_to_tarred_audio_dataset.py, and
# https://github.com/webdataset/webdataset#the-webdataset-format


SHARD = re.compile(r".*\.(tar|tar\.gz|tgz|tar\.xz|tar\.bz2|tar\.zst)")
TARRED = "tarred_audio_manifest.json"
SHARDED = "sharded_manifests"


def find_nemo_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of the manifests, or the members of the shards, in the folder and its direct subfolders.

    Raises:
        DataError: If there is neither a manifest nor a shard, or a tar cannot be read.
    """
    if source.table:
        table = source.table_path()
        yield from _read_manifest(source, table, table.parent, "")
        return
    folders = [source.path, *(p for p in visible_entries(source.path) if p.is_dir() and p.name != SHARDED)]
    is_empty = True
    for folder in folders:
        tarred = [folder / TARRED] if (folder / TARRED).exists() else _manifests(folder / SHARDED)
        manifests = tarred or _manifests(folder)
        shards = [path for path in visible_entries(folder) if SHARD.fullmatch(path.name)]
        is_empty &= not (manifests or shards)
        for manifest in manifests:
            yield from _read_manifest(source, manifest, folder, _split(source, manifest))
        # With a manifest, the tars are read through it.
        for shard in [] if manifests else shards:
            yield from _read_shard(source, shard, _split(source, shard))
    if is_empty:
        raise DataError(
            f"{source.path} contains neither manifests (*.json, *.jsonl) nor shards (*.tar). Check --source."
        )


def _manifests(folder: Path) -> list[Path]:
    paths = visible_entries(folder) if folder.is_dir() else ()
    # By length first, so that manifest_2 precedes manifest_10.
    return sorted((p for p in paths if p.suffix in (".json", ".jsonl")), key=lambda path: (len(path.name), path.name))


def _split(source: SpeechFolder, file: Path) -> str:
    return split_of_path(reversed(file.relative_to(source.path).parts))


def _read_manifest(source: SpeechFolder, manifest: Path, folder: Path, split: str) -> SourceRows:
    """Yield the rows of a manifest; rows with a shard_id name members of the tars in `folder`."""
    shards: dict[str, dict[str, Member]] = {}
    file = source.name_of(manifest)
    # The rows of sharded_manifests/manifest_N.json belong to audio_N.tar, with or without a shard_id.
    of_shard = re.fullmatch(r"manifest_(\d+)\.jsonl?", manifest.name) if manifest.parent.name == SHARDED else None
    for number, line in read_lines(manifest):
        try:
            row = parse_json(line)
        except ValueError as error:
            yield RefusedRow(file, number, "broken row", f"not a line of JSON ({error})")
            continue
        fields = row if isinstance(row, dict) else {}
        name = fields.get("audio_filepath")
        if not isinstance(name, str) or not name:
            yield RefusedRow(file, number, "broken row", "audio_filepath must be a string with a path")
            continue
        utterance = _utterance(file, number, fields, manifest.parent / name, split)
        if isinstance(utterance, RefusedRow):
            yield utterance
            continue
        shard_id = as_text(fields.get("shard_id")) or (of_shard.group(1) if of_shard else "")
        if shard_id.isdecimal():
            shard = folder / f"audio_{shard_id}.tar"
            # Index a tar once, when its first row is read.
            if shard.name not in shards:
                shards[shard.name] = _index(shard)
            stem, dot, suffix = name.rpartition(".")
            members = shards[shard.name]
            names = (name, re.sub(r"-sub\d+$", "", stem) + dot + suffix)
            # An exact name has precedence, then the name without -subN, then both in NFC.
            member = next(
                (
                    members[name_in_shard]
                    for name_in_shard in (*names, *map(comparable_name, names))
                    if name_in_shard in members
                ),
                None,
            )
            absent = RefusedRow(file, number, "missing audio", f"{shard.name} has no member {name}", name)
            yield _locate_member(utterance, shard, member) if member else absent
        else:
            yield utterance


def _utterance(file: str, row: int, fields: dict[str, object], audio: Path, split: str) -> SourceUtterance | RefusedRow:
    text = as_text(fields.get("text"))
    speaker = as_text(fields.get("speaker"))
    utterance = SourceUtterance(file, row, audio, text, speaker=speaker, split=split)
    try:
        utterance = replace(utterance, channel=parse_channel(fields))
    except ValueError as error:
        return utterance.refused("channel", str(error))
    return utterance.lasting(as_seconds(fields.get("offset")), as_seconds(fields.get("duration")))


def _index(shard: Path) -> dict[str, Member]:
    if not shard.exists():
        packed = next((p for p in shard.parent.glob(f"{shard.name}.*")), None)
        if packed:
            raise DataError(f"{shard} does not exist, but {packed.name} does. Decompress it to {shard.name}.")
        raise DataError(f"{shard} is listed in its manifest but does not exist. Download {shard.name} as well.")
    members = {member.name: member for member in read_members(shard)}
    for name in list(members):
        # An exact name has precedence over another one with the same NFC form.
        members.setdefault(comparable_name(name), members[name])
    return members


def _locate_member(
    utterance: SourceUtterance | RefusedRow, shard: Path, member: Member
) -> SourceUtterance | RefusedRow:
    if isinstance(utterance, RefusedRow):
        return utterance
    if not member.byte_count:
        return RefusedRow(utterance.file, utterance.row, "unusable audio", "the member is empty", member.name)
    return replace(utterance, audio=shard, byte_offset=member.byte_offset, byte_count=member.byte_count)


def _read_shard(source: SpeechFolder, shard: Path, split: str) -> SourceRows:
    file = source.name_of(shard)
    for key, (row, members) in _members_by_key(shard).items():
        audio = members.get("audio")
        text = members.get(".txt")
        described = members.get(".json")
        if audio is None:
            continue  # not an utterance: __meta__, class lists and the like
        if text is None and described is None:
            yield RefusedRow(file, row, "no transcript", f"{key} has neither .txt nor .json", audio.name)
            continue
        fields: dict[str, object] = {}
        if described is not None:
            try:
                parsed = parse_json(read_member_text(shard, described))
            except ValueError as error:
                yield RefusedRow(file, row, "broken row", f"{described.name} is not JSON ({error})", key)
                continue
            fields = parsed if isinstance(parsed, dict) else {}
        # The .txt has precedence over the text in the .json.
        if text is not None:
            fields = fields | {"text": " ".join(read_member_text(shard, text).split())}
        elif "text" not in fields:
            fields = fields | {"text": fields.get("transcript") or fields.get("sentence")}
        # `speaker` overrides `speaker_id`.
        fields = {"speaker": fields.get("speaker_id")} | fields
        yield _locate_member(_utterance(file, row, fields, shard, split), shard, audio)


def _members_by_key(shard: Path) -> dict[str, tuple[int, dict[str, Member]]]:
    """Return the members of a shard by key and kind (audio, .txt, .json), with the position of the audio, from 1."""
    gathered: dict[str, tuple[int, dict[str, Member]]] = {}
    for row, member in enumerate(read_members(shard), start=1):
        if any(is_hidden(part) for part in member.name.split("/") if part not in (".", "..")):
            continue  # tar on macOS adds a file ._0.wav for each 0.wav
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        # key.left.wav belongs to `key`: the key ends at the first period, the kind starts at the last.
        key = folder + slash + stem
        suffix = "." + extension.lower().rpartition(".")[2]
        place, members = gathered.get(key, (0, {}))
        is_audio = suffix in AUDIO_SUFFIXES
        gathered[key] = row if is_audio else place, members | {"audio" if is_audio else suffix: member}
    return gathered
