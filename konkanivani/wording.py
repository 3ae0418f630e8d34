"""Numbers, durations and names as reports say them."""

import json
import os

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
