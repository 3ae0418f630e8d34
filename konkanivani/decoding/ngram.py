"""N-gram language models: ARPA files, and estimation by modified Kneser-Ney smoothing.

V vocabulary, P positions in the text, N different n-grams of one order, M of the order below.
"""

import gzip
import io
import math
import re
import stat
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from konkanivani.data.text import OUR_TOKENS, SpecialTokens, Vocabulary
from konkanivani.errors import DataError, ResourceError, explained
from konkanivani.files import BYTE_ORDER_MARK, atomic_replace, conversion_hint

# --------------------
# N-grams of tokens, and reading and writing of ARPA files as SRILM and KenLM do.
#
# A file has a section per order. A line holds the base-10 log probability of an n-gram, its words and, except in the
# last section, the base-10 log of its backoff weight (0 if omitted). The words are the tokenizer's pieces as it spells
# them, `<s>`, `</s>` and `<unk>`. In memory, logarithms are natural.


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
FOREIGN = "It must use this checkpoint's tokenizer: train it with konkanivani lm --checkpoint."


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
    advice = "Give an ARPA file written by konkanivani lm."
    with explained(DataError, f"The language model {path} cannot be read", advice):
        try:
            with _open(path) as (file, most_bytes):
                return _Reader(path, file, most_bytes, tokenizer).read()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise OSError(f"{error}{conversion_hint(path)}") from None


