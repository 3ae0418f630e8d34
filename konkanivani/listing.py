"""The files of a folder as a person sees them, without what a system keeps there for itself."""

import os
from collections.abc import Iterator
from pathlib import Path

KEPT_BY_SYSTEMS = frozenset({"__MACOSX", "$RECYCLE.BIN", "System Volume Information"})


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is left out of a search: `._0.wav` of a Mac, `.Trash`, `__MACOSX`."""
    return name.startswith(".") or name in KEPT_BY_SYSTEMS


def visible_files(folder: Path) -> Iterator[Path]:
    """Every file below a folder that is not hidden and lies in no hidden folder, each folder's sorted by name.

    The folder itself may be called as it likes, for somebody has named it. Links to folders are not followed.
    """
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if not is_hidden(name):
                yield Path(directory, name)


def visible_entries(folder: Path) -> list[Path]:
    """The files and folders right in a folder that are not hidden, sorted."""
    return sorted(path for path in folder.iterdir() if not is_hidden(path.name))
