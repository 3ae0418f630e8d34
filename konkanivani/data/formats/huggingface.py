"""A local data set of Hugging Face's `datasets`: a folder of save_to_disk (Arrow), or one of Parquet files.

Splits are those of the data set (train, validation, test), for Parquet the beginnings of the files' names
(data/train-00000-of-00004.parquet) or their folders. Nothing is decoded, downloaded or cached. Audio that the tables
hold as bytes, which is the usual way, is written out as it is: one file an utterance under --output/audio.
Sources: https://huggingface.co/docs/datasets/loading (local files, load_from_disk) and …/audio_load (decode=False)
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.errors import DataError, ResourceError, UsageError, explained
from konkanivani.base.files import visible_files
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_of_path
from konkanivani.data.formats.tables import as_text, columns_alike

AUDIO_COLUMNS = ("audio", "audio_filepath")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized", "verbatim")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
SUFFIXES = (
    (b"fLaC", ".flac"),
    (b"RIFF", ".wav"),
    (b"OggS", ".ogg"),
    (b"ID3", ".mp3"),
    (b"\xff\xfb", ".mp3"),
    (b"\xff\xf3", ".mp3"),
)


@dataclass(frozen=True)
class Part:
    """A table of the data set: its file or folder, its split, its columns, and its rows when they are asked for."""

    path: Path
    split: str
    columns: tuple[str, ...]
    rows: Iterable[dict[str, object]]


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are read; no speaker where the name is empty."""

    audio: str
    text: str
    speaker: str


def find_utterances(source: SpeechFolder) -> Found:
    """The rows of every split."""
    for part in _parts(source):
        columns = _choose_columns(source, part)
        for number, row in enumerate(_guarded(part), start=1):
            yield _utterance(source, part, columns, number, row)


def _guarded(part: Part) -> Iterator[dict[str, object]]:
    """The rows of a part; a DataError where it turns out to be damaged."""
    try:
        yield from part.rows
    except Exception as error:  # whatever pyarrow, json and datasets raise on files that are not theirs
        raise DataError(f"{part.path} cannot be read any further: {_reason(error)}. Download it again.") from None


def _reason(error: Exception) -> str:
    """What an error of another library says, in one line."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def _parts(source: SpeechFolder) -> Iterator[Part]:
    try:
        import datasets  # noqa: F401 - Parquet alone would do without, but one rule is easier to remember
    except ImportError:
        raise ResourceError(
            "--format huggingface needs the library `datasets`, which is not installed. "
            "Install it with .venv/bin/python -m pip install datasets."
        ) from None
    is_saved = any((source.path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    found = _saved_parts(source) if is_saved else _parquet_parts(source)
    is_empty = True
    for part in found:
        is_empty = False
        yield part
    if is_empty:
        raise DataError(
            f"{source.path} is neither a folder written by save_to_disk nor one with Parquet files. Give --source a "
            "data set that has been downloaded."
        )


def _saved_parts(source: SpeechFolder) -> Iterator[Part]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(source.path))
    except Exception as error:  # as above
        raise DataError(
            f"{source.path} cannot be loaded as a saved data set: {_reason(error)}. Save it again."
        ) from None
    splits = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("", loaded)]
    for name, table in splits:
        for column, feature in table.features.items():
            if isinstance(feature, datasets.Audio):
                table = table.cast_column(column, datasets.Audio(decode=False))
        path = source.path / name if name else source.path
        yield Part(path, split_of_path([name]), tuple(table.column_names), table)


def _parquet_parts(source: SpeechFolder) -> Iterator[Part]:
    import pyarrow.parquet

    tables = (path for path in visible_files(source.path) if path.name.endswith(".parquet"))
    for path in sorted(path for path in tables if path.is_file()):
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except Exception as error:  # as above
            raise DataError(f"{path} cannot be read as Parquet: {_reason(error)}. Download it again.") from None
        split = split_of_path(reversed(path.relative_to(source.path).parts))
        yield Part(path, split, tuple(file.schema_arrow.names), _parquet_rows(path))


def _parquet_rows(path: Path) -> Iterator[dict[str, object]]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=16):  # a row may hold megabytes
        yield from batch.to_pylist()


def _choose_columns(source: SpeechFolder, part: Part) -> Columns:
    """The columns asked for, else those with a usual name; a UsageError where they are not there."""
    names = part.columns
    audio = _column(names, source.audio_column, AUDIO_COLUMNS) or source.audio_column or "audio"
    text = _column(names, source.text_column, TEXT_COLUMNS) or source.text_column or "text"
    speaker = _column(names, source.speaker_column, SPEAKER_COLUMNS) or source.speaker_column
    chosen = Columns(audio, text, speaker)
    for column in (chosen.audio, chosen.text, chosen.speaker):
        if column and column not in names:
            raise UsageError(
                f"{part.path} has no column {column!r}, it has {', '.join(map(repr, names))}. Say with --audio_column, "
                "--text_column and --speaker_column which are which."
            )
    return chosen


def _column(names: tuple[str, ...], asked: str, usual: tuple[str, ...]) -> str:
    """The column asked for, else the first usual one, also where only the case is another; empty where none is."""
    found = (columns_alike(names, name) for name in ((asked,) if asked else usual))
    return next((alike[0] for alike in found if len(alike) == 1), "")


def _utterance(
    source: SpeechFolder, part: Part, columns: Columns, number: int, row: dict[str, object]
) -> FoundUtterance | RefusedRow:
    file = source.name_of(part.path)
    audio = row[columns.audio]
    held, named = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(held, bytes) and held:
        path = source.embedded_audio / f"{_safe_name(file)}-{number:07d}{_suffix(held, as_text(named))}"
        _write(path, held)
    elif isinstance(named, str) and named:
        path = source.path / named
    else:
        return RefusedRow(file, number, "missing audio", f"its column {columns.audio} holds no audio")
    speaker = as_text(row[columns.speaker]) if columns.speaker else ""
    return FoundUtterance(file, number, path, as_text(row[columns.text]), speaker=speaker, split=part.split)


def _write(path: Path, held: bytes) -> None:
    advice = "Free room there, or give --output a folder that you can write to."
    with explained(ResourceError, f"The audio of the data set cannot be written to {path}", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)


def _safe_name(file: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", file.removesuffix(".parquet")).strip("-") or "row"


def _suffix(held: bytes, named: str) -> str:
    """What a file of these bytes is called; by its beginning, else as it was called before."""
    given = os.path.splitext(named)[1].lower()
    known = next((suffix for magic, suffix in SUFFIXES if held.startswith(magic)), "")
    return known or (given if re.fullmatch(r"\.[a-z0-9]{1,5}", given) else ".audio")
