"""Transcripts to score, loaded from files: plain lines, lines that start with an id (Kaldi), or JSON lines.

JSON lines are rows of a manifest or of the output of konkanivani evaluate. The reference of a row is its `reference`,
else its `text`; its hypothesis is its `hypothesis`, else its `pred_text` (NeMo), else its `text`.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from konkanivani.console import count, show_text
from konkanivani.data.audio.files import as_label, parse_channel
from konkanivani.data.index import Utterance
from konkanivani.errors import DataError, explained

TextFormat = Literal["lines", "ids"]
Role = Literal["reference", "hypothesis", "own hypothesis"]
FIELDS: dict[Role, tuple[str, ...]] = {
    "reference": ("reference", "text"),
    "hypothesis": ("hypothesis", "pred_text", "text"),
    "own hypothesis": ("hypothesis", "pred_text"),  # in a row with its reference, which may be the text
}
MAX_CHARACTERS = 200_000  # three hours of speech; aligning two such texts takes seconds, quadratic in the length
MAX_BYTES = 8 * MAX_CHARACTERS  # per line, with the other fields of a JSON object
MAX_NAMED = 3


@dataclass(frozen=True)
class TranscriptRow:
    """A text and the metadata of its utterance in the file; the id is "" and the seconds are None if unknown."""

    text: str
    id: str = ""
    speaker: str = ""
    seconds: float | None = None
    pattern: str = ""


@dataclass(frozen=True)
class TranscriptFile:
    """The transcripts of a file in order; either all have distinct ids, or none has an id."""

    path: str
    rows: tuple[TranscriptRow, ...]

    @property
    def has_ids(self) -> bool:
        """Return whether the transcripts have ids."""
        return bool(self.rows and self.rows[0].id)


@dataclass(frozen=True)
class ScoredText:
    """Reference and hypothesis of an utterance, and its metadata."""

    id: str
    reference: str
    hypothesis: str
    speaker: str = ""
    seconds: float | None = None
    pattern: str = ""


def read_transcripts(path: str, text_format: TextFormat, role: Role) -> TranscriptFile:
    """Load the transcripts of a file.

    Files named .jsonl or .json are JSON lines, all others have the `text_format`.

    Raises:
        DataError: If the file cannot be read or is invalid.
    """
    is_json = is_json_file(path)
    rows = []
    for number, line in _lines(path):
        # With plain lines, a blank line is an empty transcript.
        if (is_json or text_format == "ids") and not line.strip():
            continue
        if is_json:
            row = _parse_json(f"{path}, line {number}", line, role)
        elif text_format == "ids":
            name, _, text = line.strip().replace("\t", " ").partition(" ")
            row = TranscriptRow(text, id=name)
        else:
            row = TranscriptRow(line)
        if len(row.text) > MAX_CHARACTERS:
            raise _too_long(path, number)
        rows.append(row)
    if not rows:
        raise DataError(f"{path} is empty. Give a file with transcripts.")
    _check_ids(path, rows)
    return TranscriptFile(path, tuple(rows))


def is_json_file(path: str) -> bool:
    """Return whether the file's name marks it as JSON lines."""
    return Path(path).suffix.lower() in (".jsonl", ".json")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers from 1, without line end and byte order mark."""
    with explained(DataError, f"{path} cannot be read", "Give the path of a file."), open(path, "rb") as file:
        # The limit keeps a binary file without line ends from filling the memory.
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), start=1):
            if len(line) > MAX_BYTES:
                raise _too_long(path, number)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{path}, line {number} is not UTF-8. Save the file as UTF-8 text.") from None
            yield number, text.removesuffix("\n").removesuffix("\r")


def _too_long(path: str, number: int) -> DataError:
    return DataError(
        f"{path}, line {number} has more than {MAX_CHARACTERS:,} characters, too many to align. Write one "
        "utterance per line."
    )


def _parse_json(place: str, line: str, role: Role) -> TranscriptRow:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} is not a line of JSON ({error}). Rename the file if it contains plain text."
        ) from None
    if not isinstance(fields, dict):
        raise DataError(f"{place} is not a JSON object. Write rows like those of a manifest.")
    names = FIELDS[role]
    text = next((fields[name] for name in names if fields.get(name) is not None), None)
    if not isinstance(text, str):
        raise DataError(f"{place} has no {role.removeprefix('own ')}: give it as a string named {' or '.join(names)}.")
    row = TranscriptRow(
        text,
        id=_id_of(fields),
        speaker=as_label(fields.get("speaker")),
        seconds=_valid_seconds(fields.get("duration")),
        pattern=as_label(fields.get("pattern")),
    )
    # JSON escapes can contain lone surrogates, which cannot be encoded as UTF-8.
    if any("\ud800" <= c <= "\udfff" for c in row.text + row.id + row.speaker + row.pattern):
        raise DataError(f"{place} contains an unpaired surrogate (\\ud800 to \\udfff). Fix the row.")
    return row


def _valid_seconds(duration: object) -> float | None:
    """Return a row's duration in seconds; None if it is not a finite number from 0."""
    # bool is a subclass of int.
    if isinstance(duration, bool) or not isinstance(duration, (int, float)):
        return None
    try:
        seconds = float(duration)
    except OverflowError:  # an integer of 310 digits, which Python compares as finite
        return None
    return seconds if 0 <= seconds < math.inf else None


