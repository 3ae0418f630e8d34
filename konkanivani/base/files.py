"""Files that are whole or absent, lines that are appended whole, folders that are locked, listed or removed again."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from konkanivani.base.console import say
from konkanivani.base.errors import ResourceError, UsageError, explained
from konkanivani.base.signals import defer_signals

PIECE_BYTES = 2**20


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
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
def atomic_write(path: Path) -> Iterator[Path]:
    """The same for a file of which the caller has nothing of its own to say: an OSError becomes a ResourceError."""
    advice = "Free disk space, repair the folder, or choose another one."
    with explained(ResourceError, f"{path} could not be written", advice), atomic_replace(path) as partial:
        yield partial


def check_new_file(path: Path, force: bool) -> None:
    """Raises a ResourceError where no file could be written, a UsageError where one is there, but for `force`."""
    if (path.exists() and not path.is_file()) or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{path} cannot be written. Choose a file in an existing, writable folder.")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists. Choose another name, or overwrite it with --force.")


def check_own_file(path: Path, flag: str, kind: str, sign: str) -> None:
    """A ResourceError where it cannot be written, a UsageError where the first line of what is there has no `sign`."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{flag} {path} cannot be written. Choose a file in an existing, writable folder.")
    with explained(ResourceError, f"{flag} {path} cannot be read", "Give another path."):
        line = path.open("rb").readline(1 << 20) if path.is_file() else b""
    if path.exists() and sign.encode() not in line:
        raise UsageError(f"{flag} {path} would overwrite a file that is not a {kind}. Choose another path.")


def atomic_append(path: Path, data: bytes, header: bytes = b"") -> None:
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


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time work in `folder`; a killed process holds nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file; an OSError where it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one line a row beside `path` and renames the file into place; an OSError where that cannot be done."""
    with atomic_replace(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def without_empty_folders(folders: Iterable[Path]) -> Iterator[None]:
    """Remove, at the end of the block, those of these folders and their parents that it made and left empty."""
    absent = {place for folder in folders for place in (folder, *folder.parents) if not os.path.lexists(place)}
    try:
        yield
    finally:
        for place in sorted(absent, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):  # it holds something, or was never made
                place.rmdir()


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, removed at the end with all that it holds and all that was made to hold it."""
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    scratch = folder / f"dry_run_{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        with defer_signals():
            shutil.rmtree(scratch, ignore_errors=True)
            for place in absent:
                with contextlib.suppress(OSError):
                    place.rmdir()
            if scratch.exists():
                say(f"{scratch} could not be removed: delete it.")


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
