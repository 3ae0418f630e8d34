"""LJSpeech and corpora of the same layout: metadata.csv of `id|text|normalised text` without a header, audio in wavs/.

An id may also be a path relative to the corpus folder (`wavs/a0.wav`), with or without suffix. The transcript is the
third column if it is not empty, else the second. Quotation marks are literal.
Source: the README of LJSpeech-1.1, https://keithito.com/LJ-Speech-Dataset/
"""

import os
from pathlib import Path

from konkanivani.data.audio.names import AUDIO_SUFFIXES
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.tables import read_cells


def find_ljspeech_utterances(source: SpeechFolder) -> Found:
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
        yield FoundUtterance(file, record.row, _audio(source.path, name), text)


def _audio(folder: Path, name: str) -> Path:
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
