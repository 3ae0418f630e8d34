"""The signals that ask a process to stop."""

import contextlib
import signal
from collections.abc import Iterator


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, `kill`, and a terminal or connection that closes, unless the process was told (nohup) to outlive that."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if outlives else (signal.SIGHUP,))


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Keeps them back until the end of the block; a process that is forked within is born deaf to them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
