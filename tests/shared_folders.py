"""Folders that the processes of a test run share: the first process that needs one writes it, the others read it."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WRITTEN = "made_once.txt"  # written to the complete folder: the digest of its content


def digest_of_files(folder: Path) -> str:
    """Return a digest of the names and the content of all files in a folder, except for WRITTEN."""
    result = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / WRITTEN):
        content = path.read_bytes()
        result.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return result.hexdigest()


def shared_root(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder of the whole run, also in a process of pytest-xdist, whose own folder is below it."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def made_once(root: Path, name: str, write: Callable[[Path], None]) -> Iterator[Path]:
    """Yield the folder `root/name`, written with `write` unless another process of the run has done so.

    Processes that need it meanwhile wait. If `write` fails, the next process starts again with an empty folder.
    Afterwards the content must be unchanged: otherwise one test's files would depend on another test.
    """
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / WRITTEN).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write(folder)
            (folder / WRITTEN).write_text(digest_of_files(folder))
    yield folder
    assert digest_of_files(folder) == (folder / WRITTEN).read_text(), f"a test has changed the files in {folder}"
