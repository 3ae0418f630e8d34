"""Lookup of paths that are stored in another Unicode normal form.

macOS writes names decomposed (NFD); tables and keyboards usually compose them (NFC). Both look the same, but Linux file
systems compare bytes.
"""

import os
import unicodedata
from collections.abc import Iterator
from functools import cache

SCRIPTS_OF_INDIA = range(0x0900, 0x0E00)


def existing_path(path: str) -> str:
    """Return the path in the spelling that exists on the disk; unchanged if it exists or no spelling does.

    Each component may be in another normal form. Only names are compared: nothing is opened, and no `..` or link is
    followed that the path does not contain. The caller must check whether the result may be opened.
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
    """Return the name in NFC, the form used for comparing names."""
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
    """Return the letters with nukta that NFC leaves decomposed, by their decomposition."""
    letters = map(chr, SCRIPTS_OF_INDIA)
    return {
        unicodedata.normalize("NFC", letter): letter
        for letter in letters
        if unicodedata.decomposition(letter) and unicodedata.normalize("NFC", letter) != letter
    }
