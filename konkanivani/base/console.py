"""What a person reads on the terminal: numbers, durations and names in words, and the stages of a start."""

import contextlib
import json
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

Item = TypeVar("Item")

LONG_SECONDS = 2.0  # work that takes longer is announced, or shows a progress bar
JOINERS = "\u200c\u200d"  # a part of words in Indic scripts


def count(number: int, noun: str, verbs: str = "") -> str:
    """The number with its noun and, of "is/are", the verb that fits: "1 warning", "1,200 utterances are"."""
    verb = verbs.split("/")[min(number, 2) != 1] if verbs else ""
    return f"{number:,} {noun}{'' if number == 1 else 's'} {verb}".rstrip()


def is_or_are(number: int) -> str:
    """The verb of a subject of so many."""
    return "is" if number == 1 else "are"


def duration_words(hours: float) -> str:
    """Hours, or minutes where it is less than one."""
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def short_name(path: str) -> str:
    """The manifest's file name."""
    return os.path.basename(path) or path


def printable(text: object, kept: str = "") -> str:
    """The text with everything escaped, as JSON does, that a terminal would obey or UTF-8 cannot write, but `kept`."""
    return "".join(c if c.isprintable() or c in JOINERS or c in kept else json.dumps(c)[1:-1] for c in str(text))


def show_text(text: str, most: int = 200) -> str:
    """The text as it may be shown: what is invisible, turns the line or cannot be written stands as ⟨U+202E⟩.

    Joiners and marks stay. A longer text is cut after `most` characters.
    """
    cut = text if len(text) <= most else text[:most] + "…"
    return "".join(f"⟨U+{ord(c):04X}⟩" if is_invisible(c) else c for c in cut)


def is_invisible(character: str) -> bool:
    """Whether it shows nothing, or moves what stands around it."""
    kind = unicodedata.category(character)
    return character not in JOINERS and (kind[0] == "C" or kind in ("Zl", "Zp"))


def display_width(text: str) -> int:
    """The columns that a terminal gives the text: none to marks above or below, two to wide East Asian characters.

    As the C library counts (wcwidth of glibc); a spacing mark such as the vowel sign AA has a column of its own.
    """
    shown = (character for character in text if unicodedata.category(character) not in ("Mn", "Me", "Cf"))
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in shown)


def padded(text: str, width: int) -> str:
    """The text and blanks behind it, so many columns together."""
    return text + " " * (width - display_width(text))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table, names to the left in their column, what stands behind them to the right in its own."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [padded(name, widths[0])]
            + [" " * (width - display_width(cell)) + cell for cell, width in zip(cells, widths[1:], strict=True)]
        )
        for name, *cells in rows
    ]


Report = Callable[[str, str], None]
"""Takes a stage that is done and what it found."""


def silent(_stage: str, _sentence: str) -> None:
    """What a run that is not dry makes of its stages."""


class StageClock:
    """Prints each stage with the seconds since the one before."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()

    def done(self, stage: str, sentence: str) -> None:
        """Tells a stage that has just ended."""
        now = time.perf_counter()
        say(f"{stage + ':':<11} {sentence} ({now - self._last:.1f} s)")
        self._last = now

    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started


def say(text: object, stream: TextIO | None = None) -> None:
    """Prints text for a person at once: a name in it that holds an escape sequence is no command to the terminal."""
    print(printable(text, kept="\n\t"), file=stream, flush=True)


@contextlib.contextmanager
def announced(sentence: str, delay: float = LONG_SECONDS) -> Iterator[None]:
    """Print `sentence` on stderr if the block takes longer than `delay` seconds."""
    timer = threading.Timer(delay, _say_if_possible, (sentence,))
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
    """Return the items behind a progress bar, which a terminal shows if they take longer than LONG_SECONDS."""
    from tqdm import tqdm

    return tqdm(items, desc=title, total=total, unit=unit, delay=LONG_SECONDS, leave=False, disable=None)
