"""LJSpeech and what is laid out like it: metadata.csv of `id|text|normalised text` without a head, audio in wavs/.

The third column is the transcript where there is one, else the second. Quotation marks are literal.
Source: the README of LJSpeech-1.1, https://keithito.com/LJ-Speech-Dataset/
"""

import os

from konkanivani.data.formats.folder import AUDIO_SUFFIXES
from konkanivani.data.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.tables import read_cells


def find_utterances(source: SpeechFolder) -> Found:
    """The rows of metadata.csv, or of the --table given."""
    table = source.table_path() if source.table else source.path / "metadata.csv"
    file = source.name_of(table)
    for record in read_cells(table, "|"):
        name, *texts = record.cells
        if not name or not 1 <= len(texts) <= 2:
            reason = f"it has {len(record.cells)} columns where id|text|normalised text are expected"
            yield RefusedRow(file, record.row, "broken row", reason, name)
            continue
        text = next((text for text in reversed(texts) if text.strip()), "")
        stem = source.path / "wavs" / name
        named = [stem] if stem.suffix.lower() in AUDIO_SUFFIXES else []
        candidates = [*named, *(stem.with_name(stem.name + suffix) for suffix in (".wav", ".flac"))]
        audio = next((path for path in candidates if os.path.exists(path)), candidates[0])
        yield FoundUtterance(file, record.row, audio, text)
