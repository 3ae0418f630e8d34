"""N-grams of tokens, and reading and writing of ARPA files as SRILM and KenLM do.

A file has a section per order. A line holds the base-10 log probability of an n-gram, its words and, except in the last
section, the base-10 log of its backoff weight (0 if omitted). The words are the tokenizer's pieces as it spells them,
`<s>`, `</s>` and `<unk>`. In memory, logarithms are natural.
"""

import gzip
import io
import math
import re
import stat
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from konkanivani.base.errors import DataError, ResourceError, explained
from konkanivani.base.files import atomic_replace
from konkanivani.base.line_endings import BYTE_ORDER_MARK, conversion_hint
from konkanivani.data.vocabulary import Vocabulary

LN_10 = math.log(10)
IMPOSSIBLE = -99.0  # SRILM's base-10 log of zero; the log probability of <s> in a file
MAX_NGRAMS = 30_000_000  # each takes about 130 bytes while reading
MAX_ORDER = 32
MAX_SILENT_LINES = 1000  # lines that are blank or precede the first section
MAX_LINE = 2**14  # bytes
MAX_BACKOFF = 1000.0  # of a base-10 logarithm
MAX_UNPACKED_RATIO = 100  # bytes after and before decompression; n-grams reach 10 to 20
GZIP = b"\x1f\x8b"
MAX_NAMED = 3
FOREIGN = "It must use this checkpoint's tokenizer: train it with train_language_model.py --checkpoint."


@dataclass(frozen=True, eq=False)
class Ngrams:
    """N-grams of one order n, in any sequence; logarithms are natural."""

    tokens: np.ndarray  # (N, n) int32
    log_probabilities: np.ndarray  # (N,) float64
    backoffs: np.ndarray  # (N,) float64, log weights; zeros for the highest order

    def __len__(self) -> int:
        return len(self.tokens)


