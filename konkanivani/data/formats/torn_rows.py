"""Rows of an unquoted table that were one, until a program that quotes (pandas) wrote a line end into a cell of theirs.

In such tables a quotation mark is a character of its sentence, and need not come in pairs. So rows are joined only
where it is sure that they are one.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from konkanivani.data.formats.tables import Record

MAX_ROWS = 20  # that one may have been torn into
QUOTED = re.compile(r'"([^"]*(?:""[^"]*)*)"(?!")')  # a cell as CSV quotes it; linear in what it is tried on


def mend_rows(rows: Iterable[Record], delimiter: str = "\t") -> Iterator[Record]:
    """The rows, joined where one ends in a quoted cell that a later one closes, and together they have all the cells.

    The line end becomes a blank. A row with too few cells that may go on, but not surely, says so by `closed_by`.
    """
    rows, waiting = iter(rows), deque[Record]()
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
    """The row with those behind it that belong to it, and how many they are."""
    cells, width, has_swallowed = first.cells, len(first.columns), False
    for count, row in enumerate(following, start=1):
        *whole, last = cells
        last += "\n" + delimiter.join(row.cells)
        quoted = QUOTED.match(last)
        if not quoted:
            cells = (*whole, last)
            continue
        text, rest = quoted.group(1), last[quoted.end() :]
        if rest and not rest.startswith(delimiter):
            break  # a mark in the midst of a cell: here they are characters
        has_swallowed |= delimiter in text
        cells = (*whole, text.replace('""', '"').replace("\n", " "), *rest.split(delimiter)[1:])
        if len(cells) == width and not has_swallowed:
            return replace(first, cells=cells), count
        if not (len(cells) < width and rest and _is_open(cells[-1])):
            return replace(first, closed_by=row.row if len(first.cells) < width else 0), 0
    return first, 0
