"""Text files of a corpus: lines, tables with and without a head, JSON. Only regular files are opened, so a pipe between
them cannot hang the reader, and bytes that are not UTF-8 stay recognisable (`surrogateescape`) instead of raising.
UTF-16, which Excel calls Unicode text, is read where its mark (BOM) stands before it.
"""

import codecs
import csv
import io
import json
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

from konkanivani.base.errors import DataError, UsageError, explained
from konkanivani.data.audio.channels import NO_COLUMN
from konkanivani.data.formats.found import SpeechFolder

MAX_BYTES = 2**28  # of a file that is read at once
MAX_LINE = 2**24  # characters
HEAD_BYTES = 2**12
SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?\r?\n?', re.IGNORECASE)  # told to Excel, before the head


@dataclass(frozen=True)
class Record:
    """A row of a table under the names of its head; `row` is the line on which it begins, from 1.

    `closed_by` > 0: it opens a quotation mark that may be closed in that row, or may be a character of its text.
    """

    row: int
    columns: tuple[str, ...]
    cells: tuple[str, ...]
    closed_by: int = 0

    def __getitem__(self, column: str) -> str:
        """The cell under a name; empty where the table has no such column or the row ends before it."""
        place = self.columns.index(column) if column in self.columns else len(self.cells)
        return self.cells[place] if place < len(self.cells) else ""

    @property
    def flaw(self) -> str:
        """What is wrong with the row as a whole; empty where nothing is."""
        if self.closed_by:
            return f"it opens a quote that row {self.closed_by} closes, so the end of the row is ambiguous"
        if len(self.cells) <= len(self.columns):
            return ""
        return f"it has {len(self.cells)} cells, but the header has {len(self.columns)}"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file at `path`, open for reading; a DataError where it is not a regular file of text that can be read."""
    with explained(DataError, f"{path} cannot be read", "Check --format and --source.", ValueError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} cannot be read: it is not a file. Check --format and --source.")
        file = open(path, "rb")
        head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
    coding = ("utf-8-sig", "surrogateescape")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = ("utf-16", "strict")
    with io.TextIOWrapper(file, *coding, newline="") as text:
        zeros = head[0::2].count(0), head[1::2].count(0)
        # As Latin letters and blanks have them in UTF-16.
        if coding[0] != "utf-16" and min(zeros) == 0 and max(zeros) > len(head) / 20:
            raise DataError(
                f"{path} cannot be read: it looks like UTF-16 without a byte order mark (BOM). Save it as UTF-8."
            )
        try:
            yield text
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} cannot be read: it starts as UTF-16 but is not valid UTF-16 ({error.reason}). Save it "
                "as UTF-8."
            ) from None


def read_text(path: Path) -> str:
    """All of a text file of bounded size."""
    with open_text(path) as file:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} cannot be read: {path.stat().st_size} bytes are too many for a text file. Check "
                "--format and --source."
            )
        return file.read()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, each with its number from 1 and without its end."""
    with open_text(path) as file:
        for row, line in enumerate(_bounded_lines(file, path), start=1):
            if line.strip():
                yield row, line.rstrip("\r\n")


def _bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file; a DataError where one is so long that it is none."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise DataError(f"{path} contains a line of more than {MAX_LINE} characters. Check --format and --source.")
        yield line


def named_separator(path: Path) -> str:
    """The separator that a first line such as `sep=;` names; empty where there is none."""
    with open_text(path) as file:
        found = SEPARATOR_LINE.fullmatch(next(_bounded_lines(file, path), ""))
    return found.group(1) if found else ""


def read_cells(path: Path, delimiter: str = "\t", quoted: bool = False) -> Iterator[Record]:
    """The rows of a table without a head; a quotation mark is a character like any other unless `quoted`."""
    with open_text(path) as file:
        lines = _bounded_lines(file, path)
        if quoted:  # a first line that only names the separator is counted, and empty
            first = next(lines, "")
            lines = chain(["\n" if SEPARATOR_LINE.fullmatch(first) else first], lines)
        rows = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
        begin = 1
        try:
            for cells in rows:
                if any(cell.strip() for cell in cells):
                    yield Record(begin, (), tuple(cells))
                begin = rows.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, row {begin}: not a valid table row ({error}). Fix or delete it.") from None


def read_records(path: Path, delimiter: str = "\t", quoted: bool = False) -> Iterator[Record]:
    """The rows of a table below its head."""
    rows = read_cells(path, delimiter, quoted)
    head = next(rows, None)
    if head is None:
        raise DataError(f"{path} is empty. The first row must contain the column names.")
    columns = tuple(name.strip() for name in head.cells)
    for record in rows:
        yield Record(record.row, columns, record.cells)


def columns_alike(columns: Iterable[str], name: str) -> list[str]:
    """The column of this name alone where there is one, else all that are called so but for case and blanks around."""
    alike = [column for column in dict.fromkeys(columns) if column.strip().casefold() == name.strip().casefold()]
    return [name] if name in alike else alike


def choose_columns(table: Path, head: Iterable[str], wanted: Iterable[tuple[str, tuple[str, ...], bool]]) -> list[str]:
    """The head's columns for what is asked for ("": nothing), else for the first usual name that only one is alike.

    The third of what is wanted says whether it must be there, as all that is asked for must. A UsageError says what is
    not there, or which columns are too alike; what need not be there has its usual name then.
    """
    head, chosen = list(head), []
    for asked, usual, is_needed in wanted:
        found = {name: columns_alike(head, name) for name in ((asked,) if asked else usual)}
        only = next((alike[0] for alike in found.values() if len(alike) == 1), "")
        unclear = next((name for name, alike in found.items() if len(alike) > 1), "")
        if not only and (unclear or asked or is_needed):
            what = f"{len(found[unclear])} columns {unclear!r}" if unclear else f"no column {next(iter(found))!r}"
            raise UsageError(
                f"{table} has {what}; its columns are {', '.join(map(repr, sorted(head)))}. Name the columns "
                "with --audio_column, --text_column, --speaker_column, --split_column and --channel_column."
            )
        chosen.append(only or usual[0])
    return chosen


def channel_column(source: SpeechFolder) -> tuple[str, tuple[str, ...], bool]:
    """Return the request to `choose_columns` for the column of channels; for no column if the user says so."""
    if source.channel_column == NO_COLUMN:
        return "", (f"{NO_COLUMN}\0",), False  # no head has it
    return source.channel_column, ("channel",), False


def parse_json(text: str) -> object:
    """What a JSON text says; a ValueError with a short reason where it says nothing."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_text(value: object) -> str:
    """A JSON value where a text is expected: numbers as written (speakers often are), everything else empty."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def as_seconds(value: object) -> float | None:
    """A number of seconds, also where it stands in quotes; None where it is none. It may still be negative or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
