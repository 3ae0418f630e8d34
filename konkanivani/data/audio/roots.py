"""The folders in which a manifest's audio may lie: the manifest's own, and those that the user names.

A manifest that comes from elsewhere could name any file that its reader may open. What lies outside is refused by its
name alone, and by what its links resolve to, before anything is opened.
"""

import os
from collections.abc import Iterable

OUTSIDE = "it lies outside of its manifest's folder: name one above it with --audio_roots"
LED_OUTSIDE = "a link leads out of its manifest's folder: name where to with --audio_roots"


def audio_roots(folder: str, named: Iterable[str]) -> tuple[str, ...]:
    """The absolute paths of a manifest's folder, links resolved, and of the folders named, as given and resolved."""
    paths = [os.path.realpath(folder or ".")]
    for root in named:
        paths += [os.path.realpath(root), os.path.abspath(root)]
    return tuple(dict.fromkeys(paths))


def is_named_inside(audio_filepath: str, roots: tuple[str, ...]) -> bool:
    """Whether a path, relative to the first root or absolute, lies in one of them by its name; no disk is asked.

    Of most rows a glance is enough: a path that goes down and never up cannot leave its folder.
    """
    if ".." not in audio_filepath and not audio_filepath.startswith("/"):
        return True
    return _lies_in(os.path.normpath(os.path.join(roots[0], audio_filepath)), roots)


def resolved_inside(path: str, roots: tuple[str, ...]) -> str | None:
    """The path with its links resolved; None where that lies in none of the roots."""
    resolved = os.path.realpath(path)
    return resolved if _lies_in(resolved, roots) else None


def _lies_in(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root if root.endswith("/") else root + "/") for root in roots)
