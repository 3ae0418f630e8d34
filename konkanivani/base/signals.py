"""Signals that stop the process: their list, and blocks that defer them or end at them."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from konkanivani.base.errors import Interrupted


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT (Ctrl-C), SIGTERM (`kill`) and SIGHUP (closed terminal or connection).

    SIGHUP is omitted if it is ignored, as nohup sets it.
    """
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if outlives else (signal.SIGHUP,))


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Block the stopping signals until the end of the block.

    A process forked inside the block inherits the mask, and these signals do not reach it.
    """
    # The kernel keeps a blocked signal pending and delivers it when the mask is restored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Stop(BaseException):
    """Stopping signal. Not an Exception, so that no `except Exception` on the way handles it as an error."""


@contextlib.contextmanager
def stop_at_signals() -> Iterator[None]:
    """End the block at the first stopping signal with Interrupted.

    Further signals are ignored, so that the clean-up is not disturbed.
    """
    came = []
    stopping = stopping_signals()

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in stopping:
            # First of all, since a second signal may arrive before the exception is raised.
            signal.signal(each, signal.SIG_IGN)
        came.append(number)
        raise _Stop

    before = {number: signal.signal(number, stop) for number in stopping}
    try:
        yield
    except _Stop:
        raise Interrupted(
            "The dry run was stopped by a signal; its files are removed. Start it again for a result.", came[0]
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
