"""What comes on standard input, as a file that can be read from any place in it: a pipe cannot."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from konkanivani.base.errors import DataError, ResourceError, explained

SIGN = "-"  # what a person writes for it
MAX_BYTES = 2**32  # the most that a WAV can hold
PIECE_BYTES = 2**20


@contextlib.contextmanager
def spooled_input() -> Iterator[Path]:
    """The path, for this process and its children, of a file that holds all of standard input.

    It has no name in any folder, so nothing is left of it whatever ends the process. A DataError where there is no end
    to it, a ResourceError where there is no room.
    """
    what = f"Standard input cannot be stored in {tempfile.gettempdir()}"
    with tempfile.TemporaryFile() as file:
        with explained(ResourceError, what, "Free disk space there, or set TMPDIR to another folder."):
            while piece := sys.stdin.buffer.read(PIECE_BYTES):
                file.write(piece)
                if file.tell() > MAX_BYTES:
                    raise DataError(
                        f"Standard input exceeds {MAX_BYTES / 2**30:.0f} GiB. Save it as a file and give its path."
                    )
            file.flush()
        folder = Path("/proc", str(os.getpid()), "fd")
        yield (folder if folder.is_dir() else Path("/dev/fd")) / str(file.fileno())
