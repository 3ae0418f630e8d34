"""Signals that ask a run to stop, and the lock that keeps a second run out of its folder."""

import contextlib
import errno
import fcntl
import os
import signal
from pathlib import Path
from types import FrameType
from typing import TextIO

from konkanivani.distributed import ALONE, Topology
from konkanivani.errors import Interrupted, ResourceError
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


class RunLock:
    """An exclusive lock on a checkpoint folder, held until the process ends."""

    def __init__(self, directory: str | Path) -> None:
        """Raises a ResourceError that names the process that trains there already, or why the folder can't be used."""
        self.path = Path(directory) / ".lock"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(self.path, "a+", encoding="utf-8")
        except OSError as error:
            raise _not_writable(directory, error) from None
        if _lock(self._file, directory):
            self._file.truncate(0)
            self._file.write(str(os.getpid()))
            self._file.flush()


def _not_writable(directory: str | Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"The checkpoint folder {directory} cannot be written: {error.strerror}. Give another --checkpoint_dir."
    )


def check_nobody_trains(directory: str | Path) -> None:
    """Raises the ResourceError that a RunLock would, and leaves the folder as it is."""
    try:
        with open(Path(directory) / ".lock", "r+", encoding="utf-8") as file:
            _lock(file, directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_writable(directory, error) from None


def _lock(file: TextIO, directory: str | Path) -> bool:
    """Locks the file until it is closed; False where its file system has no locks."""
    try:
        # Not flock: its locks pass to forked audio workers, which outlive a killed trainer by seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f"{directory} has no locks ({error.strerror}): see to it that no other run uses it.", flush=True)
            return False
        file.seek(0)
        holder = file.read().strip() or "unknown"
        raise ResourceError(
            f"Process {holder} is training in {directory} already. Stop it, or give another --checkpoint_dir."
        ) from None
