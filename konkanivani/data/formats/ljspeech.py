"""LJSpeech and what is laid out like it: metadata.csv of `id|text|normalised text` without a head, audio in wavs/.

An id may be a path from the corpus's folder as well (`wavs/a0.wav`), with its suffix or without.
The third column is the transcript where there is one, else the second. Quotation marks are literal.
Source: the README of LJSpeech-1.1, https://keithito.com/LJ-Speech-Dataset/
"""

import os
from pathlib import Path

from konkanivani.data.audio.names import AUDIO_SUFFIXES
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.tables import read_cells


def find_utterances(source: SpeechFolder) -> Found:
    """The rows of metadata.csv, or of the --table given."""
    table = source.table_path() if source.table else source.path / "metadata.csv"
    file = source.name_of(table)
    for record in read_cells(table, "|"):
        name, *texts = record.cells
        if not name or not 1 <= len(texts) <= 2:
            reason = f"it has {len(record.cells)} columns instead of id|text|normalised text"
            yield RefusedRow(file, record.row, "broken row", reason, name)
            continue
        text = next((text for text in reversed(texts) if text.strip()), "")
        yield FoundUtterance(file, record.row, _audio(source.path, name), text)


def _audio(folder: Path, name: str) -> Path:
    """The audio of an id: in wavs/, else where the id as a path leads; the likelier one of both where there is none."""
    in_wavs, as_it_stands = _spellings(folder / "wavs" / name), _spellings(folder / name)
    likelier = (as_it_stands if "/" in name else in_wavs)[0]
    return next((path for path in (*in_wavs, *as_it_stands) if os.path.exists(existing_path(str(path)))), likelier)


def _spellings(path: Path) -> list[Path]:
    """The path as it stands where it ends as audio does, and with the suffixes that such corpora leave out."""
    named = [path] if path.suffix.lower() in AUDIO_SUFFIXES else []
    return [*named, *(Path(f"{path}{suffix}") for suffix in AUDIO_SUFFIXES)]