def read_arpa(path: str | Path, tokenizer: Vocabulary) -> tuple[Ngrams, ...]:
    """Read the n-grams of order 1, 2, ... of an ARPA file, which may be gzipped.

    Raises:
        DataError: The file is not an ARPA file of this tokenizer.
    """
    path = Path(path)
    advice = "Give an ARPA file written by train_language_model.py."
    with explained(DataError, f"The language model {path} cannot be read", advice):
        try:
            with _opened(path) as (file, most_bytes):
                return _Reader(path, file, most_bytes, tokenizer).read()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise OSError(f"{error}{conversion_hint(path)}") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, float]]:
    """Open the file, decompressed if gzipped, and yield it with the maximal number of bytes to read."""
    # Only regular files: a pipe or device could block or never end.
    if "\0" in str(path) or not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")
    with open(path, "rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        if not is_packed:
            yield file, math.inf
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked, MAX_UNPACKED_RATIO * path.stat().st_size + 2**20


class _Reader:
    """Reader of one ARPA file."""

    def __init__(self, path: Path, file: io.BufferedIOBase, most_bytes: float, tokenizer: Vocabulary) -> None:
        self._path = path
        self._file = file
        self._bytes_left = most_bytes
        self._row = 0
        self._silent = 0
        self._known = {tokenizer.piece(token).encode(): token for token in range(tokenizer.size)}
        if tokenizer.special.blank is not None:
            del self._known[tokenizer.piece(tokenizer.special.blank).encode()]

    def read(self) -> tuple[Ngrams, ...]:
        """Return all n-grams; text before \\data\\ and after \\end\\ is skipped."""
        counts, line = self._read_counts()
        orders = []
        for order, count in enumerate(counts, start=1):
            if line != b"\\%d-grams:" % order:
                raise self._error(f"{_shown(line)} is found at the start of its {order}-grams")
            orders.append(self._read_section(order, count, is_last=order == len(counts)))
            # Words of longer n-grams must be among the 1-grams.
            if order == 1:
                kept = set(orders[0].tokens[:, 0].tolist())
                self._known = {word: token for word, token in self._known.items() if token in kept}
            line = self._next_line()
            if not line.startswith(b"\\"):
                raise self._error(f"it has more {order}-grams than the {count} in its header")
        if line != b"\\end\\":
            raise self._error(f"{_shown(line)} is found at its end")
        self._file.read(1)  # at the end of a gzipped file, this verifies the checksum
        return tuple(orders)

    def _next_line(self) -> bytes:
        """Return the next line that is not blank, stripped."""
        while line := self._file.readline(MAX_LINE):
            self._row += 1
            self._bytes_left -= len(line)
            if self._row == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if len(line) == MAX_LINE:
                raise self._error(f"a line has more than {MAX_LINE} bytes")
            if self._bytes_left < 0:
                raise self._error(f"it decompresses to more than {MAX_UNPACKED_RATIO} times its size")
            if stripped := line.strip():
                return stripped
            self._pass_over()
        raise self._error("it ends before \\end\\")

    def _pass_over(self) -> None:
        self._silent += 1
        if self._silent > MAX_SILENT_LINES:
            raise self._error(f"more than {MAX_SILENT_LINES} lines are blank, or precede \\data\\")

    def _read_counts(self) -> tuple[list[int], bytes]:
        """Return the number of n-grams of each order in the header, and the line after it."""
        while self._next_line() != b"\\data\\":
            self._pass_over()
        counts: list[int] = []
        while stated := re.fullmatch(rb"ngram\s+(\d{1,4})\s*=\s*(\d{1,30})", line := self._next_line()):
            if int(stated[1]) != len(counts) + 1 or len(counts) == MAX_ORDER:
                raise self._error(
                    f"its header must list the orders 1, 2, ... up to {MAX_ORDER}, but has {_shown(line)}"
                )
            counts.append(int(stated[2]))
        if not counts or not counts[0]:
            raise self._error("its header lists no 1-grams")
        if sum(counts) > MAX_NGRAMS:
            raise self._error(f"its header lists {sum(counts)} n-grams, more than the limit of {MAX_NGRAMS}")
        return counts, line

    def _read_section(self, order: int, count: int, is_last: bool) -> Ngrams:
        """Read the `count` n-grams of one order."""
        # Arrays grow with the lines that are read: a false count in the header allocates nothing.
        tokens = array("i")
        logarithms = array("d")
        backoffs = array("d")
        known = self._known
        unknown = []
        for _ in range(count):
            fields = self._next_line().split()
            if fields[0].startswith(b"\\"):
                raise self._error(f"it has fewer {order}-grams than the {count} in its header")
            try:
                probability = float(fields[0])
                words = fields[1 : order + 1]
                backoff = float(fields[order + 1]) if len(fields) == order + 2 else 0.0
            except ValueError:
                probability = backoff = math.nan
            # NaN compares unequal to itself; float() accepts "nan".
            if not order + 1 <= len(fields) <= order + 2 or probability != probability or backoff != backoff:
                expected = f"a log probability, {order} word{'s' if order > 1 else ''} and a backoff weight"
                raise self._error(f"{_shown(b' '.join(fields))} is not {expected}")
            if probability > 0 or not -MAX_BACKOFF < backoff < MAX_BACKOFF:
                raise self._error(f"{probability:g} and {backoff:g} are not a log probability and a backoff weight")
            try:
                tokens.extend([known[word] for word in words])
            except KeyError:
                unknown += [word for word in words if word not in known and word not in unknown]
                if order > 1 or len(unknown) > MAX_NAMED:
                    raise self._unknown_words(order, unknown) from None
            logarithms.append(probability)
            backoffs.append(backoff)
        if unknown:
            raise self._unknown_words(order, unknown)
        weights = np.frombuffer(backoffs) * LN_10
        return Ngrams(
            np.frombuffer(tokens, np.int32).reshape(-1, order),
            np.frombuffer(logarithms) * LN_10,
            np.zeros_like(weights) if is_last else weights,
        )

    def _unknown_words(self, order: int, words: list[bytes]) -> DataError:
        named = ", ".join(map(_shown, words[:MAX_NAMED])) + (", ..." if len(words) > MAX_NAMED else "")
        if order > 1:
            return self._error(f"{named} in its {order}-grams is not in its 1-grams")
        return self._error(f"{named} is not a token of the tokenizer", FOREIGN)

    def _error(self, what: str, advice: str = "Train it again, or use another --language_model.") -> DataError:
        hint = conversion_hint(self._path) if self._path.suffix == ".gz" else ""
        return DataError(f"The language model {self._path} cannot be used: line {self._row}: {what}{hint}. {advice}")


def _shown(text: bytes) -> str:
    """Return the first 60 bytes of a line, quoted and printable."""
    beginning = text[:60].decode("utf-8", errors="replace")
    return '"' + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in beginning) + '"'


def write_arpa(path: str | Path, orders: Sequence[Ngrams], tokenizer: Vocabulary) -> None:
    """Write the n-grams to `path`, atomically, and gzipped if its name ends in .gz.

    Raises:
        ResourceError: The file cannot be written; the message says why.
    """
    path = Path(path)
    pieces = [tokenizer.piece(token) for token in range(tokenizer.size)]
    advice = "Choose another --output in a writable folder."
    with (
        explained(ResourceError, f"The language model cannot be written to {path}", advice),
        atomic_replace(path) as partial,
    ):
        # mtime=0: the same n-grams give the same bytes.
        with gzip.GzipFile(partial, "wb", mtime=0) if path.suffix == ".gz" else open(partial, "wb") as file:
            for line in _lines(orders, pieces):
                file.write(line.encode() + b"\n")


def _lines(orders: Sequence[Ngrams], pieces: list[str]) -> Iterator[str]:
    yield "\\data\\"
    yield from (f"ngram {number}={len(ngrams)}" for number, ngrams in enumerate(orders, start=1))
    for number, ngrams in enumerate(orders, start=1):
        yield f"\n\\{number}-grams:"
        probabilities = (ngrams.log_probabilities / LN_10).clip(IMPOSSIBLE, 0.0)
        columns = ngrams.tokens.tolist(), probabilities.tolist(), (ngrams.backoffs / LN_10).tolist()
        for tokens, probability, backoff in zip(*columns, strict=True):
            words = " ".join([pieces[token] for token in tokens])
            weight = f"\t{backoff:.12g}" if number < len(orders) else ""
            yield f"{probability:.12g}\t{words}{weight}"
    yield "\n\\end\\"
