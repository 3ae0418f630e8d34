"""The folders in which a manifest's audio may lie: the manifest's own, and those that the user names.

A relative path that leads outside is refused by its name alone, and by what its links resolve to, before anything is
opened. An absolute path of a manifest that the user names is accepted.
"""

import os
from collections.abc import Iterable

OUTSIDE = "it is outside of its manifest's folder: allow its folder with --audio_roots"
LED_OUTSIDE = "a link points outside of its manifest's folder: allow the target folder with --audio_roots"


def audio_roots(folder: str, named: Iterable[str]) -> tuple[str, ...]:
    """The absolute paths of a manifest's folder, links resolved, and of the folders named, as given and resolved."""
    paths = [os.path.realpath(folder or ".")]
    for root in named:
        paths += [os.path.realpath(root), os.path.abspath(root)]
    return tuple(dict.fromkeys(paths))


def is_named_inside(audio_filepath: str, roots: tuple[str, ...]) -> bool:
    """Return whether a path is absolute or lies, relative to the first root, in one of the roots by its name.

    No disk access. A relative path without `..` cannot leave its folder.
    """
    if ".." not in audio_filepath or audio_filepath.startswith("/"):
        return True
    return _lies_in(os.path.normpath(os.path.join(roots[0], audio_filepath)), roots)


def resolved_inside(path: str, roots: tuple[str, ...]) -> str | None:
    """The path with its links resolved; None where that lies in none of the roots."""
    resolved = os.path.realpath(path)
    return resolved if _lies_in(resolved, roots) else None


def _lies_in(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(root if root.endswith("/") else root + "/") for root in roots)