def _integer(value: object) -> int:
    """Return an integer as it is, anything else as 0."""
    return value if isinstance(value, int) else 0


def _id_of(fields: dict[str, object]) -> str:
    """Return the row's id as `Utterance` forms it, else its `id` field; "" if it has neither."""
    audio = fields.get("audio_filepath")
    offset = fields.get("offset")
    if not isinstance(audio, str) or not audio:
        return as_label(fields.get("id"))
    byte_offset = _integer(fields.get("byte_offset"))
    byte_count = _integer(fields.get("byte_count"))
    # Integers from 2**53 on are not exact as float64, and may overflow.
    begin = float(offset) if isinstance(offset, float) or (isinstance(offset, int) and abs(offset) < 2**53) else None
    try:
        channel = parse_channel(fields)
    except ValueError:
        channel = None  # another system may use this field differently
    return Utterance(
        audio, "", 0.0, "", offset=begin, byte_offset=byte_offset, byte_count=byte_count, channel=channel
    ).id


def _check_ids(path: str, rows: list[TranscriptRow]) -> None:
    """Raise a DataError if an id occurs twice, or only some rows have one."""
    with_id = sum(bool(row.id) for row in rows)
    if with_id not in (0, len(rows)):
        row = next(number for number, row in enumerate(rows, start=1) if not row.id)
        raise DataError(
            f"{path}: {count(with_id, 'row', 'has/have')} an id (audio_filepath) but others, such as row "
            f"{row}, have none. Give an id to all rows or to none."
        )
    repeated = [name for name, times in Counter(row.id for row in rows).items() if times > 1] if with_id else []
    if repeated:
        raise DataError(f"{path} has several transcripts of {_names(repeated)}. Keep one of each.")


def _names(ids: Sequence[str]) -> str:
    """Return the first few ids, and the number of the others."""
    listed = ", ".join(show_text(name, 80) for name in ids[:MAX_NAMED])
    return listed if len(ids) <= MAX_NAMED else f"{listed} and {len(ids) - MAX_NAMED:,} more"


def pair_transcripts(references: TranscriptFile, hypotheses: TranscriptFile) -> list[ScoredText]:
    """Pair each reference with its hypothesis, by id if both files have ids, else line by line; without normalisation.

    Raises:
        DataError: If a transcript has no counterpart.
    """
    if not (references.has_ids and hypotheses.has_ids):
        if len(references.rows) != len(hypotheses.rows):
            raise DataError(
                f"{references.path} has {len(references.rows):,} transcripts and {hypotheses.path} "
                f"{len(hypotheses.rows):,}, so they cannot be paired line by line. Write one line per "
                "utterance in both, empty for an empty transcript, or use files with ids (--format ids, or "
                "JSON lines)."
            )
        texts = [row.text for row in hypotheses.rows]
    else:
        text_by_id = {row.id: row.text for row in hypotheses.rows}
        missing = [row.id for row in references.rows if row.id not in text_by_id]
        additional = sorted(text_by_id.keys() - {row.id for row in references.rows})
        # A missing hypothesis is an error, not an empty transcript: it would be scored as deletions.
        for incomplete, complete, ids in ((hypotheses, references, missing), (references, hypotheses, additional)):
            if ids:
                raise DataError(
                    f"{incomplete.path} has no transcript of {len(ids):,} of the {len(complete.rows):,} utterances of "
                    f"{complete.path}: {_names(ids)}. Write each utterance into both files, with an empty text "
                    "for an empty transcript."
                )
        texts = [text_by_id[row.id] for row in references.rows]
    return [
        ScoredText(row.id or f"line {number}", row.text, text, row.speaker, row.seconds, row.pattern)
        for number, (row, text) in enumerate(zip(references.rows, texts, strict=True), start=1)
    ]


def match_hypotheses(texts: Sequence[ScoredText], other: TranscriptFile) -> list[str | None]:
    """Return another system's hypothesis for each utterance, None for a missing one.

    Raises:
        DataError: If it has none for any of the utterances.
    """
    # Without ids, only an equal number of lines suggests the same utterances in the same order.
    if not other.has_ids and len(other.rows) == len(texts):
        return [row.text for row in other.rows]
    text_by_id = {row.id: row.text for row in other.rows if row.id}
    hypotheses = [text_by_id.get(text.id) for text in texts]
    if all(hypothesis is None for hypothesis in hypotheses):
        raise DataError(
            f"{other.path} has {len(other.rows):,} transcripts, none of which can be paired with the "
            f"{len(texts):,} utterances scored. Use hypotheses of the same utterances, with the same ids or in "
            "the same order."
        )
    return hypotheses


def are_probably_ids(texts: Sequence[ScoredText]) -> bool:
    """Return whether both texts of each line start with the same word, which contains a digit and never recurs."""
    firsts = [[text.split()[0] if text.split() else "" for text in (t.reference, t.hypothesis)] for t in texts]
    is_alike = all(first == second and any(c.isdigit() for c in first) for first, second in firsts)
    return len(texts) > 2 and is_alike and len({first for first, _ in firsts}) == len(texts)
