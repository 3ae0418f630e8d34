"""Tables of corpora, and the utterances found in them with their splits."""

import codecs
import csv
import hashlib
import io
import json
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from konkanivani.data.audio.files import NO_COLUMN
from konkanivani.errors import DataError, UsageError, explained

# --------------------
# Interface between the format readers and the preparation: corpus folder, unchecked utterances and unusable rows.


@dataclass(frozen=True)
class SpeechFolder:
    """Input of a format reader: the corpus folder and the options of the command line ("": not given).

    Audio that a table stores as bytes is written to files in `embedded_audio`; no other reader writes anything.
    `audio_root` is the folder that contains the audio (None: `path`). The preparation sets both.
    """

    path: Path
    table: str = ""
    audio_column: str = ""
    text_column: str = ""
    speaker_column: str = ""
    split_column: str = ""
    embedded_audio: Path = Path("audio")
    audio_root: Path | None = None
    channel_column: str = ""

    def name_of(self, file: Path) -> str:
        """Return `file` relative to the corpus folder, or unchanged if it is outside."""
        return str(file.relative_to(self.path)) if file.is_relative_to(self.path) else str(file)

    def table_path(self) -> Path:
        """Return the path of `--table`: in the corpus folder if it exists there, else in the current directory."""
        inside = self.path / self.table
        return inside if inside.exists() else Path(self.table)


@dataclass(frozen=True)
class SourceUtterance:
    """An utterance as row `row` (counted from 1) of `file` describes it.

    Attributes:
        split: `train`, `valid`, `test`, or "" if the corpus defines none.
        byte_count: If positive, the audio is this part of the file at `audio`, from `byte_offset`.
        seconds: Duration of the span that starts at `start`; None for everything from there on.
        file_seconds: Duration of the whole audio file according to the corpus.
        channel: The only channel to use, from 0; None for the mean of all channels.
        is_channel_label: The channel is a label that a mono file may have, too (Kaldi).
        removed: Format characters that were removed from the text.
    """

    file: str
    row: int
    audio: Path
    text: str
    id: str = ""
    speaker: str = ""
    split: str = ""
    byte_offset: int = 0
    byte_count: int = 0
    start: float = 0.0
    seconds: float | None = None
    file_seconds: float | None = None
    channel: int | None = None
    is_channel_label: bool = False
    removed: tuple[str, ...] = ()

    def lasting(self, offset: float | None, duration: float | None) -> "SourceUtterance":
        """Return a copy with the duration of a row: of a span if there is an offset, else of the whole file."""
        if offset is None:
            # The whole file is used; the stated duration only serves to check its header.
            return replace(self, file_seconds=duration)
        return replace(self, start=offset, seconds=duration)

    def refused(self, kind: str, reason: str) -> "RefusedRow":
        """Return this row as a row that cannot be used."""
        return RefusedRow(self.file, self.row, kind, reason, str(self.audio))


@dataclass(frozen=True)
class RefusedRow:
    """A row that is left out, with its location, the kind of reason (rows are counted by kind) and the reason.

    An expected row is listed but does not count as damage: the authors of the corpus leave such rows out, too.
    """

    file: str
    row: int
    kind: str
    reason: str
    audio_filepath: str = ""
    is_expected: bool = False


SourceRows = Iterator[SourceUtterance | RefusedRow]


# --------------------
# Split assignment: by the names in a corpus, or drawn in hash order.
#
# A drawn split is a pure function of the seed and of the names and durations of speakers or utterances; it does not
# depend on the order of rows.


SPLITS = ("train", "valid", "test")
NAMES = (
    ("train", ("train", "training")),
    ("valid", ("valid", "validation", "val", "dev", "devel")),
    ("test", ("test", "testing", "eval")),
)


@dataclass(frozen=True)
class Shares:
    """Shares of the total duration for validation and test, from 0 to below 1; a split with share 0 is not drawn."""

    valid: float
    test: float

    @property
    def splits(self) -> int:
        """Return the number of splits, including train."""
        return 1 + (self.valid > 0) + (self.test > 0)


def split_named(name: str) -> str:
    """Return `train`, `valid` or `test` if `name` starts with a usual name of it (dev, train-00, valid), else ""."""
    word = re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]
    return next((split for split, words in NAMES if word in words), "")


def split_of_path(parts: Iterable[str]) -> str:
    """Return the split of the first of these folders that is named like one, else ""."""
    return next((split for part in parts if (split := split_named(part))), "")


