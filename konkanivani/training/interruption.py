"""Signals that stop a run."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from konkanivani.command_line import end_script, run_script
from konkanivani.distributed import ALONE, Topology
from konkanivani.errors import Interrupted, defer_signals, stopping_signals

PATIENCE = 5.0  # seconds that a micro-batch may take after a signal; schedulers kill after 30 or more
STOPPING = b"\nStopping: saving at the end of this micro-batch, or in 5 s without it (a second signal stops at once).\n"
OVER = b"\nStopped after training, which is done and saved: --resume auto continues with the scoring.\n"


def _raise(error: Interrupted) -> NoReturn:
    raise error


class Interruption:
    """Handler of stop signals: the first one requests a stop, the second one ends the process at once.

    Immediate exit is safe: checkpoints are published by rename, so none can be incomplete, and the audio workers end
    with the process. After training nothing is left to save, so the first signal ends the process as well. SIGHUP only
    counts as a first signal, because both the kernel and the shell may send it when a terminal closes.

    On a CPU a micro-batch of a long recording may take minutes, partly within one call during which Python runs no
    signal handler. Therefore a thread also waits for signals: PATIENCE seconds after the first one it ends the process,
    provided that the main thread is inside of `interruptible`.

    In a multi-rank run, a rank prints nothing and ignores further signals: torchrun forwards a signal that the rank may
    have received already, sends one if another rank ends, and kills after half a minute. If one rank stopped early, the
    others would wait for it.
    """

    def __init__(self, topology: Topology = ALONE, discard_unfinished: Callable[[], None] = lambda: None) -> None:
        """`discard_unfinished` removes incomplete files before an immediate exit."""
        self._is_rank = not topology.is_single_process
        self._discard_unfinished = discard_unfinished
        self.signal_number = 0
        self._is_over = False
        self._stop: Callable[[Interrupted], object] = _raise
        self._uninterruptible = threading.Lock()  # held by the main thread except inside of `interruptible`
        self._uninterruptible.acquire()

    def install(self) -> None:
        """Install the handlers of all stop signals."""
        for number in stopping_signals():
            signal.signal(number, self._handle)
        if self._is_rank:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The C-level handler writes to this pipe even if the main thread is inside of a long C++ call.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a worker must not write to the pipe
        with defer_signals():  # a new thread inherits the mask, so it never receives these signals
            threading.Thread(target=self._end_in_time, args=(reader, stopping_signals()), daemon=True).start()

    @contextlib.contextmanager
    def interruptible(self, stop: Callable[[Interrupted], object] = _raise) -> Iterator[None]:
        """Mark work that has no effect before its end, so that a signal may end the process during it.

        After PATIENCE, `stop` is called in another thread while the main thread stays blocked at the end of the block.
        Errors of `stop` are reported like errors of a script.
        """
        self._stop = stop
        self._uninterruptible.release()
        try:
            yield
        finally:
            self._uninterruptible.acquire()

    def _end_in_time(self, reader: int, numbers: tuple[int, ...]) -> None:
        while (number := os.read(reader, 1)[0]) not in numbers:
            pass
        if not self._is_over:
            with contextlib.suppress(OSError):  # the terminal may be closed
                # Not print: the main thread may hold the lock of stderr.
                os.write(2, STOPPING)
        with defer_signals():
            threading.Thread(target=self._end_at_second_signal, args=(reader, number), daemon=True).start()
        time.sleep(PATIENCE)
        self._uninterruptible.acquire()  # may wait for minutes if a checkpoint is being written to a slow disk
        error = _interrupted(number)

        def stop() -> str:
            self._stop(error)
            return ""

        end_script(run_script(stop))

    def _end_at_second_signal(self, reader: int, number: int) -> None:
        """End the process at a second signal, also while the main thread is in a call that runs no signal handler."""
        while not _is_second_request(os.read(reader, 1)[0]):
            pass
        self._end_at_once(number)

    def is_requested(self) -> bool:
        """Return whether a signal was received."""
        return self.signal_number != 0

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self.signal_number:
            raise _interrupted(self.signal_number)

    def stop_unsaved(self, error: Interrupted) -> NoReturn:
        """Raise the error after removing incomplete files; for work that has nothing to save."""
        self._discard_unfinished()
        raise error

    def end_training(self) -> None:
        """Let further signals end the process at once; raise Interrupted if one was received before."""
        self._is_over = True
        self.check()
        self._stop = _raise
        self._uninterruptible.release()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_again = self.signal_number != 0
        if self._is_over or (is_again and _is_second_request(number) and not self._is_rank):
            self._end_at_once(number)
        self.signal_number = self.signal_number or number

    def _end_at_once(self, number: int) -> NoReturn:
        if not self._is_rank:
            if self._is_over:
                with contextlib.suppress(OSError):
                    os.write(2, OVER)
            self._discard_unfinished()
        # No cleanup handlers: they could wait for threads or for CUDA.
        os._exit(128 + number)


def _is_second_request(number: int) -> bool:
    """Return whether this further signal requests an immediate exit."""
    return number in (signal.SIGINT, signal.SIGTERM)


def _interrupted(number: int) -> Interrupted:
    return Interrupted("Stopped by a signal; resume from the newest checkpoint with --resume auto.", number)
