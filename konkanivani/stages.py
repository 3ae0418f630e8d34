"""The stages of a start (flags, paths, disk, data, plan, rehearsal), told one line each."""

import time
from collections.abc import Callable

from konkanivani.command_line import say

Tell = Callable[[str, str], None]
"""Takes a stage that is done and what it found."""


def say_nothing(_stage: str, _sentence: str) -> None:
    """What a run that is not dry makes of its stages."""


class StageClock:
    """Prints each stage with the seconds since the one before."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()

    def done(self, stage: str, sentence: str) -> None:
        """Tells a stage that has just ended."""
        now = time.perf_counter()
        say(f"{stage + ':':<11} {sentence} ({now - self._last:.1f} s)")
        self._last = now

    def seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started
