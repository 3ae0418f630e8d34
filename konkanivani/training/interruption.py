"""Signals that ask a run to stop."""

import contextlib
import os
import signal
from types import FrameType

from konkanivani.distributed import ALONE, Topology
from konkanivani.errors import Interrupted
from konkanivani.signals import stopping_signals


class Interruption:
    """Remembers the first signal that asks for a stop, for training to see; the second one ends the process at once.

    A second signal is still safe: checkpoints are published by rename, so none can be half written, and the audio
    workers end with the process. Once training is over there is nothing to save, and the first one ends it too. That a
    terminal closes, its kernel and its shell may both say: SIGHUP counts as a first one only.

    A rank of several says nothing and lets further signals be: torchrun passes one on that a rank may have had already,
    sends one when another rank ends, and kills after half a minute.
    """

    def __init__(self, topology: Topology = ALONE) -> None:
        self._is_rank = not topology.is_alone
        self.signal_number = 0
        self._is_over = False

    def install(self) -> None:
        """Takes over the signals that ask for a stop."""
        for number in stopping_signals():
            signal.signal(number, self._handle)

    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number != 0

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.signal_number:
            raise Interrupted(
                "Stopped by a signal; --resume auto goes on from the newest checkpoint.", self.signal_number
            )

    def end_training(self) -> None:
        """From now on a signal ends the process at once. Raises Interrupted if one has come before."""
        self._is_over = True
        self.check()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_again = self.signal_number != 0
        if self._is_over or (is_again and number != signal.SIGHUP and not self._is_rank):
            os._exit(128 + number)
        self.signal_number = self.signal_number or number
        if not (self._is_rank or is_again):
            with contextlib.suppress(OSError):  # a terminal that has closed
                os.write(2, b"\nStopping: saving at the next micro-batch boundary (a second signal stops at once).\n")
