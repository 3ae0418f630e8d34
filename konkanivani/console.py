"""Output for people: lines, tables, numbers with units and quantities in words."""

import contextlib
import json
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeVar

from konkanivani.errors import UsageError

# --------------------
# Text for the terminal: numbers, durations and names in words, tables, stages and progress bars.


Item = TypeVar("Item")

LONG_SECONDS = 2.0  # work that takes longer is announced, or shows a progress bar
JOINERS = "\u200c\u200d"  # zero-width non-joiner and joiner, part of words in Indic scripts


def count(number: int, noun: str, verbs: str = "") -> str:
    """Return a number with its noun, and the matching verb of "is/are": "1 warning", "1,200 utterances are"."""
    singular, _, plural = verbs.partition("/")
    if number == 1:
        return f"{number:,} {noun} {singular}".rstrip()
    return f"{number:,} {noun}s {plural}".rstrip()


def is_or_are(number: int) -> str:
    """Return the verb for a subject of this number."""
    return "is" if number == 1 else "are"


def duration_words(hours: float) -> str:
    """Return a duration in hours, or in minutes if it is under one hour."""
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def short_name(path: str) -> str:
    """Return the file name of a manifest."""
    return os.path.basename(path) or path


def printable(text: object, exempt: str = "") -> str:
    """Escape, as JSON does, all characters that control the terminal or cannot be encoded in UTF-8, except `exempt`."""
    return "".join(c if c.isprintable() or c in JOINERS or c in exempt else json.dumps(c)[1:-1] for c in str(text))


def show_text(text: str, most: int = 200) -> str:
    """Return text with invisible, direction-changing and unencodable characters replaced, as in ⟨U+202E⟩.

    Joiners and combining marks stay. A text longer than `most` characters is cut.
    """
    cut = text if len(text) <= most else text[:most] + "…"
    return "".join(f"⟨U+{ord(c):04X}⟩" if is_invisible(c) else c for c in cut)


def is_invisible(character: str) -> bool:
    """Return whether a character has no glyph, or moves the characters around it."""
    # C: control, format, surrogate, private use, unassigned; Zl, Zp: line and paragraph separator.
    kind = unicodedata.category(character)
    return character not in JOINERS and (kind[0] == "C" or kind in ("Zl", "Zp"))


def display_width(text: str) -> int:
    """Return the width of text in terminal columns: marks above or below have 0, wide East Asian characters 2.

    The rule is wcwidth of glibc; a spacing mark such as the vowel sign AA has a column of its own.
    """
    # Mn and Me are nonspacing and enclosing marks, Cf format characters such as joiners.
    shown = (character for character in text if unicodedata.category(character) not in ("Mn", "Me", "Cf"))
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in shown)


def padded(text: str, width: int) -> str:
    """Pad text with spaces on the right to `width` columns."""
    return text + " " * (width - display_width(text))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table with aligned columns: the first column to the left, the others to the right."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [padded(name, widths[0])]
            + [" " * (width - display_width(cell)) + cell for cell, width in zip(cells, widths[1:], strict=True)]
        )
        for name, *cells in rows
    ]


Report = Callable[[str, str], None]
"""Called with the name of a finished stage and its result as a sentence."""


def silent(_stage: str, _sentence: str) -> None:
    """Discard a stage report; the default of every run except a dry run."""


class StageClock:
    """Printer of stages, each with the seconds since the previous one."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()

    def done(self, stage: str, sentence: str) -> None:
        """Print a stage that has just ended."""
        now = time.perf_counter()
        say(f"{stage + ':':<11} {sentence} ({now - self._last:.1f} s)")
        self._last = now

    def seconds(self) -> float:
        """Return the seconds since the clock was created."""
        return time.perf_counter() - self._started


def say(text: object, stream: TextIO | None = None) -> None:
    """Print text with terminal control sequences escaped, and flush."""
    # Names from manifests and archives may contain escape sequences.
    print(printable(text, exempt="\n\t"), file=stream, flush=True)


@contextlib.contextmanager
def announced(sentence: str, delay: float = LONG_SECONDS) -> Iterator[None]:
    """Print `sentence` on stderr if the block takes longer than `delay` seconds."""
    timer = threading.Timer(delay, _say_if_possible, (sentence,))
    # A pending timer must not delay the exit.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_if_possible(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed terminal, or a full disk that stderr goes to
        say(sentence, sys.stderr)


def progress_bar(items: Iterable[Item], total: int, title: str, unit: str) -> Iterable[Item]:
    """Wrap an iterable in a progress bar, which appears on a terminal after LONG_SECONDS."""
    from tqdm import tqdm

    # disable=None: no bar if stderr is not a terminal.
    return tqdm(items, desc=title, total=total, unit=unit, delay=LONG_SECONDS, leave=False, disable=None)


# --------------------
# Parsing of memory sizes, decibel ranges and percentages. Does not import torch.


POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MIB = 2**20
GIB = 2**30


def parse_budget(text: str) -> int:
    """Return the bytes of a memory size such as `4GiB`, `4g` or `700 MB`, case-insensitive.

    GB is 10**9 bytes (SI); GiB, and G without B, is 2**30, the unit of nominal GPU memory. K, M and T likewise.
    Raises UsageError without a unit, or outside 1 MiB to 8192 GiB.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt])(i?b)?\s*", text.lower())
    if match is None:
        raise UsageError(f"--memory_budget {text}: give a number and a unit, for example 4GiB, 4G or 700MiB.")
    number, prefix, ending = match.groups()
    size = int(float(number) * (1000 if ending == "b" else 1024) ** POWERS[prefix])
    if not 2**20 <= size <= 2**43:
        raise UsageError(f"--memory_budget {text} is out of range. Give a size from 1MiB to 8192GiB.")
    return size


def budget_text(size: int) -> str:
    """Return the size as a flag value, in whole MiB, rounded down."""
    return f"{size // MIB}MiB"


def peak_text(size: int) -> str:
    """Return the size in whole MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"


NUMBER = r"[+-]?\d+(?:\.\d+)?"
# dB; beyond, speech or noise is below the resolution of 16-bit audio
MIN_SNR = -50.0
MAX_SNR = 100.0


@dataclass(frozen=True)
class DecibelRange:
    """Range from `low` to `high` dB, both included."""

    low: float
    high: float


def parse_snr(text: str) -> DecibelRange:
    """Parse a range of signal-to-noise ratios in dB, such as `5:25`; raise UsageError if it is invalid."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*:\s*({NUMBER})\s*", text)
    if match is None:
        raise UsageError(f"--noise_snr {text}: give the lowest and highest SNR in dB, for example 5:25.")
    low, high = map(float, match.groups())
    if not MIN_SNR <= low <= high <= MAX_SNR:
        raise UsageError(
            f"--noise_snr {text}: give the lower SNR first, both between {MIN_SNR:g} and {MAX_SNR:g} dB, for "
            "example 5:25."
        )
    return DecibelRange(low, high)


def parse_share(text: str, flag: str) -> float:
    """Parse a share written as 1% or 0.01; raise UsageError if it is not a number between 0 and 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        # Not a number: fails the range check below. So does NaN.
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{flag} {text} is not a share. Give a percentage such as 1%, or a number between 0 and 1.")
    return share
