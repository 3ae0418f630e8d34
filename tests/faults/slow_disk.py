"""A disk that takes seconds for each checkpoint, during which no signal handler can run."""

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from konkanivani.checkpoints import checkpoint


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def block_in_native_code(seconds: float) -> None:
    """Wait in native code, as in a write that the kernel cannot interrupt: no Python signal handler runs."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # all zeros: an unlocked mutex
    until = time.time() + seconds
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(_Time(int(until), int(until % 1 * 1e9))))


@dataclass
class SlowDisk:
    """Let fsync of a checkpoint take `seconds`, except in the first `fast` saves.

    The file `checkpoints/writing` has the number of slow writes up to now.
    """

    seconds: float
    fast: int = 1
    _saves: int = 0

    def install(self, checkpoints: Path) -> None:
        """Replace fsync in the module that writes checkpoints."""

        def fsync(descriptor: int) -> None:
            self._saves += 1
            if self._saves > self.fast:
                (checkpoints / "writing").write_text(str(self._saves - self.fast))
                block_in_native_code(self.seconds)
            os.fsync(descriptor)

        checkpoint.os = SimpleNamespace(**vars(os) | {"fsync": fsync})


def count_slow_writes(checkpoints: Path) -> int:
    """Return the number of slow writes up to now, the present one included."""
    try:
        return int((checkpoints / "writing").read_text() or 0)
    except OSError:
        return 0
