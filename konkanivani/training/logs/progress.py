"""The bar that a person watches: steps, loss, speed in audio seconds per second, memory and time left."""

import sys
import time
from collections.abc import Iterator
from typing import TypeVar

from tqdm import tqdm

from konkanivani.training.step import StepReport

Item = TypeVar("Item")


class Progress:
    """One tqdm bar over the optimizer steps of a run, and the speed over all that this process has trained."""

    def __init__(self, step: int, total_steps: int) -> None:
        # A log file gets a line a minute instead of a bar that redraws itself.
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 60.0,
        )
        self._audio_seconds = self._seconds = self._waited = 0.0
        self.last_wait = 0.0
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds of wall time since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def wait_for_next(self, global_batches: Iterator[Item]) -> Item:
        """The next window, the seconds until it is there counted as waiting for data."""
        started = time.perf_counter()
        item = next(global_batches)
        self.last_wait = time.perf_counter() - started
        return item

    def show(self, report: StepReport, audio_seconds: float, seconds: float, peak_mib: float) -> None:
        """Moves the bar on by one window of `audio_seconds` that took `seconds`."""
        self._audio_seconds += audio_seconds
        self._seconds += seconds
        self._waited += self.last_wait
        postfix = f"loss {report.loss:.3f}, {audio_seconds / seconds:.0f} audio s/s, {peak_mib:.0f} MiB"
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update(0 if report.is_skipped else 1)

    def tell(self, line: str) -> None:
        """Writes a line so that the bar stays whole."""
        self._bar.write(line)

    def audio_seconds_per_second(self) -> float:
        """Over all windows shown so far; 0 before the first."""
        return self._audio_seconds / self._seconds if self._seconds else 0.0

    def waiting_share(self) -> float:
        """The share of that time in which no data was there to train on; 0 before the first window."""
        return self._waited / self._seconds if self._seconds else 0.0

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()