def draw_splits(lengths: Mapping[str, int], shares: Shares, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names for validation and the names for test; the rest is for training.

    Each requested split gets at least one name, train included.

    Args:
        lengths: Milliseconds per indivisible unit (a speaker, an utterance); at least one unit per split.
    """
    # The hash makes the order independent of the order of rows.
    ordered = sorted(lengths, key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).digest())
    total = sum(lengths.values())
    # Keep one unit for train, and one for valid if it is drawn.
    test = _choose_names(ordered, lengths, shares.test * total, min_left=shares.splits - 1)
    rest = [name for name in ordered if name not in test]
    return _choose_names(rest, lengths, shares.valid * total, min_left=1), test


def _choose_names(names: list[str], lengths: Mapping[str, int], target: float, min_left: int) -> frozenset[str]:
    """Return names whose total length approximates `target`, and leave at least `min_left` names."""
    if target <= 0:
        return frozenset()
    chosen: list[str] = []
    filled = 0
    for name in names:
        # A long unit is skipped and shorter ones may still fit.
        if filled + lengths[name] <= target and len(names) - len(chosen) > min_left:
            chosen.append(name)
            filled += lengths[name]
    chosen_set = set(chosen)
    remaining = [name for name in names if name not in chosen_set]
    # One more unit may exceed the target if that comes closer to it; min() takes the first on a tie.
    nearest = min(remaining, key=lambda name: abs(filled + lengths[name] - target))
    is_nearer = abs(filled + lengths[nearest] - target) < abs(filled - target)
    if not chosen or (is_nearer and len(remaining) > min_left):
        chosen.append(nearest)
    return frozenset(chosen)


# --------------------
# Text files of a corpus: lines, tables with and without a header, and JSON.
#
# Only regular files are opened, so a named pipe cannot block the reader. Bytes that are not UTF-8 become lone
# surrogates (`surrogateescape`) instead of raising. UTF-16, which Excel calls Unicode text, is read if the file starts
# with a byte order mark (BOM).


MAX_BYTES = 2**28  # of a file that is read as a whole
MAX_LINE = 2**24  # characters
HEAD_BYTES = 2**12
SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?\r?\n?', re.IGNORECASE)  # a line for Excel, before the header


@dataclass(frozen=True)
class Record:
    """A table row with its cells by column name; `row` is the line on which it starts, from 1.

    If `closed_by` is positive, the row opens a quotation mark that row `closed_by` may close, or that may be a literal
    character of its text.
    """

    row: int
    columns: tuple[str, ...]
    cells: tuple[str, ...]
    closed_by: int = 0

    def __getitem__(self, column: str) -> str:
        """Return the cell of a column; "" if the table has no such column or the row ends before it."""
        place = self.columns.index(column) if column in self.columns else len(self.cells)
        return self.cells[place] if place < len(self.cells) else ""

    @property
    def flaw(self) -> str:
        """Return the defect of the row as a whole; "" if there is none."""
        if self.closed_by:
            return f"it opens a quote that row {self.closed_by} closes, so the end of the row is ambiguous"
        if len(self.cells) <= len(self.columns):
            return ""
        return f"it has {len(self.cells)} cells, but the header has {len(self.columns)}"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a regular text file for reading.

    Raises:
        DataError: If it is not a regular file, or cannot be read as text.
    """
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
        # In UTF-16, Latin letters and blanks have zero bytes only at odd or only at even positions.
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
    """Return the content of a text file of at most `MAX_BYTES`."""
    with open_text(path) as file:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path} cannot be read: {path.stat().st_size} bytes are too many for a text file. Check "
                "--format and --source."
            )
        return file.read()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not blank, numbered from 1 and without line end."""
    with open_text(path) as file:
        for row, line in enumerate(_bounded_lines(file, path), start=1):
            if line.strip():
                yield row, line.rstrip("\r\n")


def _bounded_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file; a DataError if one has `MAX_LINE` characters."""
    # A binary file without line ends must not be read into memory as one line.
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise DataError(f"{path} contains a line of more than {MAX_LINE} characters. Check --format and --source.")
        yield line


def named_separator(path: Path) -> str:
    """Return the separator that a first line such as `sep=;` names; "" if there is none."""
    with open_text(path) as file:
        match = SEPARATOR_LINE.fullmatch(next(_bounded_lines(file, path), ""))
    return match.group(1) if match else ""


def read_cells(path: Path, delimiter: str = "\t", quoted: bool = False) -> Iterator[Record]:
    """Yield the rows of a table without a header; quotation marks are literal characters unless `quoted`."""
    with open_text(path) as file:
        lines = _bounded_lines(file, path)
        if quoted:
            # Replace a separator line by a blank one, so that row numbers stay those in the file.
            first = next(lines, "")
            lines = chain(["\n" if SEPARATOR_LINE.fullmatch(first) else first], lines)
        rows = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)
        begin = 1
        try:
            for cells in rows:
                if any(cell.strip() for cell in cells):
                    yield Record(begin, (), tuple(cells))
                begin = rows.line_num + 1  # a quoted cell may span several lines
        except csv.Error as error:
            raise DataError(f"{path}, row {begin}: not a valid table row ({error}). Fix or delete it.") from None


def read_records(path: Path, delimiter: str = "\t", quoted: bool = False) -> Iterator[Record]:
    """Yield the rows of a table below its header.

    Raises:
        DataError: If the table is empty.
    """
    rows = read_cells(path, delimiter, quoted)
    head = next(rows, None)
    if head is None:
        raise DataError(f"{path} is empty. The first row must contain the column names.")
    columns = tuple(name.strip() for name in head.cells)
    for record in rows:
        yield Record(record.row, columns, record.cells)


