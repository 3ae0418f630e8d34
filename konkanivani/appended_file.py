"""A file to which whole records are appended; between two of them it is closed."""

import os
from contextlib import suppress
from pathlib import Path


def append_whole(path: Path, data: bytes, header: bytes = b"") -> None:
    """Appends the data, or takes back what was written of it and raises. An empty or absent file gets the header first.

    Opened anew each time (tens of microseconds): a file kept open goes on swallowing data once its folder is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        remaining = memoryview(data if start else header + data)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:  # an interruption too must not leave half a record
            with suppress(OSError):
                file.truncate(start)
            raise


def sync_file(path: Path) -> None:
    """Has the disk confirm what is written; a file that is not there has nothing to confirm."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        os.fsync(file.fileno())
