"""Files: atomic writes, locks, digests, listings, and the detection of binary files that were saved as text."""

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

from konkanivani.console import announced, say
from konkanivani.errors import ResourceError, UsageError, defer_signals, explained

# --------------------
# Atomic writes and appends, folder locks, temporary folders, and folder listings without hidden files.


PACKAGE = Path(__file__).parent
PIECE_BYTES = 2**20


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; at the end, sync it to disk and rename it to `path`.

    If anything fails, `path` keeps its content and the temporary file is removed. The temporary name is fixed, so that
    the next writer overwrites the file of a killed one; if several processes may write `path`, use `sole_writer` too.
    """
    partial = _partial_path(path)
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        # Not after the rename, when the name may belong to the next process.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _partial_path(path: Path) -> Path:
    # In the same folder, since a rename is atomic only within a file system.
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Wait until no other process writes `path` in such a block, then run the block, which calls `atomic_replace`.

    The lock is that of the temporary file. A file system without locks is used without. Raises an OSError if the
    temporary file cannot be created.
    """
    partial = _partial_path(path)
    while True:
        # Writable, because NFS has exclusive locks only for such files.
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # the file system has no locks
                _lock_exclusively(descriptor, path)
            if _is_at(descriptor, partial):
                break
        except BaseException:
            os.close(descriptor)
            raise
        # The process that had the lock has renamed or removed this file.
        os.close(descriptor)
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_at(descriptor, partial):  # nothing was written
                partial.unlink()
        # The kernel releases the lock, also when the process ends, even by SIGKILL.
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path as `atomic_replace` does; an OSError becomes a ResourceError with a general message."""
    advice = "Free disk space, repair the folder, or choose another one."
    with explained(ResourceError, f"{path} could not be written", advice), atomic_replace(path) as partial:
        yield partial


def check_new_file(path: Path, force: bool | None) -> None:
    """Check that a new file can be written to `path`; `force` is None for commands without --force.

    Raises ResourceError if the folder is missing or not writable, and UsageError if the file exists, unless `force`.
    """
    if (path.exists() and not path.is_file()) or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{path} cannot be written. Choose a file in an existing, writable folder.")
    if path.exists() and not force:
        overwriting = "" if force is None else ", or overwrite it with --force"
        raise UsageError(f"{path} already exists. Choose another name{overwriting}.")


def check_own_file(path: Path, flag: str, kind: str, sign: str) -> None:
    """Check that `path` can be written, and that it is new or an earlier output of this program.

    Args:
        flag: the flag that names the file, for the message.
        kind: the kind of file, for the message.
        sign: text that the first line of an earlier output contains.

    Raises ResourceError if it cannot be written, and UsageError if it is another program's file.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ResourceError(f"{flag} {path} cannot be written. Choose a file in an existing, writable folder.")
    with explained(ResourceError, f"{flag} {path} cannot be read", "Give another path."):
        # At most 1 MiB: a binary file may have no line end at all.
        line = path.open("rb").readline(1 << 20) if path.is_file() else b""
    if path.exists() and sign.encode() not in line:
        raise UsageError(f"{flag} {path} would overwrite a file that is not a {kind}. Choose another path.")


def atomic_append(path: Path, data: bytes, header: bytes = b"") -> None:
    """Append `data`, or undo the partial write and raise. A new or empty file gets `header` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened for each append (tens of microseconds): a file kept open would accept data even after its folder was
    # removed. Unbuffered, so that a full disk fails here and not at close.
    with open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        remaining = memoryview(data if start else header + data)
        try:
            while remaining:
                # An unbuffered write may be partial.
                remaining = remaining[file.write(remaining) :]
        except BaseException:  # an interruption too must not leave half a record
            with suppress(OSError):
                file.truncate(start)
            raise


def sync_file(path: Path) -> None:
    """Sync a file to disk (fsync); a missing file is ignored."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def exclusive_lock(path: Path, is_required: bool = True) -> Iterator[None]:
    """Hold an exclusive lock of a folder or file in the block.

    Raises an OSError if `is_required` and the file system has no locks, as some of clusters.
    """
    # The kernel releases flock when the process ends, even by SIGKILL.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            _lock_exclusively(descriptor, path)
        except OSError:
            if is_required:
                raise
        yield
    finally:
        os.close(descriptor)


