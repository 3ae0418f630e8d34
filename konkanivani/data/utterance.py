"""Rows of a JSONL manifest in NeMo's format: parsing and serialization of one utterance.

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
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from konkanivani.data.audio.channels import parse_channel
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.roots import OUTSIDE, is_named_inside
from konkanivani.data.text import forbidden_character, forbidden_in_transcript

MAX_SECONDS = 1e9


class BadRow(Exception):
    """Invalid row; `audio_filepath` is the row's path, empty if it has none."""

    def __init__(self, reason: str, audio_filepath: str = "") -> None:
        super().__init__(reason)
        self.audio_filepath = audio_filepath


@dataclass(frozen=True)
class Utterance:
    """Row of a manifest; `duration` and `offset` are in seconds, `offset` is None for a whole audio file.

    `audio_filepath` is the path as written in the manifest, `audio_path` the path to open. `row` is the line number
    from 1 (0: not from a file). Audio must be inside one of the `roots` (None: anywhere). `row` and `roots` are
    excluded from comparison.
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
        """Return a 56-bit hash that survives moving the corpus, converting its audio and correcting its text."""
        stem = os.path.splitext(os.path.basename(self.audio_filepath))[0]
        place: tuple[object, ...] = (stem, self.byte_offset, self.offset or 0.0, round(self.duration, 2))
        # Only with a channel, so that the hashes of older checkpoints stay valid.
        if self.channel is not None:
            place += (self.channel,)
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "big")

    @property
    def source(self) -> AudioSource:
        place = self.audio_path, self.byte_offset, self.byte_count
        # The user names the manifest, and with it its absolute paths; only relative paths are confined to its folder.
        roots = None if os.path.isabs(self.audio_filepath) else self.roots
        return AudioSource(*place, self.offset, self.duration, roots, self.channel)


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
    try:
        fields = json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
        raise BadRow(f"not a line of JSON ({error}); prepare_data.py converts a table to a manifest") from None
    if not isinstance(fields, dict):
        raise BadRow(f"a {type(fields).__name__}, but a JSON object is expected")
    if not needs_text and fields.get("text") is None:
        fields["text"] = ""
    audio = fields.get("audio_filepath")
    if not isinstance(audio, str) or not audio or forbidden_character(audio):
        raise BadRow(f"audio_filepath must be a string with a path, not {audio!r:.200}")
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
        speaker=str(fields.get("speaker") or ""),
        pattern=str(fields.get("pattern") or ""),
        offset=None if offset is None else float(offset),
        byte_offset=fields.get("byte_offset", 0),
        byte_count=fields.get("byte_count", 0),
        channel=channel,
        row=row,
        roots=roots,
    )


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
