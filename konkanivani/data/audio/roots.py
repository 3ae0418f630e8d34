"""Folders that may contain a manifest's audio: the manifest's own folder and those given with --audio_roots.

A relative path that leads outside is rejected before anything is opened: first by its name, then after its links are
resolved. An absolute path is accepted, because the user has named the manifest that contains it.
"""

import os
from collections.abc import Iterable

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
    return _lies_in(os.path.normpath(os.path.join(roots[0], audio_filepath)), roots)


def resolved_inside(path: str, roots: tuple[str, ...]) -> str | None:
    """Return the path with its links resolved; None if the result is outside of all roots."""
    resolved = os.path.realpath(path)
    return resolved if _lies_in(resolved, roots) else None


def _lies_in(path: str, roots: tuple[str, ...]) -> bool:
    # With a slash after the root, so that /data does not include /database.
    return any(path == root or path.startswith(root if root.endswith("/") else root + "/") for root in roots)
