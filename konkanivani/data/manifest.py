"""JSONL manifests in NeMo's layout and the utterances they list.

One JSON object a line: `audio_filepath` (relative to the manifest's folder, or absolute), `duration` in seconds,
`text`, and optionally `speaker` and `pattern` (`seen` or `unseen` in training; the built-in corpus sets it).
With `offset` an utterance is the `duration` seconds of its file that begin `offset` seconds into it. With `byte_offset`
and `byte_count` the audio file is a part of the file named: a member of a tar shard.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from konkanivani.audio_file import AudioSource
from konkanivani.errors import DataError
from konkanivani.json_lines import write_json_lines

LONGEST_SECONDS = 1e9


@dataclass(frozen=True)
class Utterance:
    """One row of a manifest; `duration` and `offset` are in seconds, `offset` None stands for the whole audio file.

    `audio_filepath` is the path as the manifest writes it, `audio_path` the one to open. `row` is the line in its file,
    from 1 (0: from no file), and no part of what the utterance is.
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
    row: int = field(default=0, compare=False)

    @property
    def id(self) -> str:
        """Its name: the path, with the byte and the second at which it begins where it is a part of the file."""
        member = f"#{self.byte_offset}" if self.byte_count else ""
        return f"{self.audio_filepath}{member}" + ("" if self.offset is None else f"@{self.offset:g}")

    @property
    def source(self) -> AudioSource:
        """Where its audio lies."""
        span = (0.0, None) if self.offset is None else (self.offset, self.duration)
        return AudioSource(self.audio_path, self.byte_offset, self.byte_count, *span)


@dataclass(frozen=True)
class Manifest:
    """The utterances of one manifest file, in the file's order."""

    path: str
    utterances: tuple[Utterance, ...]


def read_manifest(path: str | Path, needs_text: bool = True) -> Manifest:
    """The manifest at `path`; a DataError names the row and the field of the first thing wrong with it.

    Without `needs_text` a row may leave out its text: noise has none.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"The manifest {path} cannot be read: {error.strerror or error}. Give the path of a JSONL manifest."
        ) from None
    utterances = [_parse_row(line, path, row, needs_text) for row, line in enumerate(lines, start=1) if line.strip()]
    if not utterances:
        fields = "audio_filepath, duration and text" if needs_text else "audio_filepath and duration"
        raise DataError(f"The manifest {path} is empty. Each line must be a JSON object with {fields}.")
    return Manifest(str(path), tuple(utterances))


def write_manifest(path: str | Path, utterances: list[Utterance]) -> None:
    """Writes one JSON line an utterance beside `path`, renamed into place."""
    write_json_lines(Path(path), map(_row_of, utterances))


def _row_of(utterance: Utterance) -> dict[str, object]:
    row = {
        "audio_filepath": utterance.audio_filepath,
        "duration": round(utterance.duration, 4),
        "text": utterance.text,
    }
    if utterance.offset is not None:
        row["offset"] = round(utterance.offset, 4)
    if utterance.byte_count:
        row |= {"byte_offset": utterance.byte_offset, "byte_count": utterance.byte_count}
    marks = {"speaker": utterance.speaker, "pattern": utterance.pattern}
    return row | {name: mark for name, mark in marks.items() if mark}


def _parse_row(line: bytes, path: Path, row: int, needs_text: bool) -> Utterance:
    where = f"{path}, row {row}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON ({error}). Mend or delete the row.") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a {type(fields).__name__} where a JSON object is expected. Mend or delete the row.")
    if not needs_text and fields.get("text") is None:
        fields["text"] = ""
    reason = _reason_to_refuse(fields)
    if reason:
        raise DataError(f"{where}: {reason}. Mend or delete the row.")
    offset = fields.get("offset")
    return Utterance(
        audio_filepath=fields["audio_filepath"],
        audio_path=os.path.join(path.parent, fields["audio_filepath"]),
        duration=float(fields["duration"]),
        text=fields["text"],
        speaker=str(fields.get("speaker") or ""),
        pattern=str(fields.get("pattern") or ""),
        offset=None if offset is None else float(offset),
        byte_offset=fields.get("byte_offset", 0),
        byte_count=fields.get("byte_count", 0),
        row=row,
    )


def _reason_to_refuse(fields: dict[str, object]) -> str | None:
    """What is wrong with a row's fields; None where nothing is."""
    audio, text = fields.get("audio_filepath"), fields.get("text")
    if not isinstance(audio, str) or not audio or "\0" in audio:
        return f"audio_filepath must be a path in quotes, not {audio!r}"
    if not isinstance(text, str):
        return f"text must be the transcript in quotes, not {text!r}"
    if not _is_seconds(fields.get("duration")):
        return f"duration must be a number of seconds, not {fields.get('duration')!r}"
    if fields.get("offset") is not None and not _is_seconds(fields["offset"]):
        return f"offset must be a number of seconds, not {fields['offset']!r}"
    for name in ("byte_offset", "byte_count"):
        value = fields.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**63:
            return f"{name} must be a number of bytes, not {value!r}"
    return None


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LONGEST_SECONDS
