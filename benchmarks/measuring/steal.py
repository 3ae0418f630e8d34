"""CPU time that the host of a virtual machine gave to other machines during a measurement (steal, proc(5)).

This module does not import torch.
"""

import os
import time

MAX_STOLEN = 0.02  # largest acceptable share of the cores' time; above it, a timing depends on the host


class Steal:
    """Counter of the stolen CPU time since its creation."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _stolen_seconds()

    def complaint(self) -> str:
        """Return the reason why the measurement since then is unreliable, or an empty string."""
        share = (_stolen_seconds() - self._before) / (time.perf_counter() - self._began) / os.cpu_count()
        return f"{share:.0%} of the cores went to other machines" if share > MAX_STOLEN else ""


def _stolen_seconds() -> float:
    """Return the stolen seconds of all cores since the start of the machine."""
    with open("/proc/stat", encoding="ascii") as counts:
        # First line: "cpu" and the sums over all cores in clock ticks; steal is the eighth of them.
        return int(counts.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
