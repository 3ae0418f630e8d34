"""Errors with exit codes, and the signals that end a run.

Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 resources, 129 SIGHUP, 130 SIGINT, 143
SIGTERM.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# --------------------
# Exception classes, one per exit code; a message names the problem, its place and cause, and the remedy.


class KonkaniVaniError(Exception):
    """Base class of errors that the user can act on; scripts print the text and exit with `exit_code`."""

    exit_code = 1


class UsageError(KonkaniVaniError):
    """Unknown, mistyped, contradictory or inapplicable flag."""

    exit_code = 2


class DataError(KonkaniVaniError):
    """Unusable manifest, audio file, transcript or tokenizer."""

    exit_code = 3


class CheckpointError(KonkaniVaniError):
    """Missing or damaged checkpoint, or one with another shape than the run."""

    exit_code = 4


class NumericsError(KonkaniVaniError):
    """Training whose numbers are no longer finite."""

    exit_code = 5


class ResourceError(KonkaniVaniError):
    """Missing memory, disk space, device or permission."""

    exit_code = 6


class Interrupted(KonkaniVaniError):
    """Stop by a signal; the state was saved before this error is raised."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        # The shell's convention for a process that a signal ended.
        self.exit_code = 128 + signal_number


class ReportedByOtherRank(KonkaniVaniError):
    """End of this process for a reason that another rank reports; only the exit code is left."""

    def __init__(self, exit_code: int):
        super().__init__("")
        self.exit_code = exit_code


@contextlib.contextmanager
def explained(kind: type[KonkaniVaniError], failure: str, advice: str, *more_errors: type[Exception]) -> Iterator[None]:
    """Convert an OSError in the block, or one of the classes `more_errors`, to `kind`.

    The message is "FAILURE: reason (file). ADVICE"; the file is omitted if `failure` names it already.
    """
    caught: tuple[type[Exception], ...] = (OSError, *more_errors)
    try:
        yield
    except caught as error:
        # str(OSError) contains the errno and the file; strerror is the reason only.
        reason = getattr(error, "strerror", None) or error
        file = getattr(error, "filename", None)
        where = f" ({file})" if file and str(file).removesuffix(".partial") not in failure else ""
        # The cause is dropped: the message is complete, and scripts print no traceback.
        raise kind(f"{failure}: {reason}{where}. {advice}") from None


MAX_REPORTED = 20
# Errors of the input. NumericsError and Interrupted end a stage at once.
COLLECTED = (UsageError, DataError, CheckpointError, ResourceError)


class ErrorCollector:
    """Errors of one stage, collected so that the user can fix them all at once."""

    def __init__(self) -> None:
        self._errors: list[KonkaniVaniError] = []

    def add(self, error: KonkaniVaniError) -> None:
        """Add an error that is not raised yet."""
        self._errors.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Catch an error of the classes COLLECTED in the block, keep it, and continue after the block."""
        try:
            yield
        except COLLECTED as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the collected errors, if any: several as one error of the first one's class, one per line."""
        match self._errors:
            case []:
                return
            case [error]:
                raise error
        kind = next(kind for kind in COLLECTED if isinstance(self._errors[0], kind))
        lines = [str(error) for error in self._errors[:MAX_REPORTED]]
        omitted = len(self._errors) - len(lines)
        raise kind("\n".join(lines) + (f"\nand {omitted} more errors of this kind." if omitted else ""))


# --------------------
# Signals that stop the process: their list, and blocks that defer them or end at them.


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT (Ctrl-C), SIGTERM (`kill`) and SIGHUP (closed terminal or connection).

    SIGHUP is omitted if it is ignored, as nohup sets it.
    """
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if outlives else (signal.SIGHUP,))


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer the stopping signals until the end of the block.

    Processes and threads that are started inside the block inherit the mask, and these signals do not reach them. In
    another thread than the main one, a signal whose action is the default still ends the process.
    """
    deferred: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        deferred.append(number)

    numbers = stopping_signals()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {}
    try:
        # The mask of this thread is not enough: the kernel then delivers the signal to another thread, such as one of
        # OpenBLAS or OpenMP, and Python runs the handler in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        for number in numbers if is_main else ():
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: installed by a library, and cannot be restored
                handlers[number] = handler
                signal.signal(number, note)
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        # First the mask: blocked signals are noted too, so that no handler raises before all are restored.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # SIGINT last: its handler usually raises, and a signal may arrive at any time.
        for number, handler in reversed(handlers.items()):
            signal.signal(number, handler)
        _handle_deferred(deferred)


def _handle_deferred(numbers: list[int]) -> None:
    for number in numbers:
        handler = signal.getsignal(number)
        if callable(handler):
            # Not sent again: a second byte for `signal.set_wakeup_fd` would count as a second request.
            handler(number, None)
        else:
            signal.raise_signal(number)


@contextlib.contextmanager
def defer_interrupt() -> Iterator[None]:
    """Delay a KeyboardInterrupt until the end of the block; a second Ctrl-C raises it at once.

    For long blocks, in which `defer_signals` would leave no way to stop.
    """
    is_pending = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_pending
        is_pending = True
        signal.signal(signal.SIGINT, usual)

    usual = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted, and nohup's processes are not.
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if is_pending:
        raise KeyboardInterrupt


@contextlib.contextmanager
def exit_cleanly_at_signals() -> Iterator[None]:
    """Exit through the clean-up of the block at SIGTERM and SIGHUP, which else leave temporary files of gigabytes.

    Handlers that are already installed stay.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second signal, which the kernel and the shell may both send, must not interrupt the clean-up.
        for stop_signal in replaced:
            signal.signal(stop_signal, signal.SIG_IGN)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP] if is_main else []
    replaced = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


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
        for stop_signal in stopping:
            # First of all, since a second signal may arrive before the exception is raised.
            signal.signal(stop_signal, signal.SIG_IGN)
        came.append(number)
        raise _Stop

    before = {number: signal.getsignal(number) for number in stopping}
    try:
        for number in stopping:
            signal.signal(number, stop)
        yield
    except _Stop:
        raise Interrupted(
            "The dry run was stopped by a signal; its files are removed. Start it again for a result.", came[0]
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
