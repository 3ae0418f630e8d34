"""Local data sets of Hugging Face `datasets`: a folder of save_to_disk (Arrow) or a folder of Parquet files.

Nothing is decoded, downloaded or cached; audio that the tables store as bytes is written to files unchanged.
Sources: https://huggingface.co/docs/datasets/loading (local files, load_from_disk) and …/audio_load (decode=False)
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from konkanivani.corpora.tables import (
    Found,
    FoundUtterance,
    RefusedRow,
    SpeechFolder,
    as_text,
    channel_column,
    choose_columns,
    split_of_path,
)
from konkanivani.data.audio.files import parse_channel_cell
from konkanivani.errors import DataError, ResourceError, explained
from konkanivani.files import visible_files

AUDIO_COLUMNS = ("audio", "audio_filepath")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized", "verbatim")
SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
MAGICS: dict[str, tuple[bytes, ...]] = {
    ".flac": (b"fLaC",),
    ".wav": (b"RIFF",),
    ".ogg": (b"OggS",),
    ".mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3"),
}


@dataclass(frozen=True)
class DatasetPart:
    """A table of the data set: file or folder, split, columns, and its rows, which are loaded lazily."""

    path: Path
    split: str
    columns: tuple[str, ...]
    rows: Iterable[dict[str, object]]


def find_huggingface_utterances(source: SpeechFolder) -> Found:
    """Yield the rows of all tables.

    Raises:
        DataError: If a table cannot be read.
        ResourceError: If `datasets` is not installed, or embedded audio cannot be written.
    """
    for part in _parts(source):
        wanted = (
            (source.audio_column, AUDIO_COLUMNS, True),
            (source.text_column, TEXT_COLUMNS, True),
            (source.speaker_column, SPEAKER_COLUMNS, False),
            channel_column(source),
        )
        columns = choose_columns(part.path, part.columns, wanted)
        rows = iter(part.rows)
        # Advance by hand, so that the guard covers reading a row, but not writing its audio.
        for number in count(1):
            with _guarded(f"{part.path} cannot be read completely", "Download it again."):
                row = next(rows, None)
            if row is None:
                break
            yield _utterance(source, part, columns, number, row)


@contextmanager
def _guarded(what: str, advice: str) -> Iterator[None]:
    """Convert any exception of pyarrow, json or datasets, which they raise on foreign files, into a DataError."""
    try:
        yield
    except Exception as error:
        # Messages of pyarrow may span many lines.
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise DataError(f"{what}: {reason}. {advice}") from None


def _parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    is_saved = any((source.path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    part = None
    for part in _saved_parts(source) if is_saved else _parquet_parts(source):
        yield part
    if part is None:
        raise DataError(
            f"{source.path} is neither a folder written by save_to_disk nor one with Parquet files. Use the "
            "folder of a downloaded data set as --source."
        )


@contextmanager
def _installed() -> Iterator[None]:
    """Convert the ImportError of a missing package."""
    try:
        yield
    except ImportError:
        raise ResourceError(
            "--format huggingface needs the package `datasets`, which is not installed. Install it with "
            ".venv/bin/python -m pip install datasets."
        ) from None


def _saved_parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    with _installed():
        import datasets

    with _guarded(f"{source.path} cannot be loaded as a saved data set", "Save it again."):
        loaded = datasets.load_from_disk(str(source.path))
    splits = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [("", loaded)]
    for name, table in splits:
        for column, feature in table.features.items():
            # With decode=False, a row contains the bytes or the path, not decoded samples.
            if isinstance(feature, datasets.Audio):
                table = table.cast_column(column, datasets.Audio(decode=False))
        path = source.path / name if name else source.path
        yield DatasetPart(path, split_of_path([name]), tuple(table.column_names), table)


def _parquet_parts(source: SpeechFolder) -> Iterator[DatasetPart]:
    with _installed():
        # A dependency of `datasets`, whose own import takes seconds and is not needed here.
        import pyarrow.parquet

    tables = (path for path in visible_files(source.path) if path.name.endswith(".parquet"))
    for path in sorted(path for path in tables if path.is_file()):
        with _guarded(f"{path} cannot be read as Parquet", "Download it again."):
            file = pyarrow.parquet.ParquetFile(path)
        # The file's name (train-00000-of-…) counts before its folders, the innermost first.
        split = split_of_path(reversed(path.relative_to(source.path).parts))
        batches = file.iter_batches(batch_size=16)  # a row may contain megabytes of audio
        yield DatasetPart(
            path, split, tuple(file.schema_arrow.names), (row for batch in batches for row in batch.to_pylist())
        )


def _utterance(
    source: SpeechFolder, part: DatasetPart, columns: list[str], number: int, row: dict[str, object]
) -> FoundUtterance | RefusedRow:
    file = source.name_of(part.path)
    audio_column, text_column, speaker_column, channel = columns
    audio = row[audio_column]
    held, named = (audio.get("bytes"), audio.get("path")) if isinstance(audio, dict) else (None, audio)
    if isinstance(held, bytes) and held:
        # The path in the row is not used: it may repeat, or point out of the folder.
        stem = re.sub(r"[^A-Za-z0-9]+", "-", file.removesuffix(".parquet")).strip("-") or "row"
        path = source.embedded_audio / f"{stem}-{number:07d}{_suffix(held, as_text(named))}"
        advice = "Free disk space there, or choose a writable --output folder."
        with explained(ResourceError, f"The audio of the data set cannot be written to {path}", advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(held)
    elif isinstance(named, str) and named:
        path = source.path / named
    else:
        return RefusedRow(file, number, "missing audio", f"its column {audio_column} contains no audio")
    text = as_text(row[text_column])
    speaker = as_text(row.get(speaker_column))
    found = FoundUtterance(file, number, path, text, speaker=speaker, split=part.split)
    try:
        return replace(found, channel=parse_channel_cell(row.get(channel), channel))
    except ValueError as error:
        return found.refused("channel", str(error))


def _suffix(held: bytes, named: str) -> str:
    """Return the suffix for a file of these bytes: by their magic number, else the suffix of the name in the row."""
    given = os.path.splitext(named)[1].lower()
    known = next((suffix for suffix, magic in MAGICS.items() if held.startswith(magic)), "")
    return known or (given if re.fullmatch(r"\.[a-z0-9]{1,5}", given) else ".audio")
