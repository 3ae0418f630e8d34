"""Formats of published corpora: Common Voice, LJSpeech, OpenSLR, IndicVoices, and plain tables."""

import os
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from konkanivani.corpora.tables import (
    Record,
    RefusedRow,
    SourceRows,
    SourceUtterance,
    SpeechFolder,
    as_seconds,
    as_text,
    channel_column,
    choose_columns,
    columns_alike,
    mend_rows,
    named_separator,
    parse_json,
    read_cells,
    read_lines,
    read_records,
    read_text,
    split_named,
    split_of_path,
)
from konkanivani.data.audio.files import parse_channel_cell
from konkanivani.data.audio.paths import AUDIO_SUFFIXES, audio_rank, comparable_name, existing_path
from konkanivani.data.text import normalize_text
from konkanivani.errors import DataError, UsageError
from konkanivani.files import visible_entries, visible_files

# --------------------
# Mozilla Common Voice as downloaded: a folder clips/ of MP3 files with the tables train.tsv, dev.tsv and test.tsv.
#
# A quotation mark in a sentence is a literal character. Only tables that pandas has rewritten put sentences of several
# lines in quotes; such rows are joined again (`torn_rows`). Source: https://github.com/common-voice/cv-dataset


GIVEN = ("train.tsv", "dev.tsv", "test.tsv")


def find_common_voice_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of train.tsv, dev.tsv and test.tsv, or of the table given by `--table`.

    Raises:
        DataError: If the source is not a corpus of one language, or contains none of the tables.
    """
    folder = _language_folder(source)
    durations = folder / "clip_durations.tsv"  # only in newer releases
    clips = read_records(durations) if durations.exists() else ()
    milliseconds = ((record["clip"], as_seconds(record["duration[ms]"])) for record in clips)
    # A duration of 0 or an unreadable one is treated as unknown.
    seconds = {clip: value / 1000 for clip, value in milliseconds if value}
    names = (source.table,) if source.table else GIVEN
    tables = [folder / name for name in names if (folder / name).exists()]
    if not tables:
        raise DataError(f"{folder} contains none of {', '.join(names)}. Check --table and --source.")
    for table in tables:
        split = "" if source.table else split_named(table.name)
        yield from _read_table(source, table, folder / "clips", split, seconds)


def _read_table(source: SpeechFolder, table: Path, clips: Path, split: str, seconds: dict[str, float]) -> SourceRows:
    for record in mend_rows(read_records(table)):
        file = source.name_of(table)
        if not {"path", "sentence"} <= set(record.columns):
            raise DataError(f"{table} has no columns path and sentence. Check --format and --source.")
        name = record["path"]
        if record.flaw or not name:
            reason = record.flaw or "it has no clip name"
            yield RefusedRow(file, record.row, "broken row", reason, name)
            continue
        clip = name if name.endswith(".mp3") else f"{name}.mp3"  # the first releases omit the suffix
        text = record["sentence"]
        speaker = record["client_id"]
        utterance = SourceUtterance(file, record.row, clips / clip, text, speaker=speaker, split=split)
        # No offset: the duration is the file's, and is compared with its header later.
        yield utterance.lasting(None, seconds.get(clip))


def _language_folder(source: SpeechFolder) -> Path:
    """Return the folder with clips/ and the tables: `source.path`, or the only such folder in it (cv-corpus-…/kok)."""
    table_name = source.table or "train.tsv"
    folders = [f for f in (source.path, *visible_entries(source.path)) if (f / "clips").is_dir()]
    if len(folders) == 1:
        return folders[0]
    contents = f"{len(folders)} folders with clips/" if folders else "no folder clips/"
    raise DataError(
        f"{source.path} is not a Common Voice corpus of one language: it contains {contents}. Use the folder of "
        f"the language as --source, with clips/ and {table_name} in it."
    )


# --------------------
# LJSpeech and corpora of the same layout: metadata.csv of `id|text|normalised text` without a header, audio in wavs/.
#
# An id may also be a path relative to the corpus folder (`wavs/a0.wav`), with or without suffix. The transcript is the
# third column if it is not empty, else the second. Quotation marks are literal.
# Source: the README of LJSpeech-1.1, https://keithito.com/LJ-Speech-Dataset/


def find_ljspeech_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of metadata.csv, or of the table given by `--table`."""
    table = source.table_path() if source.table else source.path / "metadata.csv"
    file = source.name_of(table)
    for record in read_cells(table, "|"):
        name, *texts = record.cells
        if not name or not 1 <= len(texts) <= 2:
            reason = f"it has {len(record.cells)} columns instead of id|text|normalised text"
            yield RefusedRow(file, record.row, "broken row", reason, name)
            continue
        # The normalised text spells out numbers and abbreviations, as they are spoken.
        text = next((text for text in reversed(texts) if text.strip()), "")
        yield SourceUtterance(file, record.row, _ljspeech_audio(source.path, name), text)


