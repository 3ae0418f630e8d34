"""Lock that prevents two runs from using the same checkpoint or log folder."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from konkanivani.console import say
from konkanivani.errors import ResourceError

LOCK_NAME = ".lock"


@dataclass(frozen=True)
class FolderUse:
    """Use of a folder by a run, in the words of an error message, and the flag that selects another folder."""

    kind: str
    doing: str
    flag: str


TRAINING = FolderUse("checkpoint", "training in", "--checkpoint_dir")
LOGGING = FolderUse("log", "logging to", "--run_name")


class RunLock:
    """Exclusive lock on a folder, held until the process ends."""

    def __init__(self, directory: str | Path, use: FolderUse = TRAINING, note: str = "") -> None:
        """Acquire the lock and write the process id and `note` to the lock file.

        The note is readable until another process acquires the lock. Raises a ResourceError that names the process that
        holds the lock, or the reason why the folder is unusable.
        """
        self.path = Path(directory) / LOCK_NAME
        self._use = use
        # Remembered before mkdir, so that a refused start can remove exactly the folders that it created.
        self.created_folders = [parent for parent in self.path.parents if not parent.exists()]
        with self.errors_explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # "a+" does not truncate: the content is the id of a process that may hold the lock.
            self._file: TextIO = open(self.path, "a+", encoding="utf-8", errors="surrogateescape")
        _lock(self._file, self.path.parent, use)
        # The previous owner unlinked the file between open and lock: this lock is on a file without a name.
        if not os.fstat(self._file.fileno()).st_nlink:
            raise ResourceError(f"{self.path.parent} was just released by another process. Start again.")
        with self.errors_explained():
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n{note}" if note else str(os.getpid()))
            self._file.flush()

    def errors_explained(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that turns an OSError in the folder into a ResourceError that names it."""
        return _explain_lock_error(self.path.parent, self._use)


@contextlib.contextmanager
def remove_folders_on_error(*locks: RunLock | None) -> Iterator[None]:
    """Remove the folders that the locks created if the block raises, unless they contain other files by then."""
    try:
        yield
    except BaseException:
        for lock in filter(None, reversed(locks)):
            with contextlib.suppress(OSError):
                if lock.created_folders and os.listdir(lock.path.parent) == [LOCK_NAME]:
                    lock.path.unlink()
                    # From the innermost folder outwards, the order of `Path.parents`.
                    for folder in lock.created_folders:
                        folder.rmdir()
        raise


def check_nobody_works(directory: str | Path, use: FolderUse = TRAINING) -> None:
    """Raise the ResourceError that a RunLock would raise, without changing the folder."""
    path = Path(directory) / LOCK_NAME
    if not os.path.exists(path):
        return
    # Opened for writing, because lockf needs it for an exclusive lock. Closing the file releases the lock.
    with _explain_lock_error(directory, use), open(path, "r+", encoding="utf-8", errors="surrogateescape") as file:
        _lock(file, directory, use)


@contextlib.contextmanager
def _explain_lock_error(directory: str | Path, use: FolderUse) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"The {use.kind} folder {directory} cannot be written: {error.strerror or error} "
            f"({error.filename or directory}). Choose another {use.flag}, or get write permission from the "
            "owner of the file."
        ) from None


def _lock(file: TextIO, directory: str | Path, use: FolderUse) -> None:
    """Lock the file until it is closed, if its file system supports locks."""
    try:
        # Not flock: its locks pass to forked audio workers, which outlive a killed trainer by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"{directory} does not support file locks ({error.strerror}): make sure that no other run uses it.")
            return
        file.seek(0)
        holder = next(iter(file.read().split()), "unknown")
        raise ResourceError(
            f"Process {holder} is already {use.doing} {directory}. Stop it, or choose another {use.flag}."
        ) from None