def _lock_exclusively(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with announced(f"Waiting for another process that works with {path}. Press Ctrl-C to stop."):
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file; raise OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def digest_of_files(paths: Iterable[Path], folder: Path | None = None) -> str:
    """Return a digest of the contents of files and, with `folder`, of their names relative to it."""
    named = [(str(path.relative_to(folder)) if folder else "", digest_of_file(path)) for path in paths]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def digest_of_code() -> str:
    """Return a digest of the names and contents of this package's source files."""
    # Sorted, because file systems list a directory in different orders.
    return digest_of_files(sorted(PACKAGE.rglob("*.py")), PACKAGE)


def cache_folder() -> Path | None:
    """Return the user's cache folder for results that can be recomputed; None if it is not an absolute path."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # XDG Base Directory Specification: a relative path is invalid and has to be ignored.
    return Path(folder) / "konkanivani" if os.path.isabs(folder) else None


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write one JSON object per line, atomically, and return the number of lines; raise OSError if that fails."""
    count = 0
    with atomic_replace(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


@contextlib.contextmanager
def without_empty_folders(folders: Iterable[Path]) -> Iterator[None]:
    """Remove, at the end of the block, these folders and their parents if they are new and empty."""
    # lexists also counts a dangling link, which must stay.
    absent = {parent for folder in folders for parent in (folder, *folder.parents) if not os.path.lexists(parent)}
    try:
        yield
    finally:
        # Deepest first, so that a parent is empty when its turn comes.
        for parent in sorted(absent, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or never created
                parent.rmdir()


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder in `folder`; at the end, remove it and the parents that were created for it."""
    absent = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    scratch = folder / f"dry_run_{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        # A second Ctrl-C must not leave half of the folder.
        with defer_signals():
            shutil.rmtree(scratch, ignore_errors=True)
            for parent in absent:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            if scratch.exists():
                say(f"{scratch} could not be removed: delete it.")


# Folders that macOS (in archives) and Windows create.
KEPT_BY_SYSTEMS = frozenset({"__MACOSX", "$RECYCLE.BIN", "System Volume Information"})


def is_hidden(name: str) -> bool:
    """Return whether a search skips files or folders of this name, such as `._0.wav` (macOS), `.Trash`, `__MACOSX`."""
    return name.startswith(".") or name in KEPT_BY_SYSTEMS


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder` that is neither hidden nor in a hidden folder, sorted by name within each folder.

    The name of `folder` itself may be hidden, since the user gave it. Links to folders are not followed.
    """
    for directory, folders, names in os.walk(folder):
        # Assigned in place: os.walk descends only into the folders that stay in this list, in this order.
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(names):
            if not is_hidden(name):
                yield Path(directory, name)


def visible_entries(folder: Path) -> list[Path]:
    """Return the files and folders directly in `folder` that are not hidden, sorted."""
    return sorted(path for path in folder.iterdir() if not is_hidden(path.name))


# --------------------
# Diagnosis of binary files saved as text: converted line endings, or a byte order mark.
#
# Git converts files that it treats as text (`core.autocrlf`, `* text` in .gitattributes), and so do editors. Checksums
# no longer match, and the bytes cannot be restored: the converted line feeds are indistinguishable from the others.


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LOOKED_AT = 2**24  # bytes examined, from the start of the file
# In random bytes one in 256 is a line feed, and one line feed in 256 follows a carriage return by chance.
LEAST_LINE_FEEDS = 6


def conversion_hint(path: Path) -> str:
    """Return "; ..." with the likely cause if the file at `path` looks like a binary file saved as text, else "".

    The result is for appending to the reason why a file cannot be read. It is "" if the file cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(LOOKED_AT)
    except (OSError, ValueError):
        return ""
    if b"\0" not in content:
        return ""  # a text file where a binary one is expected: line endings are not the cause
    line_feeds = content.count(b"\n")
    is_converted = line_feeds >= LEAST_LINE_FEEDS and content.count(b"\r\n") == line_feeds
    if not is_converted and not content.startswith(BYTE_ORDER_MARK):
        return ""
    symptom = "each LF in it follows a CR" if is_converted else "it starts with a byte order mark"
    pattern = f"*{path.suffix}" if path.suffix else path.name
    return (
        f"; {symptom}, so its line endings were probably converted by git or an editor that treated it as text: "
        f"copy it again as a binary file, in git with `{pattern} -text` in .gitattributes"
    )