def _ljspeech_audio(folder: Path, name: str) -> Path:
    """Return the audio file of an id, in wavs/ or in the corpus folder; if there is none, the more likely path."""
    in_wavs = _spellings(folder / "wavs" / name)
    as_it_stands = _spellings(folder / name)
    likelier = (as_it_stands if "/" in name else in_wavs)[0]
    return next((path for path in (*in_wavs, *as_it_stands) if os.path.exists(existing_path(str(path)))), likelier)


def _spellings(path: Path) -> list[Path]:
    """Return the candidate paths of an id: unchanged if it has an audio suffix, then with each suffix appended."""
    named = [path] if path.suffix.lower() in AUDIO_SUFFIXES else []
    # Append, not Path.with_suffix: an id may contain a period.
    return [*named, *(Path(f"{path}{suffix}") for suffix in AUDIO_SUFFIXES)]


# --------------------
# A folder tree of audio files, each with its transcript in a .txt file of the same name.
#
# Folders named train, valid (or dev) and test give the splits; the uppermost counts. The lines of a transcript are
# joined by spaces.


def find_folder_utterances(source: SpeechFolder) -> SourceRows:
    """Yield one utterance per recording, in the order of names, from its best-known audio format."""
    root = source.path.resolve()
    files = list(audio_files(source.path))
    best: dict[Path, Path] = {}
    for audio in files:
        # A recording may exist as .wav and .mp3; its transcript is used once.
        stem = audio.with_suffix("")
        best[stem] = min(audio, best.get(stem, audio), key=audio_rank)
    for audio in files:
        transcript = Path(existing_path(str(audio.with_suffix(".txt"))))
        preferred = best[audio.with_suffix("")]
        file = source.name_of(transcript)
        if preferred != audio and transcript.exists():
            reason = f"its transcript is already used for {preferred.name} in the same folder"
            yield RefusedRow(file, 1, "recorded twice", reason, source.name_of(audio), is_expected=True)
        elif not transcript.exists():
            yield RefusedRow(file, 1, "no transcript", "the file does not exist", source.name_of(audio))
        # A downloaded corpus must not copy files from elsewhere into the manifests through a symbolic link.
        elif not transcript.resolve().is_relative_to(root):
            yield RefusedRow(
                file, 1, "outside the corpus", "the transcript is a link to a file outside the corpus", str(audio)
            )
        else:
            split = split_of_path(audio.relative_to(source.path).parts[:-1])
            try:
                yield SourceUtterance(file, 1, audio, " ".join(read_text(transcript).split()), split=split)
            except DataError as error:
                yield RefusedRow(file, 1, "no transcript", str(error), str(audio))


def audio_files(folder: Path) -> Iterator[Path]:
    """Return all files below `folder` with an audio suffix, in the order of `visible_files`."""
    return (path for path in visible_files(folder) if path.suffix.lower() in AUDIO_SUFFIXES)


# --------------------
# OpenSLR's crowd-sourced corpora: an index of ids and transcripts, and audio files named by the ids, in any folder.
#
# - line_index.tsv, line_index_male.tsv, … (SLR41 to 44, 63 to 66, 78, 79): id, text; some with an empty cell in
#   between.
# - line_index_all.csv (SLR83): line, id, text with `, ` in between; the text may contain commas.
# - utt_spk_text.tsv (SLR52 to 54): id, speaker, text.
# - transcription.txt (SLR103): id and text with a space in between, in a folder train or test.
#
# An id `mlf_02879_01795762363` starts with its speaker, `mlf_02879`. Source: https://openslr.org/63/, /53/, /83/, /103/
# and the files linked there.


INDEX = re.compile(r"line_index.*\.(tsv|csv)|utt_spk_text.*\.tsv|transcription\.txt")
SPEAKER = re.compile(r"([a-z]{2,4}_\d{3,6})_\d{6,}", re.IGNORECASE)


