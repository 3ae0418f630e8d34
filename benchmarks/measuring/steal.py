"""What a virtual machine's host gave to other machines while something was measured (steal, proc(5)). No torch."""

import os
import time

MAX_STOLEN = 0.02  # of the cores' time; with more, the time of what was measured is the host's


class Steal:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _stolen_seconds()

    def complaint(self) -> str:
        """Why what was measured since says nothing; empty where it does."""
        share = (_stolen_seconds() - self._before) / (time.perf_counter() - self._began) / os.cpu_count()
        return f"{share:.0%} of the cores went to other machines" if share > MAX_STOLEN else ""


def _stolen_seconds() -> float:
    """Of all cores together since the machine was started."""
    with open("/proc/stat", encoding="ascii") as counts:
        return int(counts.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
