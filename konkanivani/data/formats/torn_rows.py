"""Repair of rows that were split when a program that quotes (pandas) wrote a line end into a cell.

In such tables a quotation mark is a literal character of its sentence, and need not be paired. Therefore rows are
joined only if they certainly belong together.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from konkanivani.data.formats.tables import Record

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
        row, taken = _joined(first, waiting, delimiter) if _is_open(first.cells[-1]) else (first, 0)
        for _ in range(taken):
            waiting.popleft()
        yield row


def _is_open(cell: str) -> bool:
    return cell.startswith('"') and not QUOTED.match(cell)


def _joined(first: Record, following: Iterable[Record], delimiter: str) -> tuple[Record, int]:
    """Return the row joined with the following rows that belong to it, and the number of these."""
    cells = first.cells
    width = len(first.columns)
    has_swallowed = False
    for count, row in enumerate(following, start=1):
        *whole, last = cells
        last += "\n" + delimiter.join(row.cells)
        quoted = QUOTED.match(last)
        if not quoted:
            cells = (*whole, last)
            continue
        text = quoted.group(1)
        rest = last[quoted.end() :]
        if rest and not rest.startswith(delimiter):
            break  # a quotation mark inside a cell: literal characters
        # A delimiter between the quotation marks suggests that they belong to different rows.
        has_swallowed |= delimiter in text
        cells = (*whole, text.replace('""', '"').replace("\n", " "), *rest.split(delimiter)[1:])
        if len(cells) == width and not has_swallowed:
            return replace(first, cells=cells), count
        # Continue only if the row is still too short and its new last cell is open again.
        if not (len(cells) < width and rest and _is_open(cells[-1])):
            return replace(first, closed_by=row.row if len(first.cells) < width else 0), 0
    return first, 0
