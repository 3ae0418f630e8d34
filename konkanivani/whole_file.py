"""A file that is whole or absent."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from konkanivani.errors import ResourceError


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; what is there at the end is put on the disk and renamed to `path`.

    Where anything fails, `path` stays as it was and nothing is left beside it.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The same for a file of which the caller has nothing of its own to say: an OSError becomes a ResourceError."""
    try:
        with published(path) as partial:
            yield partial
    except OSError as error:
        raise ResourceError(
            f"{path} could not be written: {error.strerror or error}. Free space, mend the folder, or name another."
        ) from None