def find_openslr_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of all indices below the folder, or of the table given by `--table`.

    Raises:
        DataError: If there is no index.
    """
    index_files = sorted(path for path in visible_files(source.path) if INDEX.fullmatch(path.name))
    indices = [source.table_path()] if source.table else index_files
    if not indices:
        raise DataError(
            f"{source.path} contains no OpenSLR index (line_index.tsv, utt_spk_text.tsv, transcription.txt). "
            "Put it into the folder with the unpacked audio, or give its path with --table."
        )
    audio: dict[str, list[Path]] = {}  # by stem, the best-known audio format first
    for path in sorted(audio_files(source.path), key=audio_rank):
        audio.setdefault(path.stem, []).append(path)
    for name in list(audio):
        # An exact name has precedence over another one with the same NFC form.
        audio.setdefault(comparable_name(name), audio[name])
    rows: Iterable[Record]
    for index in indices:
        if index.suffix == ".txt":
            rows = [Record(row, (), tuple(line.split(maxsplit=1))) for row, line in read_lines(index)]
        else:
            rows = read_cells(index, "," if index.suffix == ".csv" else "\t")
        split = split_of_path(index.relative_to(source.path).parts[:-1]) if index.is_relative_to(source.path) else ""
        for record in rows:
            yield _utterance(source, index, record, audio, split)


def _utterance(
    source: SpeechFolder, index: Path, record: Record, audio: dict[str, list[Path]], split: str
) -> SourceUtterance | RefusedRow:
    file = source.name_of(index)
    cells = [cell.strip() for cell in record.cells]
    if not 2 <= len(cells) <= 3 and index.suffix != ".csv":  # commas in the text add cells to a .csv row
        reason = f"it has {len(cells)} columns instead of two or three"
        return RefusedRow(file, record.row, "broken row", reason, cells[0])
    # SLR83 has a column before the id, so take the first of two cells that names an audio file.
    place = next((n for n in (0, 1) if cells[n : n + 1] and _known_stem(cells[n], audio) in audio), 0)
    name = _known_stem(cells[place], audio)
    if place == 0 and len(cells) == 3:
        speaker = cells[1]
        text = cells[2]
    else:
        # Restore the commas of the text, at which the row was split.
        speaker = ""
        text = ", ".join(cells[place + 1 :])
    speaker_match = SPEAKER.fullmatch(name)
    speaker = speaker or (speaker_match.group(1) if speaker_match else "")
    # If several folders contain a file of this name, use the one closest to the index.
    shared_lengths = [len(os.path.commonpath(map(os.path.abspath, (path, index)))) for path in audio.get(name, [])]
    audio_path = (
        audio[name][shared_lengths.index(max(shared_lengths))] if shared_lengths else source.path / f"{name}.wav"
    )
    return SourceUtterance(file, record.row, audio_path, text, speaker=speaker, split=split)


def _known_stem(name: str, audio: Container[str]) -> str:
    """Return the stem of a cell's name: as written, or in NFC if no audio file has the written form."""
    stem = _stem(name)
    return stem if stem in audio else comparable_name(stem)


