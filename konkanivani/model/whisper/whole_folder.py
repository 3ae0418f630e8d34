"""Folder that is either written completely or does not exist."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import safetensors

from konkanivani.base.errors import ResourceError, UsageError
from konkanivani.base.files import sync_file


def check_is_new(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists. Choose a new or empty folder.")


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Provide a temporary folder next to `out`; rename it to `out` at the end, or delete it if anything fails.

    Raises:
        ResourceError: The folder cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial", dir=out.parent))
        try:
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():
                    path.chmod(0o644)  # safetensors creates files that only their owner can read
                    sync_file(path)
            partial.chmod(0o755)  # mkdtemp creates folders that only their owner can enter
            os.replace(partial, out)  # atomic, and after the files are synced: a crash leaves all or nothing
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"{out} could not be written: {error.strerror or error}. Free disk space, repair the folder, or "
            "choose another one."
        ) from None
    except safetensors.SafetensorError as error:
        raise ResourceError(
            f"{out} could not be written: {error}. Free disk space, or choose another folder."
        ) from None
