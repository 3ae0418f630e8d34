"""Signals that ask a run to stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from konkanivani.base.command_line import end_script, run_script
from konkanivani.base.distributed import ALONE, Topology
from konkanivani.base.errors import Interrupted
from konkanivani.base.signals import defer_signals, stopping_signals

PATIENCE = 5.0  # seconds after a signal that a micro-batch has to come to its end; schedulers kill after 30 and more
STOPPING = b"\nStopping: saving at the end of this micro-batch, or in 5 s without it (a second signal stops at once).\n"
OVER = b"\nStopped after training, which is done and saved: --resume auto goes on with the scoring.\n"


def _raise(error: Interrupted) -> NoReturn:
    raise error


class Interruption:
    """Remembers the first signal that asks for a stop, for training to see; the second one ends the process at once.

    A second signal is still safe: checkpoints are published by rename, so none can be half written, and the audio
    workers end with the process. Once training is over there is nothing to save, and the first one ends it too. That a
    terminal closes, its kernel and its shell may both say: SIGHUP counts as a first one only.

    A micro-batch of a long recording may take minutes on a CPU, some of them within one call that lets no handler run.
    So a thread waits for signals too: PATIENCE seconds after the first one it ends the process in the main thread's
    place, where that is amid work that counts for nothing before its end (`interruptible`).

    A rank of several is silent and ignores further signals: torchrun passes one on that a rank may have had already,
    sends one when another rank ends, and kills after half a minute. The others would wait for one that broke off.
    """

    def __init__(self, topology: Topology = ALONE, discard_unfinished: Callable[[], None] = lambda: None) -> None:
        """`discard_unfinished` removes what a process that ends at once would leave half written."""
        self._is_rank = not topology.is_single_process
        self._discard_unfinished = discard_unfinished
        self.signal_number = 0
        self._is_over = False
        self._stop: Callable[[Interrupted], object] = _raise
        self._is_whole = threading.Lock()  # the main thread's, but where its work may be broken off
        self._is_whole.acquire()

    def install(self) -> None:
        """Takes over the signals that ask for a stop."""
        for number in stopping_signals():
            signal.signal(number, self._handle)
        if self._is_rank:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # tells of a signal whatever the main thread is doing
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # and of none to an audio worker
        with defer_signals():  # which the thread then never gets itself
            threading.Thread(target=self._end_in_time, args=(reader, stopping_signals()), daemon=True).start()

    @contextlib.contextmanager
    def interruptible(self, stop: Callable[[Interrupted], object] = _raise) -> Iterator[None]:
        """Work that counts for nothing before its end: a signal may end the process in the middle of it.

        `stop` is called first, in another thread; the main thread does not come out of the block then. What it raises
        is told, as a script's errors are.
        """
        self._stop = stop
        self._is_whole.release()
        try:
            yield
        finally:
            self._is_whole.acquire()

    def _end_in_time(self, reader: int, numbers: tuple[int, ...]) -> None:
        while (number := os.read(reader, 1)[0]) not in numbers:
            pass
        if not self._is_over:
            with contextlib.suppress(OSError):  # a terminal that has closed
                os.write(2, STOPPING)
        with defer_signals():
            threading.Thread(target=self._end_if_asked_again, args=(reader, number), daemon=True).start()
        time.sleep(PATIENCE)
        self._is_whole.acquire()  # a slow disk may take minutes for the checkpoint that is being written
        error = _interrupted(number)
        end_script(run_script(lambda: self._stop(error)))

    def _end_if_asked_again(self, reader: int, number: int) -> None:
        """End the process at a second signal, also while the main thread is in a call that lets no handler run."""
        while not _is_asked_again(os.read(reader, 1)[0]):
            pass
        self._end_at_once(number)

    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number != 0

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.signal_number:
            raise _interrupted(self.signal_number)

    def stop_unsaved(self, error: Interrupted) -> NoReturn:
        """Where there is nothing to save: raises the error, once nothing unfinished is left."""
        self._discard_unfinished()
        raise error

    def end_training(self) -> None:
        """From now on a signal ends the process at once. Raises Interrupted if one has come before."""
        self._is_over = True
        self.check()
        self._stop = _raise
        self._is_whole.release()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_again = self.signal_number != 0
        if self._is_over or (is_again and _is_asked_again(number) and not self._is_rank):
            self._end_at_once(number)
        self.signal_number = self.signal_number or number

    def _end_at_once(self, number: int) -> NoReturn:
        if not self._is_rank:
            if self._is_over:
                with contextlib.suppress(OSError):
                    os.write(2, OVER)
            self._discard_unfinished()
        os._exit(128 + number)


def _is_asked_again(number: int) -> bool:
    """Whether the number of a further signal asks for an end at once."""
    return number in (signal.SIGINT, signal.SIGTERM)


def _interrupted(number: int) -> Interrupted:
    return Interrupted("Stopped by a signal; resume from the newest checkpoint with --resume auto.", number)