def columns_alike(columns: Iterable[str], name: str) -> list[str]:
    """Return the column of exactly this name, or else all columns equal to it up to case and surrounding blanks."""
    matching = [column for column in dict.fromkeys(columns) if column.strip().casefold() == name.strip().casefold()]
    return [name] if name in matching else matching


def choose_columns(table: Path, head: Iterable[str], wanted: Iterable[tuple[str, tuple[str, ...], bool]]) -> list[str]:
    """Return the columns to use, one per entry of `wanted`.

    Args:
        table: Path of the table, for errors.
        head: Column names of the table.
        wanted: Requested column ("" for none), usual names, and whether the column is required. Without a request, the
            first usual name that matches exactly one column is used.

    Raises:
        UsageError: If a requested or required column is missing, or several columns match a name.
    """
    head = list(head)
    chosen = []
    for requested, usual, is_needed in wanted:
        matches = {name: columns_alike(head, name) for name in ((requested,) if requested else usual)}
        single = next((columns[0] for columns in matches.values() if len(columns) == 1), "")
        ambiguous = next((name for name, columns in matches.items() if len(columns) > 1), "")
        if not single and (ambiguous or requested or is_needed):
            problem = (
                f"{len(matches[ambiguous])} columns {ambiguous!r}"
                if ambiguous
                else f"no column {next(iter(matches))!r}"
            )
            raise UsageError(
                f"{table} has {problem}; its columns are {', '.join(map(repr, sorted(head)))}. Name the columns "
                "with --audio_column, --text_column, --speaker_column, --split_column and --channel_column."
            )
        chosen.append(single or usual[0])  # an optional column that is missing reads as empty
    return chosen


def channel_column(source: SpeechFolder) -> tuple[str, tuple[str, ...], bool]:
    """Return the request to `choose_columns` for the channel column; one that matches nothing if the user opted out."""
    if source.channel_column == NO_COLUMN:
        return "", (f"{NO_COLUMN}\0",), False  # no header contains a NUL
    return source.channel_column, ("channel",), False


def parse_json(text: str) -> object:
    """Parse a JSON text; a ValueError with a short reason if it is invalid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_text(value: object) -> str:
    """Return a JSON value as text: strings and numbers (speakers often are numbers); "" for everything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def as_seconds(value: object) -> float | None:
    """Return a number, or a number in quotes, as seconds; None if it is none. It may still be negative or NaN."""
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


# --------------------
# Repair of rows that were split when a program that quotes (pandas) wrote a line end into a cell.
#
# In tables without quoting, a quotation mark is a literal character of its sentence, and need not be paired. Therefore
# rows are joined only if they certainly belong together.


MAX_ROWS = 20  # into which one row may have been split
QUOTED = re.compile(r'"([^"]*(?:""[^"]*)*)"(?!")')  # a cell quoted as in CSV; linear time


def mend_rows(rows: Iterable[Record], delimiter: str = "\t") -> Iterator[Record]:
    """Yield the rows, joining a row that ends in an open quoted cell with the rows that close it and fill all columns.

    The line end becomes a space. A row with too few cells that may, but need not, continue is marked by `closed_by`.
    """
    rows = iter(rows)
    waiting = deque[Record]()
    while True:
        waiting.extend(islice(rows, MAX_ROWS - len(waiting)))
        if not waiting:
            return
        first = waiting.popleft()
        row, joined_count = _join_rows(first, waiting, delimiter) if _is_open(first.cells[-1]) else (first, 0)
        for _ in range(joined_count):
            waiting.popleft()
        yield row


def _is_open(cell: str) -> bool:
    return cell.startswith('"') and not QUOTED.match(cell)


def _join_rows(first: Record, following: Iterable[Record], delimiter: str) -> tuple[Record, int]:
    """Return the row joined with the following rows that belong to it, and the number of these."""
    cells = first.cells
    width = len(first.columns)
    has_swallowed = False
    for count, row in enumerate(following, start=1):
        *complete, last = cells
        last += "\n" + delimiter.join(row.cells)
        quoted = QUOTED.match(last)
        if not quoted:
            cells = (*complete, last)
            continue
        text = quoted.group(1)
        rest = last[quoted.end() :]
        if rest and not rest.startswith(delimiter):
            break  # a quotation mark inside a cell: literal characters
        # A delimiter between the quotation marks suggests that they belong to different rows.
        has_swallowed |= delimiter in text
        cells = (*complete, text.replace('""', '"').replace("\n", " "), *rest.split(delimiter)[1:])
        if len(cells) == width and not has_swallowed:
            return replace(first, cells=cells), count
        # Continue only if the row is still too short and its new last cell is open again.
        if not (len(cells) < width and rest and _is_open(cells[-1])):
            return replace(first, closed_by=row.row if len(first.cells) < width else 0), 0
    return first, 0
