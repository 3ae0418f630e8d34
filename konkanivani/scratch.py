"""A folder that is removed again, whatever ends the work in it."""

import contextlib
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from konkanivani.command_line import say
from konkanivani.errors import Interrupted
from konkanivani.signals import held_signals, stopping_signals


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, removed at the end with all that it holds and all that was made to hold it."""
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    scratch = folder / f"dry_run_{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        with held_signals():
            shutil.rmtree(scratch, ignore_errors=True)
            for place in absent:
                with contextlib.suppress(OSError):
                    place.rmdir()
            if scratch.exists():
                say(f"{scratch} could not be removed: delete it.")


class _Stop(BaseException):
    """A signal; no Exception, so that nothing on its way takes it for a fault of its own and goes on."""


@contextlib.contextmanager
def stopping_at_signals() -> Iterator[None]:
    """A stopping signal ends the block at once; what it cleans up on the way out is not disturbed by another one."""
    came, stopping = [], stopping_signals()

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in stopping:
            signal.signal(each, signal.SIG_IGN)
        came.append(number)
        raise _Stop

    before = {number: signal.signal(number, stop) for number in stopping}
    try:
        yield
    except _Stop:
        raise Interrupted(
            "The dry run was stopped by a signal, and what it wrote is removed. Start it again to have its answer.",
            came[0],
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
