"""Numbers, durations and names as reports say them."""

import os


def count(number: int, noun: str, verbs: str = "") -> str:
    """The number with its noun and, of "is/are", the verb that fits: "1 warning", "1,200 utterances are"."""
    verb = verbs.split("/")[min(number, 2) != 1] if verbs else ""
    return f"{number:,} {noun}{'' if number == 1 else 's'} {verb}".rstrip()


def duration_words(hours: float) -> str:
    """Hours, or minutes where it is less than one."""
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def short_name(path: str) -> str:
    """The manifest's file name."""
    return os.path.basename(path) or path
