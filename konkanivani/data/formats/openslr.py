"""OpenSLR's crowd-sourced corpora: an index of ids and transcripts, and audio files named by the ids, in any folder.

- line_index.tsv, line_index_male.tsv, … (SLR41 to 44, 63 to 66, 78, 79): id, text; some with an empty cell in between.
- line_index_all.csv (SLR83): line, id, text with `, ` in between; the text may contain commas.
- utt_spk_text.tsv (SLR52 to 54): id, speaker, text.
- transcription.txt (SLR103): id and text with a space in between, in a folder train or test.

An id `mlf_02879_01795762363` starts with its speaker, `mlf_02879`. Source: https://openslr.org/63/, /53/, /83/, /103/
and the files linked there.
"""

import os
import re
from collections.abc import Container, Iterable
from pathlib import Path

from konkanivani.base.errors import DataError
from konkanivani.base.files import visible_files
from konkanivani.data.audio.names import AUDIO_SUFFIXES, audio_rank
from konkanivani.data.audio.unicode_paths import comparable_name
from konkanivani.data.formats.folder import audio_files
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_of_path
from konkanivani.data.formats.tables import Record, read_cells, read_lines

INDEX = re.compile(r"line_index.*\.(tsv|csv)|utt_spk_text.*\.tsv|transcription\.txt")
SPEAKER = re.compile(r"([a-z]{2,4}_\d{3,6})_\d{6,}", re.IGNORECASE)


def find_openslr_utterances(source: SpeechFolder) -> Found:
    """Yield the rows of all indices below the folder, or of the table given by `--table`.

    Raises:
        DataError: If there is no index.
    """
    named = sorted(path for path in visible_files(source.path) if INDEX.fullmatch(path.name))
    indices = [source.table_path()] if source.table else named
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
) -> FoundUtterance | RefusedRow:
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
    known = SPEAKER.fullmatch(name)
    speaker = speaker or (known.group(1) if known else "")
    # If several folders contain a file of this name, use the one closest to the index.
    alike = [len(os.path.commonpath(map(os.path.abspath, (path, index)))) for path in audio.get(name, [])]
    found = audio[name][alike.index(max(alike))] if alike else source.path / f"{name}.wav"
    return FoundUtterance(file, record.row, found, text, speaker=speaker, split=split)


def _known_stem(name: str, audio: Container[str]) -> str:
    """Return the stem of a cell's name: as written, or in NFC if no audio file has the written form."""
    stem = _stem(name)
    return stem if stem in audio else comparable_name(stem)


def _stem(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in AUDIO_SUFFIXES else name
