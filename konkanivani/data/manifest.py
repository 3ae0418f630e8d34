"""JSONL manifests in NeMo's layout and the utterances they list.

One JSON object a line: `audio_filepath` (relative to the manifest's folder, or absolute), `duration` in seconds,
`text`, and optionally `speaker` and `pattern` (`seen` or `unseen` in training; the built-in corpus sets it).
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from konkanivani.errors import DataError
from konkanivani.json_lines import write_json_lines

LONGEST_SECONDS = 1e9


@dataclass(frozen=True)
class Utterance:
    """One row of a manifest. `id` is the audio path as the manifest writes it; `duration` is in seconds.

    `row` is the line in its file, from 1 (0: from no file), and no part of what the utterance is.
    """

    id: str
    audio_path: str
    duration: float
    text: str
    speaker: str = ""
    pattern: str = ""
    row: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Manifest:
    """The utterances of one manifest file, in the file's order."""

    path: str
    utterances: tuple[Utterance, ...]


def read_manifest(path: str | Path) -> Manifest:
    """The manifest at `path`; a DataError names the row and the field of the first thing wrong with it."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"The manifest {path} cannot be read: {error.strerror or error}. Give the path of a JSONL manifest."
        ) from None
    utterances = [_parse_row(line, path, row) for row, line in enumerate(lines, start=1) if line.strip()]
    if not utterances:
        raise DataError(
            f"The manifest {path} is empty. Each line must be a JSON object with audio_filepath, duration and text."
        )
    return Manifest(str(path), tuple(utterances))


def write_manifest(path: str | Path, utterances: list[Utterance]) -> None:
    """Writes one JSON line an utterance beside `path`, renamed into place; audio paths are the utterances' ids."""
    write_json_lines(Path(path), map(_row_of, utterances))


def _row_of(utterance: Utterance) -> dict[str, object]:
    row = {"audio_filepath": utterance.id, "duration": round(utterance.duration, 4), "text": utterance.text}
    marks = {"speaker": utterance.speaker, "pattern": utterance.pattern}
    return row | {name: mark for name, mark in marks.items() if mark}


def _parse_row(line: bytes, path: Path, row: int) -> Utterance:
    where = f"{path}, row {row}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a line of JSON ({error}). Mend or delete the row.") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a {type(fields).__name__} where a JSON object is expected. Mend or delete the row.")
    audio = fields.get("audio_filepath")
    if not isinstance(audio, str) or not audio or "\0" in audio:
        raise DataError(f"{where}: audio_filepath must be a path in quotes, not {audio!r}. Mend or delete the row.")
    text = fields.get("text")
    if not isinstance(text, str):
        raise DataError(f"{where}: text must be the transcript in quotes, not {text!r}. Mend or delete the row.")
    duration = fields.get("duration")
    if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not 0 <= duration < LONGEST_SECONDS:
        raise DataError(f"{where}: duration must be a number of seconds, not {duration!r}. Mend or delete the row.")
    return Utterance(
        id=audio,
        audio_path=os.path.join(path.parent, audio),
        duration=float(duration),
        text=text,
        speaker=str(fields.get("speaker") or ""),
        pattern=str(fields.get("pattern") or ""),
        row=row,
    )
