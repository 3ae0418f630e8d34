"""Paths of recordings: names of formats, roots, and Unicode forms."""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import PurePath

import soundfile

# --------------------
# File name suffixes of audio: the formats that libsndfile reads and those that need FFmpeg.


# Other common suffixes of libsndfile's formats.
OTHER_NAMES = (".aif", ".aifc", ".oga", ".opus", ".snd", ".sph")
RAW_NAMES = (".raw", ".txt", ".mat", ".mat4", ".mat5")  # no header, or usually not audio
USUAL_NAMES = (".wav", ".flac", ".mp3", ".ogg")  # preferred, see _ORDERED
# Written by phones, messengers, recorders and cameras; decoded by FFmpeg.
MEDIA_SUFFIXES = (
    *(".m4a", ".aac", ".mp4", ".m4b", ".m4p", ".m4r", ".m4v", ".mov", ".qt", ".3gp", ".3gpp", ".3g2", ".webm", ".weba"),
    *(".mkv", ".mka", ".ogv", ".ogx", ".spx", ".amr", ".awb", ".wma", ".wmv", ".asf", ".avi", ".divx", ".flv", ".f4v"),
    *(".f4a", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".vob", ".mp1", ".mp2", ".mpa", ".ac3", ".eac3", ".ec3", ".dts"),
    *(".mlp", ".thd", ".ape", ".wv", ".tta", ".tak", ".mpc", ".alac", ".shn", ".ra", ".rm", ".rmvb", ".gsm", ".dss"),
    *(".qcp", ".dsf", ".dff", ".oma", ".aa", ".aax", ".loas", ".latm", ".mxf"),
)
_KNOWN = tuple(f".{name.lower()}" for name in soundfile.available_formats())
# Common formats first: if a folder has a recording in several formats, the first of them is used.
_ORDERED = dict.fromkeys((*USUAL_NAMES, *OTHER_NAMES, *_KNOWN, *MEDIA_SUFFIXES))
AUDIO_SUFFIXES = tuple(suffix for suffix in _ORDERED if suffix not in RAW_NAMES)


def audio_rank(path: PurePath) -> int:
    """Return the index of the path's suffix in `AUDIO_SUFFIXES` (0: most common), or its length if it is not audio."""
    suffix = path.suffix.lower()
    return AUDIO_SUFFIXES.index(suffix) if suffix in AUDIO_SUFFIXES else len(AUDIO_SUFFIXES)


# --------------------
# Folders that may contain a manifest's audio: the manifest's own folder and those given with --audio_roots.
#
# A relative path that leads outside is rejected before anything is opened: first by its name, then after its links are
# resolved. An absolute path is accepted, because the user has named the manifest that contains it.


OUTSIDE = "it is outside of its manifest's folder: allow its folder with --audio_roots"
LED_OUTSIDE = "a link points outside of its manifest's folder: allow the target folder with --audio_roots"


def audio_roots(folder: str, named: Iterable[str]) -> tuple[str, ...]:
    """Return the resolved path of a manifest's folder, then each named folder both resolved and as given (absolute)."""
    paths = [os.path.realpath(folder or ".")]
    for root in named:
        paths += [os.path.realpath(root), os.path.abspath(root)]
    return tuple(dict.fromkeys(paths))


def is_named_inside(audio_filepath: str, roots: tuple[str, ...]) -> bool:
    """Return whether a path is absolute or, relative to the first root, inside one of the roots; no disk access."""
    # A relative path without `..` cannot leave its folder. The common case must be fast: this runs for every row.
    if ".." not in audio_filepath or audio_filepath.startswith("/"):
        return True
    return _is_inside(os.path.normpath(os.path.join(roots[0], audio_filepath)), roots)


def resolved_inside(path: str, roots: tuple[str, ...]) -> str | None:
    """Return the path with its links resolved; None if the result is outside of all roots."""
    resolved = os.path.realpath(path)
    return resolved if _is_inside(resolved, roots) else None


def _is_inside(path: str, roots: tuple[str, ...]) -> bool:
    # With a slash after the root, so that /data does not include /database.
    return any(path == root or path.startswith(root if root.endswith("/") else root + "/") for root in roots)


# --------------------
# Lookup of paths that are stored in another Unicode normal form.
#
# macOS writes names decomposed (NFD); tables and keyboards usually compose them (NFC). Both look the same, but Linux
# file systems compare bytes.


SCRIPTS_OF_INDIA = range(0x0900, 0x0E00)


def existing_path(path: str) -> str:
    """Return the path in the spelling that exists on the disk; unchanged if it exists or no spelling does.

    Each component may be in another normal form. Only names are compared: nothing is opened, and no `..` or link is
    followed that the path does not contain. The caller must check whether the result may be opened.
    """
    if path.isascii() or os.path.lexists(path):
        return path
    prefix = "/" if path.startswith("/") else ""
    for part in path.split("/"):
        if not part:
            continue
        spelled = next((name for name in _spellings(part) if os.path.lexists(prefix + name)), None)
        if spelled is None:
            return path
        prefix += spelled + "/"
    return prefix[:-1]


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