@contextmanager
def _open(path: Path) -> Iterator[tuple[io.BufferedIOBase, float]]:
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
        self._token_by_word = {tokenizer.piece(token).encode(): token for token in range(tokenizer.size)}
        if tokenizer.special.blank is not None:
            del self._token_by_word[tokenizer.piece(tokenizer.special.blank).encode()]

    def read(self) -> tuple[Ngrams, ...]:
        """Return all n-grams; text before \\data\\ and after \\end\\ is skipped."""
        counts, line = self._read_counts()
        orders = []
        for order, count in enumerate(counts, start=1):
            if line != b"\\%d-grams:" % order:
                raise self._error(f"{_quote_line(line)} is found at the start of its {order}-grams")
            orders.append(self._read_section(order, count, is_last=order == len(counts)))
            # Words of longer n-grams must be among the 1-grams.
            if order == 1:
                vocabulary = set(orders[0].tokens[:, 0].tolist())
                self._token_by_word = {
                    word: token for word, token in self._token_by_word.items() if token in vocabulary
                }
            line = self._next_line()
            if not line.startswith(b"\\"):
                raise self._error(f"it has more {order}-grams than the {count} in its header")
        if line != b"\\end\\":
            raise self._error(f"{_quote_line(line)} is found at its end")
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
            self._count_skipped_line()
        raise self._error("it ends before \\end\\")

    def _count_skipped_line(self) -> None:
        self._silent += 1
        if self._silent > MAX_SILENT_LINES:
            raise self._error(f"more than {MAX_SILENT_LINES} lines are blank, or precede \\data\\")

    def _read_counts(self) -> tuple[list[int], bytes]:
        """Return the number of n-grams of each order in the header, and the line after it."""
        while self._next_line() != b"\\data\\":
            self._count_skipped_line()
        counts: list[int] = []
        while stated := re.fullmatch(rb"ngram\s+(\d{1,4})\s*=\s*(\d{1,30})", line := self._next_line()):
            if int(stated[1]) != len(counts) + 1 or len(counts) == MAX_ORDER:
                raise self._error(
                    f"its header must list the orders 1, 2, ... up to {MAX_ORDER}, but has {_quote_line(line)}"
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
        token_by_word = self._token_by_word
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
                raise self._error(f"{_quote_line(b' '.join(fields))} is not {expected}")
            if probability > 0 or not -MAX_BACKOFF < backoff < MAX_BACKOFF:
                raise self._error(f"{probability:g} and {backoff:g} are not a log probability and a backoff weight")
            try:
                tokens.extend([token_by_word[word] for word in words])
            except KeyError:
                unknown += [word for word in words if word not in token_by_word and word not in unknown]
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
        listed = ", ".join(map(_quote_line, words[:MAX_NAMED])) + (", ..." if len(words) > MAX_NAMED else "")
        if order > 1:
            return self._error(f"{listed} in its {order}-grams is not in its 1-grams")
        return self._error(f"{listed} is not a token of the tokenizer", FOREIGN)

    def _error(self, problem: str, advice: str = "Train it again, or use another --language_model.") -> DataError:
        hint = conversion_hint(self._path) if self._path.suffix == ".gz" else ""
        return DataError(f"The language model {self._path} cannot be used: line {self._row}: {problem}{hint}. {advice}")


def _quote_line(text: bytes) -> str:
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


# --------------------
# Estimation of n-grams of tokens from text: interpolated modified Kneser-Ney.
#
# Chen and Goodman (1998), An Empirical Study of Smoothing Techniques for Language Modeling, section 3. An n-gram below
# the highest order is counted by the number of different tokens before it; n-grams at the start of a sentence have none
# and are counted by their occurrences (as in Heafield et al., 2013, Scalable Modified Kneser-Ney Language Model
# Estimation). Unigrams are interpolated with the uniform distribution, so no token of the vocabulary is impossible.


# Discounts of counts 1, 2 and >= 3 for texts too small to estimate them: the middle of the possible range.
USUAL_DISCOUNTS = (0.5, 1.0, 1.5)
NOWHERE = -1


@dataclass(frozen=True, eq=False)
class _NgramCounts:
    """Different n-grams of one order and their numbers of occurrences."""

    parents: np.ndarray  # (N,) the first n - 1 tokens, as an index into the M
    tokens: np.ndarray  # (N,) the last token
    suffixes: np.ndarray  # (N,) the last n - 1 tokens, as an index into the M
    counts: np.ndarray  # (N,)


def estimate_ngrams(
    sentences: Iterable[Sequence[int]], vocabulary: int, order: int, special: SpecialTokens = OUR_TOKENS
) -> tuple[Ngrams, ...]:
    """Estimate the n-grams of order 1 to `order` from at least one sentence of token ids.

    Orders longer than every sentence, including its start and end, are left out. The probabilities after each context
    add up to one over all tokens but blank and the start; each of these has a unigram.
    """
    framed = ((special.start, *tokens, special.end) for tokens in sentences)
    text = np.fromiter(chain.from_iterable(framed), np.int64)
    levels = _count(text, vocabulary, order, special.end)
    estimated: list[Ngrams] = []
    tokens = np.zeros((1, 0), np.int32)
    lower = np.full(1, 1 / (vocabulary - 2))
    for level, above in zip(levels, [*levels[1:], None], strict=True):
        counts = _kneser_ney_counts(level, above, special.start)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(level.parents, counts, len(lower))
        weights = np.bincount(level.parents, discounts, len(lower)) / np.maximum(totals, 1)
        if estimated:
            np.log(weights, out=estimated[-1].backoffs, where=totals > 0)
        # Interpolation: discounted estimate plus the context's freed mass times the lower order's estimate.
        lower = (counts - discounts) / totals[level.parents] + weights[level.parents] * lower[level.suffixes]
        tokens = np.column_stack([tokens[level.parents], level.tokens.astype(np.int32)])
        estimated.append(Ngrams(tokens, np.log(lower), np.zeros(len(tokens))))
    unigrams = estimated[0]
    is_kept = unigrams.tokens[:, 0] != special.blank
    never_follows = unigrams.tokens[is_kept, 0] == special.start
    log_probabilities = np.where(never_follows, IMPOSSIBLE * LN_10, unigrams.log_probabilities[is_kept])
    return Ngrams(unigrams.tokens[is_kept], log_probabilities, unigrams.backoffs[is_kept]), *estimated[1:]


def _count(text: np.ndarray, vocabulary: int, order: int, end: int) -> list[_NgramCounts]:
    """Count each order's n-grams in concatenated sentences (P,); order 1 has all tokens of the vocabulary."""
    nothing = np.zeros(vocabulary, np.int64)
    levels = [_NgramCounts(nothing, np.arange(vocabulary), nothing, np.bincount(text, minlength=vocabulary))]
    ends = np.flatnonzero(text == end)
    left = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(text)) + 1  # tokens up to the sentence's end
    # index within its order of the n-gram starting at each position
    places = text
    starts = np.arange(len(text))
    for number in range(2, order + 1):
        starts = starts[left[starts] >= number]
        if not len(starts):
            break
        # An n-gram is its first n - 1 tokens, by their index, and its last token.
        keys = places[starts] * vocabulary + text[starts + number - 1]
        keys, firsts, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        levels.append(_NgramCounts(keys // vocabulary, keys % vocabulary, places[starts[firsts] + 1], counts))
        places = np.full(len(text), NOWHERE)
        places[starts] = inverse
    return levels


def _kneser_ney_counts(level: _NgramCounts, above: _NgramCounts | None, start: int) -> np.ndarray:
    """Return the number (N,) of different tokens before each n-gram, or its occurrences.

    The latter at the highest order and for n-grams at the start of a sentence, which nothing precedes.
    """
    counts = level.counts
    if above is not None:
        before = np.bincount(above.suffixes, minlength=len(counts))
        counts = np.where(before > 0, before, counts)
    # The start of a sentence is only a context and has no probability of its own.
    return np.where(level.tokens == start, 0, counts)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts (4,) of counts 0, 1, 2 and >= 3 (Chen and Goodman, 1998, eq. 26).

    The default discounts are used if a count of counts is zero or an estimate is outside of its possible range.
    """
    once, twice, thrice, four_times = (int((counts == count).sum()) for count in range(1, 5))
    discounts = USUAL_DISCOUNTS
    if min(once, twice, thrice, four_times) > 0:
        y = once / (once + 2 * twice)
        estimated = 1 - 2 * y * twice / once, 2 - 3 * y * thrice / twice, 3 - 4 * y * four_times / thrice
        if all(0 < discount < count for count, discount in enumerate(estimated, start=1)):
            discounts = estimated
    return np.array([0.0, *discounts])
