"""Any table with a head: --table FILE.csv, separated by comma, semicolon or tab, cells quoted where they need it.

Columns are `audio`, `text`, and where they exist `speaker` and `split`, unless --audio_column and the like say others.
Paths of audio are relative to --source. The separator is the one with which the head shows the most wanted columns.
"""

from pathlib import Path

from konkanivani.data.found import Found, FoundUtterance, RefusedRow, SpeechFolder
from konkanivani.data.splits import split_named
from konkanivani.data.tables import read_cells, read_records
from konkanivani.errors import UsageError

DELIMITERS = ",;\t"


def find_utterances(source: SpeechFolder) -> Found:
    """The rows of the table."""
    if not source.table:
        raise UsageError("--format csv needs the table to read: give --table FILE.csv.")
    table = source.table_path()
    audio, text = source.audio_column or "audio", source.text_column or "text"
    speaker, split = source.speaker_column or "speaker", source.split_column or "split"
    delimiter = _delimiter(table, (audio, text, speaker, split))
    _check_columns(source, table, delimiter, (audio, text))
    file = source.name_of(table)
    for record in read_records(table, delimiter, quoted=True):
        if record.surplus or not record[audio]:
            reason = record.surplus or f"its column {audio} is empty"
            yield RefusedRow(file, record.row, "broken row", reason, record[audio])
        elif record[split] and not split_named(record[split]):
            reason = f"its split {record[split]!r} is none of train, valid (or dev) and test"
            yield RefusedRow(file, record.row, "no split", reason, record[audio])
        else:
            path, given = source.path / record[audio], split_named(record[split])
            yield FoundUtterance(file, record.row, path, record[text], speaker=record[speaker], split=given)


def _head(table: Path, delimiter: str) -> set[str]:
    first = next(read_cells(table, delimiter, quoted=True), None)
    return {cell.strip() for cell in first.cells} if first else set()


def _delimiter(table: Path, wanted: tuple[str, ...]) -> str:
    return max(DELIMITERS, key=lambda delimiter: len(_head(table, delimiter).intersection(wanted)))


def _check_columns(source: SpeechFolder, table: Path, delimiter: str, needed: tuple[str, ...]) -> None:
    asked = (source.speaker_column, source.split_column)
    head = _head(table, delimiter)
    missing = [column for column in (*needed, *asked) if column and column not in head]
    if missing:
        raise UsageError(
            f"{table} has no column {missing[0]!r}, it has {', '.join(map(repr, sorted(head)))}. Say with "
            "--audio_column, --text_column, --speaker_column and --split_column which are which."
        )