def _stem(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in AUDIO_SUFFIXES else name


# --------------------
# AI4Bharat's IndicVoices, unpacked: <Language>/v1/train/*.json and valid/*.json, with the audio in the same folders.
#
# - The JSON of a recording has lists `verbatim` and `normalized` of segments (start, end, text, speaker_id) and a
#   speaker_id of its own; the audio is the file of the same name. --text_column selects the list; the authors of the
#   corpus train on `normalized`.
# - Flat rows, as the authors' script writes them, one per line, in a list or alone: audio_filepath, duration, text (or
#   verbatim, normalized), speaker_id, and for spans of a file `offset`, or `start` and `end`.
#
# As in that script, segments of speaker 1 and segments without a word are left out (and listed), and text in square,
# angle or round brackets is removed: [noise], <unclear>, (laughs).
# Source: TGZ/create_indicvoices.py of https://github.com/AI4Bharat/IndicVoices


MARKS = re.compile(r"\[[^\[\]]*\]|<[^<>]*>|\([^()]*\)")  # linear time, even with many unclosed brackets
TEXT_COLUMNS = ("normalized", "verbatim")


def find_indicvoices_utterances(source: SpeechFolder) -> SourceRows:
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


def _read_file(source: SpeechFolder, path: Path, split: str) -> SourceRows:
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
            yield _utterance_of_row(source, path, number, row, split)


def _rows(texts: str) -> Iterator[tuple[int, object]]:
    """Yield the objects of a file, numbered from 1: a single object, the items of a list, or one object per line."""
    try:
        parsed = parse_json(texts)
        yield from enumerate(parsed if isinstance(parsed, list) else [parsed], start=1)
    except ValueError:
        lines = [(row, line) for row, line in enumerate(texts.split("\n"), start=1) if line.strip()]
        # A single line is not JSON lines: report the error of the whole text.
        if len(lines) < 2:
            raise
        yield from ((row, parse_json(line)) for row, line in lines)


def _segments(source: SpeechFolder, path: Path, recording: dict[str, object], split: str) -> SourceRows:
    """Yield the segments of a recording; the row number is the segment's number."""
    file = source.name_of(path)
    audio = _indicvoices_audio(path, recording)
    name = source.text_column or ("normalized" if isinstance(recording.get("normalized"), list) else "verbatim")
    segments = recording.get(name)
    for number, segment in enumerate(segments if isinstance(segments, list) else [], start=1):
        refused = partial(RefusedRow, file, number, audio_filepath=str(audio))
        fields = segment if isinstance(segment, dict) else {}
        start = as_seconds(fields.get("start"))
        end = as_seconds(fields.get("end"))
        text = _remove_marks(as_text(fields.get("text")))
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
            utterance = SourceUtterance(file, number, audio, text, speaker=speaker, split=split)
            yield utterance.lasting(begin, end - begin)


def _utterance_of_row(
    source: SpeechFolder, path: Path, number: int, row: dict[str, object], split: str
) -> SourceUtterance:
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
    audio = _indicvoices_audio(path, row)
    utterance = SourceUtterance(file, number, audio, _remove_marks(text), speaker=speaker, split=split)
    return utterance.lasting(offset, duration)


def _indicvoices_audio(path: Path, row: dict[str, object]) -> Path:
    """Return the audio file that a row names, else the audio file with the name of the JSON file."""
    filename = as_text(row.get("audio_filepath"))
    if filename:
        return path.parent / filename
    candidates = [path.with_suffix(suffix) for suffix in AUDIO_SUFFIXES]
    # If none exists, the first is refused later as missing audio.
    return next((candidate for candidate in candidates if os.path.exists(existing_path(str(candidate)))), candidates[0])


def _remove_marks(text: str) -> str:
    return " ".join(MARKS.sub(" ", text).split())


# --------------------
# Tables with a header, whose cells are quoted if necessary.
#
# A first line such as `sep=;` names the delimiter. Otherwise the delimiter is the one that splits the header into the
# most requested columns.


DELIMITERS = ",;\t"


def find_csv_utterances(source: SpeechFolder) -> SourceRows:
    """Yield the rows of the table given by `--table`.

    Raises:
        UsageError: If `--table` is missing, or a requested column is missing or ambiguous.
    """
    if not source.table:
        raise UsageError("--format csv needs the table to read: give --table FILE.csv.")
    table = source.table_path()
    wanted = (
        (source.audio_column, ("audio",), True),
        (source.text_column, ("text",), True),
        (source.speaker_column, ("speaker",), False),
        (source.split_column, ("split",), False),
        channel_column(source),
    )
    delimiter = named_separator(table) or _delimiter(table, [column or usual[0] for column, usual, _ in wanted])
    audio, text, speaker, split, channel = choose_columns(table, _column_names(table, delimiter), wanted)
    file = source.name_of(table)
    for record in read_records(table, delimiter, quoted=True):
        split_cell = record[split].strip()
        if record.flaw or not record[audio].strip():
            reason = record.flaw or f"its column {audio} is empty"
            yield RefusedRow(file, record.row, "broken row", reason, record[audio])
        elif split_cell and not split_named(split_cell):
            reason = f"its split {split_cell!r} is not train, valid (or dev) or test"
            # An unknown split is refused, because a guess could move test utterances into the training set.
            yield RefusedRow(file, record.row, "no split", reason, record[audio])
        else:
            path = _table_audio(source.path, record[audio])
            transcript = record[text]
            utterance = SourceUtterance(
                file, record.row, path, transcript, speaker=record[speaker], split=split_named(split_cell)
            )
            try:
                yield replace(utterance, channel=parse_channel_cell(record[channel], channel))
            except ValueError as error:
                yield utterance.refused("channel", str(error))


def _table_audio(folder: Path, cell: str) -> Path:
    """Return the path of a cell, without surrounding blanks unless a file of exactly that name exists."""
    path = folder / cell
    return path if cell == cell.strip() or os.path.lexists(existing_path(str(path))) else folder / cell.strip()


def _column_names(table: Path, delimiter: str) -> list[str]:
    first = next(read_cells(table, delimiter, quoted=True), None)
    return [cell.strip() for cell in first.cells] if first else []


def _delimiter(table: Path, wanted: list[str]) -> str:
    heads = {delimiter: _column_names(table, delimiter) for delimiter in DELIMITERS}
    # On a tie, max() returns the first: the comma.
    return max(heads, key=lambda delimiter: sum(bool(columns_alike(heads[delimiter], name)) for name in wanted))
