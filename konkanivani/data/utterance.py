"""One row of a JSONL manifest in NeMo's layout: an utterance, read from its line and written as one.

A row is a JSON object: `audio_filepath` (relative to the manifest's folder, or absolute), `duration` in seconds,
`text`, and optionally `speaker` and `pattern` (`seen` or `unseen` in training; the built-in corpus sets it). With
`offset` it is the `duration` seconds of its file that begin `offset` seconds into it, with `byte_offset` and
`byte_count` the audio file is a part of the file named: a member of a tar shard. With `channel` (from 0) it is that
channel alone of a recording with one speaker per channel; without it, the mean of all channels.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field

from konkanivani.data.audio.channels import parse_channel
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.roots import OUTSIDE, is_named_inside
from konkanivani.data.text import forbidden_character, forbidden_in_transcript

MAX_SECONDS = 1e9


class BadRow(Exception):
    """What is wrong with a row; `audio_filepath` is its own where it names one."""

    def __init__(self, reason: str, audio_filepath: str = "") -> None:
        super().__init__(reason)
        self.audio_filepath = audio_filepath


@dataclass(frozen=True)
class Utterance:
    """One row of a manifest; `duration` and `offset` are in seconds, `offset` None stands for the whole audio file.

    `audio_filepath` is the path as the manifest writes it, `audio_path` the one to open. `row` is the line in its file,
    from 1 (0: from no file), and no part of what the utterance is; nor are the `roots`, in one of which its audio must
    lie (None: anywhere).
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
        """Its name: the path, with the byte and the second at which it begins where it is a part of the file.

        A channel is a part too: two rows of one recording with different channels have different audio.
        """
        member = f"#{self.byte_offset}" if self.byte_count else ""
        begin = "" if self.offset is None else f"@{self.offset:g}"
        return f"{self.audio_filepath}{member}{begin}" + ("" if self.channel is None else f":ch{self.channel}")

    @property
    def mark(self) -> int:
        """A hash of what stays where its corpus is moved, its audio changed to another format, its text corrected."""
        stem = os.path.splitext(os.path.basename(self.audio_filepath))[0]
        place = (stem, self.byte_offset, self.offset or 0.0, round(self.duration, 2))
        if self.channel is not None:
            place += (self.channel,)
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "big")

    @property
    def source(self) -> AudioSource:
        place = self.audio_path, self.byte_offset, self.byte_count
        # The user names the manifest, and with it its absolute paths; only relative paths are confined to its folder.
        roots = None if os.path.isabs(self.audio_filepath) else self.roots
        return AudioSource(*place, self.offset, self.duration, roots, self.channel)


def row_of(utterance: Utterance) -> dict[str, object]:
    """The utterance as the fields of its row."""
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
    """The utterance of a manifest's line; `folder` is the manifest's. A BadRow says what is wrong with it.

    `roots` are the folders that its audio must lie in, the manifest's own first. Without `needs_text` a row may leave
    out its text: noise has none.
    """
    try:
        fields = json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:
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
    """What is wrong with a row's fields beside the path; None where nothing is."""
    text, duration, offset = fields.get("text"), fields.get("duration"), fields.get("offset")
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
        if type(value) is not int or not 0 <= value < 2**63:
            return f"{name} must be a number of bytes, not {value!r:.200}"
    return None


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < MAX_SECONDS
