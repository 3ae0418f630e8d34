"""Standard input stored in a temporary file, because a pipe cannot seek."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from konkanivani.base.errors import DataError, ResourceError, explained

SIGN = "-"  # path that stands for standard input
MAX_BYTES = 2**32  # maximum size of a WAV file
PIECE_BYTES = 2**20


@contextlib.contextmanager
def spooled_input() -> Iterator[Path]:
    """Store standard input in a file; yield a path that this process and its children can open.

    Raises:
        DataError: Standard input exceeds `MAX_BYTES`.
        ResourceError: There is not enough disk space.
    """
    what = f"Standard input cannot be stored in {tempfile.gettempdir()}"
    # The file has no directory entry: nothing remains on the disk however the process ends.
    with tempfile.TemporaryFile() as file:
        with explained(ResourceError, what, "Free disk space there, or set TMPDIR to another folder."):
            while piece := sys.stdin.buffer.read(PIECE_BYTES):
                file.write(piece)
                if file.tell() > MAX_BYTES:
                    raise DataError(
                        f"Standard input exceeds {MAX_BYTES / 2**30:.0f} GiB. Save it as a file and give its path."
                    )
            file.flush()
        # /dev/fd would name the child's own descriptors; /proc/PID/fd names this process's.
        folder = Path("/proc", str(os.getpid()), "fd")
        yield (folder if folder.is_dir() else Path("/dev/fd")) / str(file.fileno())
