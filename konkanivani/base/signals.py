"""The signals that ask a process to stop: which they are, kept back for a while, or ending a block at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from konkanivani.base.errors import Interrupted


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, `kill`, and a terminal or connection that closes, unless the process was told (nohup) to outlive that."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if outlives else (signal.SIGHUP,))


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Keeps them back until the end of the block; a process that is forked within is born deaf to them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Stop(BaseException):
    """A signal; no Exception, so that nothing on its way takes it for a fault of its own and goes on."""


@contextlib.contextmanager
def stop_at_signals() -> Iterator[None]:
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
            "The dry run was stopped by a signal; its files are removed. Start it again for a result.", came[0]
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
