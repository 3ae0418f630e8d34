"""Forked worker processes, which end with the process that started them."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from types import TracebackType

from konkanivani.errors import ResourceError, defer_signals, stopping_signals

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded once: between fork and exec, loading a library could wait for a lock that another thread held.
LIBC = ctypes.CDLL(None)


def request_parent_death_signal(number: signal.Signals) -> None:
    """Make the kernel send this signal to this process when its parent exits for any reason."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def begin_worker() -> None:
    """Make this process of `multiprocessing` ignore the stopping signals, and be killed when its parent exits.

    Ctrl-C and a closed terminal signal the whole process group; only the parent decides when its workers end.
    """
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_unless_disconnected
    # Killed even if the worker hangs in a read, or waits for work on a pipe that it holds open itself.
    request_parent_death_signal(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    if os.getppid() != parent.pid:  # the parent exited before the call of prctl
        os._exit(1)


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Print an uncaught exception, except a broken connection."""
    # PyTorch's thread that sends shared tensors raises one if the parent exits during a transfer: not an error.
    if not isinstance(error, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, at)


@contextlib.contextmanager
def worker_pool(
    workers: int, prepare: Callable[[], None] = begin_worker, *, is_killed_at_error: bool = False
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of forked processes, each of which calls `prepare` first. A killed worker raises a ResourceError.

    After another exception in the block, such as KeyboardInterrupt, the end of the block waits for the tasks that run.
    With `is_killed_at_error` it kills them, which requires results of less than 64 KiB.
    """
    # The first task starts the processes and the thread that manages them. A KeyboardInterrupt before the thread has
    # started would leave a pool that cannot be shut down, and a process that never exits.
    with defer_signals():
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), prepare)
        pool.submit(os.getpid)
        processes = set(multiprocessing.active_children()) - others
    with pool:
        try:
            yield pool
        except BrokenProcessPool:
            # The pool sends SIGTERM to the other workers, which `begin_worker` ignores, and waits for them.
            _kill(pool, processes)
            raise ResourceError(
                "A worker process was killed, perhaps by the system for lack of memory. Close other programs, and run "
                "the same command again."
            ) from None
        except BaseException:
            # A larger result could be cut in the pipe, of which the pool would wait for the rest.
            if is_killed_at_error:
                _kill(pool, processes)
            raise


def _kill(pool: ProcessPoolExecutor, processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    if sys.version_info < (3, 11, 5):
        # A task of more than 64 KiB blocks the thread that writes it to a pipe that is no longer read (CPython issue
        # 94777).
        for process in processes:
            process.join()
        pool._call_queue._reader.close()  # type: ignore[attr-defined]
