"""A folder in which one process at a time works."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Lets one process at a time work in `folder`; a killed process holds nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
