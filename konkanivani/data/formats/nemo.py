"""NeMo's JSONL manifests, NeMo's tarred data sets, and WebDataset's tar shards, also in subfolders train, valid, test.

- Manifests (*.json, *.jsonl; one JSON object per line): audio_filepath, text, duration, offset, speaker, channel (or
  channel_selector).
- Tarred: audio_0.tar, audio_1.tar, … and tarred_audio_manifest.json, or sharded_manifests/manifest_0.json, …, whose
  rows have a shard_id and name a member. If a file is cut into several rows by `offset`, the second and later rows are
  named `…-sub1`, `…-sub2`, and refer to the member without that ending.
- WebDataset: tars without a manifest. The members key.wav (or flac, mp3, …), key.txt and key.json form an utterance;
  the key is the name up to the first period after its folder.

Tars are indexed by their headers and read without unpacking; compressed tars are refused.
Sources: https://docs.nvidia.com/nemo/speech/latest/asr/datasets.html, NeMo's convert_to_tarred_audio_dataset.py, and
https://github.com/webdataset/webdataset#the-webdataset-format
"""

import re
from dataclasses import replace
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import is_hidden, visible_entries
from konkanivani.data.audio.channels import parse_channel
from konkanivani.data.audio.names import AUDIO_SUFFIXES
from konkanivani.data.audio.unicode_paths import comparable_name
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.shards import Member, read_member_text, read_members
from konkanivani.data.formats.splits import split_of_path
from konkanivani.data.formats.tables import as_seconds, as_text, parse_json, read_lines

SHARD = re.compile(r".*\.(tar|tar\.gz|tgz|tar\.xz|tar\.bz2|tar\.zst)")
TARRED = "tarred_audio_manifest.json"
SHARDED = "sharded_manifests"


def find_nemo_utterances(source: SpeechFolder) -> Found:
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


def _read_manifest(source: SpeechFolder, manifest: Path, folder: Path, split: str) -> Found:
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
        found = _utterance(file, number, fields, manifest.parent / name, split)
        if isinstance(found, RefusedRow):
            yield found
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
            member = next((members[each] for each in (*names, *map(comparable_name, names)) if each in members), None)
            absent = RefusedRow(file, number, "missing audio", f"{shard.name} has no member {name}", name)
            yield _of_member(found, shard, member) if member else absent
        else:
            yield found


def _utterance(file: str, row: int, fields: dict[str, object], audio: Path, split: str) -> FoundUtterance | RefusedRow:
    text = as_text(fields.get("text"))
    speaker = as_text(fields.get("speaker"))
    found = FoundUtterance(file, row, audio, text, speaker=speaker, split=split)
    try:
        found = replace(found, channel=parse_channel(fields))
    except ValueError as error:
        return found.refused("channel", str(error))
    return found.lasting(as_seconds(fields.get("offset")), as_seconds(fields.get("duration")))


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


def _of_member(found: FoundUtterance | RefusedRow, shard: Path, member: Member) -> FoundUtterance | RefusedRow:
    if isinstance(found, RefusedRow):
        return found
    if not member.byte_count:
        return RefusedRow(found.file, found.row, "unusable audio", "the member is empty", member.name)
    return replace(found, audio=shard, byte_offset=member.byte_offset, byte_count=member.byte_count)


def _read_shard(source: SpeechFolder, shard: Path, split: str) -> Found:
    file = source.name_of(shard)
    for key, (row, members) in _keyed(shard).items():
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
        yield _of_member(_utterance(file, row, fields, shard, split), shard, audio)


def _keyed(shard: Path) -> dict[str, tuple[int, dict[str, Member]]]:
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
