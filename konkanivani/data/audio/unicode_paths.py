"""Paths whose names are spelled in another Unicode normal form than on the disk.

A Mac writes names decomposed (NFD); tables and keyboards mostly compose them (NFC). Both look the same, but a Linux
file system compares bytes.
"""

import os
import unicodedata
from collections.abc import Iterator
from functools import cache

SCRIPTS_OF_INDIA = range(0x0900, 0x0E00)


def existing_path(path: str) -> str:
    """Return the path as it is spelled on the disk; the path itself if it exists, or in no spelling.

    Each of its parts may be in another normal form. Only names are compared, so this opens nothing and follows no
    `..` or link that the path itself does not name; whether the result may be opened is checked afterwards.
    """
    if path.isascii() or os.path.lexists(path):
        return path
    found = "/" if path.startswith("/") else ""
    for part in path.split("/"):
        if not part:
            continue
        spelled = next((name for name in _spellings(part) if os.path.lexists(found + name)), None)
        if spelled is None:
            return path
        found += spelled + "/"
    return found[:-1]


def comparable_name(name: str) -> str:
    """Return the name in the form in which names are compared (NFC)."""
    return unicodedata.normalize("NFC", name)


def _spellings(name: str) -> Iterator[str]:
    """Yield the name, then its other canonical spellings."""
    yield name
    if name.isascii():
        return
    composed = unicodedata.normalize("NFC", name)
    yield composed
    yield unicodedata.normalize("NFD", name)
    # NFC leaves letters such as U+095C decomposed; keyboards type them as one character.
    for pair, letter in _excluded_letters().items():
        composed = composed.replace(pair, letter)
    yield composed


@cache
def _excluded_letters() -> dict[str, str]:
    """Return the letters with nukta that NFC does not compose, by the letter and nukta that they stand for."""
    letters = map(chr, SCRIPTS_OF_INDIA)
    return {
        unicodedata.normalize("NFC", letter): letter
        for letter in letters
        if unicodedata.decomposition(letter) and unicodedata.normalize("NFC", letter) != letter
    }
