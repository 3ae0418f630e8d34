"""Tables with a header, whose cells are quoted if necessary.

A first line such as `sep=;` names the delimiter. Otherwise the delimiter is the one that splits the header into the
most requested columns.
"""

import os
from dataclasses import replace
from pathlib import Path

from konkanivani.base.errors import UsageError
from konkanivani.data.audio.channels import parse_channel_cell
from konkanivani.data.audio.unicode_paths import existing_path
from konkanivani.data.formats.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.formats.splits import split_named
from konkanivani.data.formats.tables import (
    channel_column,
    choose_columns,
    columns_alike,
    named_separator,
    read_cells,
    read_records,
)

DELIMITERS = ",;\t"


def find_csv_utterances(source: SpeechFolder) -> Found:
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
    delimiter = named_separator(table) or _delimiter(table, [asked or usual[0] for asked, usual, _ in wanted])
    audio, text, speaker, split, channel = choose_columns(table, _head(table, delimiter), wanted)
    file = source.name_of(table)
    for record in read_records(table, delimiter, quoted=True):
        given = record[split].strip()
        if record.flaw or not record[audio].strip():
            reason = record.flaw or f"its column {audio} is empty"
            yield RefusedRow(file, record.row, "broken row", reason, record[audio])
        elif given and not split_named(given):
            reason = f"its split {given!r} is not train, valid (or dev) or test"
            # An unknown split is refused, because a guess could move test utterances into the training set.
            yield RefusedRow(file, record.row, "no split", reason, record[audio])
        else:
            path = _audio(source.path, record[audio])
            said = record[text]
            found = FoundUtterance(file, record.row, path, said, speaker=record[speaker], split=split_named(given))
            try:
                yield replace(found, channel=parse_channel_cell(record[channel], channel))
            except ValueError as error:
                yield found.refused("channel", str(error))


def _audio(folder: Path, cell: str) -> Path:
    """Return the path of a cell, without surrounding blanks unless a file of exactly that name exists."""
    path = folder / cell
    return path if cell == cell.strip() or os.path.lexists(existing_path(str(path))) else folder / cell.strip()


def _head(table: Path, delimiter: str) -> list[str]:
    first = next(read_cells(table, delimiter, quoted=True), None)
    return [cell.strip() for cell in first.cells] if first else []


def _delimiter(table: Path, wanted: list[str]) -> str:
    heads = {delimiter: _head(table, delimiter) for delimiter in DELIMITERS}
    # On a tie, max() returns the first: the comma.
    return max(heads, key=lambda delimiter: sum(bool(columns_alike(heads[delimiter], name)) for name in wanted))
