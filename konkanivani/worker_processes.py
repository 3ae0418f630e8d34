"""Forked worker processes, which end with the process that started them."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, cast

from konkanivani.errors import ResourceError, defer_signals, explained, stopping_signals

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


@dataclass(frozen=True)
class _Answer:
    result: Any
    error: Exception | None = None
    trace: str = ""


class WorkerTraceback(Exception):
    """Traceback of an error in a worker, as text; the cause of the error that is raised in this process."""


class WorkerPool:
    """Forked processes that run tasks, each with a connection of its own.

    The workers of concurrent.futures.ProcessPoolExecutor share queues with locks and a thread. It waits for ever if a
    worker is killed while it is idle or writes a large result, and after a KeyboardInterrupt in `submit` (Python 3.13).
    """

    def __init__(self) -> None:
        self._workers: dict[Connection, BaseProcess] = {}

    def start(self, count: int, prepare: Callable[[], None]) -> None:
        """Start processes that call `prepare` first."""
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_work, args=(theirs, prepare))
            # Closed here before the next fork: a copy in another worker would hide the end of this one.
            with theirs:
                process.start()
            self._workers[ours] = process

    def run(self, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results of the tasks in order; a task is a function and its arguments. All are pickled.

        Raises the error of a task, and a ResourceError if a worker was killed.
        """
        numbered = enumerate(tasks)
        idle = list(self._workers)
        busy: dict[Connection, int] = {}
        results: dict[int, Any] = {}
        yielded = 0
        while True:
            for number, task in islice(numbered, len(idle)):
                connection = idle.pop()
                with _reporting_death():
                    connection.send(task)
                busy[connection] = number
            if not busy:
                return
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                with _reporting_death():
                    answer: _Answer = connection.recv()
                if answer.error is not None:
                    raise answer.error from WorkerTraceback(answer.trace)
                results[busy.pop(connection)] = answer.result
                idle.append(connection)
            while yielded in results:
                yield results.pop(yielded)
                yielded += 1

    def close(self) -> None:
        """Kill the workers, which may be at work after an exception."""
        for process in self._workers.values():
            process.kill()
        for connection, process in self._workers.items():
            process.join()
            connection.close()


def _work(connection: Connection, prepare: Callable[[], None]) -> None:
    """Answer tasks until this process is killed."""
    prepare()
    while True:
        function, *arguments = connection.recv()
        try:
            answer = _Answer(function(*arguments))
        except Exception as error:
            answer = _Answer(None, error, traceback.format_exc())
        connection.send(answer)


@contextlib.contextmanager
def _reporting_death() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise ResourceError(
            "A worker process was killed, perhaps by the system for lack of memory. Close other programs, and run the "
            "same command again."
        ) from None


@contextlib.contextmanager
def worker_pool(workers: int, prepare: Callable[[], None] = begin_worker) -> Iterator[WorkerPool]:
    """Yield a pool of forked processes, which are killed at the end of the block.

    Each calls `prepare` first, with the stopping signals blocked. Raises a ResourceError if none can be started.
    """
    pool = WorkerPool()
    advice = "Close other programs, or raise the limit of processes (ulimit -u)."
    try:
        # Deferred, since a process that is being started could not be killed yet.
        with defer_signals(), explained(ResourceError, "A worker process could not be started", advice):
            pool.start(workers, prepare)
        yield pool
    finally:
        pool.close()
