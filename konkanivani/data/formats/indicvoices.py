"""AI4Bharat's IndicVoices, unpacked: <Language>/v1/train/*.json and valid/*.json, with the audio in the same folders.

- The JSON of a recording has lists `verbatim` and `normalized` of segments (start, end, text, speaker_id) and a
  speaker_id of its own; the audio is the file of the same name. --text_column selects the list; the authors of the
  corpus train on `normalized`.
- Flat rows, as the authors' script writes them, one per line, in a list or alone: audio_filepath, duration, text (or
  verbatim, normalized), speaker_id, and for spans of a file `offset`, or `start` and `end`.

As in that script, segments of speaker 1 and segments without a word are left out (and listed), and text in square,
angle or round brackets is removed: [noise], <unclear>, (laughs).
Source: TGZ/create_indicvoices.py of https://github.com/AI4Bharat/IndicVoices
"""

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import visible_files
from konkanivani.data.audio.names import AUDIO_SUFFIXES
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_of_path
from konkanivani.data.formats.tables import as_seconds, as_text, parse_json, read_text
from konkanivani.data.text import normalize_text

MARKS = re.compile(r"\[[^\[\]]*\]|<[^<>]*>|\([^()]*\)")  # linear time, even with many unclosed brackets
TEXT_COLUMNS = ("normalized", "verbatim")


def find_indicvoices_utterances(source: SpeechFolder) -> Found:
    """Yield the segments and rows of all JSON files below the folder.

    Raises:
        DataError: If there is no JSON file, or `--text_column` is unknown.
    """
    if source.text_column and source.text_column not in TEXT_COLUMNS:
        raise DataError(
            f"IndicVoices has no text column {source.text_column!r}. Use --text_column normalized or verbatim."
        )
    paths = sorted(path for path in visible_files(source.path) if path.name.endswith(".json"))
    if not paths:
        raise DataError(
            f"{source.path} contains no JSON files. Use the folder of the unpacked IndicVoices archive as --source."
        )
    for path in paths:
        yield from _read_file(source, path, split_of_path(reversed(path.relative_to(source.path).parts[:-1])))


def _read_file(source: SpeechFolder, path: Path, split: str) -> Found:
    file = source.name_of(path)
    try:
        rows = list(_rows(read_text(path)))
    except (DataError, ValueError) as error:
        reason = str(error) if isinstance(error, DataError) else f"it is not JSON ({error})"
        yield RefusedRow(file, 1, "broken row", reason)
        return
    for number, row in rows:
        if not isinstance(row, dict):
            yield RefusedRow(file, number, "broken row", "a JSON object is expected")
        elif isinstance(row.get("verbatim"), list) or isinstance(row.get("normalized"), list):
            yield from _segments(source, path, row, split)
        else:
            yield _flat(source, path, number, row, split)


def _rows(texts: str) -> Iterator[tuple[int, object]]:
    """Yield the objects of a file, numbered from 1: a single object, the items of a list, or one object per line."""
    try:
        whole = parse_json(texts)
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
    except ValueError:
        lines = [(row, line) for row, line in enumerate(texts.split("\n"), start=1) if line.strip()]
        # A single line is not JSON lines: report the error of the whole text.
        if len(lines) < 2:
            raise
        yield from ((row, parse_json(line)) for row, line in lines)


def _segments(source: SpeechFolder, path: Path, recording: dict[str, object], split: str) -> Found:
    """Yield the segments of a recording; the row number is the segment's number."""
    file = source.name_of(path)
    audio = _audio(path, recording)
    name = source.text_column or ("normalized" if isinstance(recording.get("normalized"), list) else "verbatim")
    segments = recording.get(name)
    for number, segment in enumerate(segments if isinstance(segments, list) else [], start=1):
        refused = partial(RefusedRow, file, number, audio_filepath=str(audio))
        fields = segment if isinstance(segment, dict) else {}
        start = as_seconds(fields.get("start"))
        end = as_seconds(fields.get("end"))
        text = _without_marks(as_text(fields.get("text")))
        if start is None or end is None:
            yield refused("broken row", "a segment with start, end and text is expected")
        # Not damage: the authors' own script excludes them, too.
        elif as_text(fields.get("speaker_id")) == "1":
            reason = "it is by speaker 1, which the authors of the corpus exclude"
            yield refused("speaker 1", reason, is_expected=True)
        elif not normalize_text(text):
            yield refused("no word", "the segment has no word", is_expected=True)
        else:
            begin = max(start, 0.0)  # some segments start slightly before their file
            # The label is the recording's speaker_id; a segment's is only compared with speaker 1 above.
            speaker = as_text(recording.get("speaker_id"))
            found = FoundUtterance(file, number, audio, text, speaker=speaker, split=split)
            yield found.lasting(begin, end - begin)


def _flat(source: SpeechFolder, path: Path, number: int, row: dict[str, object], split: str) -> FoundUtterance:
    start = as_seconds(row.get("start"))
    end = as_seconds(row.get("end"))
    offset = as_seconds(row.get("offset"))
    duration = as_seconds(row.get("duration"))
    if start is not None and end is not None:
        # `start` and `end` override `offset` and `duration`.
        offset = max(start, 0.0)
        duration = end - max(start, 0.0)
    names = (source.text_column,) if source.text_column else ("text", *TEXT_COLUMNS)
    text = next((as_text(row[name]) for name in names if row.get(name)), "")
    speaker = as_text(row.get("speaker_id")) or as_text(row.get("speaker"))
    file = source.name_of(path)
    audio = _audio(path, row)
    found = FoundUtterance(file, number, audio, _without_marks(text), speaker=speaker, split=split)
    return found.lasting(offset, duration)


def _audio(path: Path, row: dict[str, object]) -> Path:
    """Return the audio file that a row names, else the audio file with the name of the JSON file."""
    named = as_text(row.get("audio_filepath"))
    if named:
        return path.parent / named
    candidates = [path.with_suffix(suffix) for suffix in AUDIO_SUFFIXES]
    # If none exists, the first is refused later as missing audio.
    return next((candidate for candidate in candidates if os.path.exists(existing_path(str(candidate)))), candidates[0])


def _without_marks(text: str) -> str:
    return " ".join(MARKS.sub(" ", text).split())
