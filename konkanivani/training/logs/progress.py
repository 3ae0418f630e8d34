"""Progress bar: steps, loss, speed in audio seconds per second, memory and time left."""

import sys
import time
from collections.abc import Iterator
from typing import TypeVar

from tqdm import tqdm

from konkanivani.training.step import StepReport

Item = TypeVar("Item")


class Progress:
    """tqdm bar over the optimizer steps of a run, with the mean speed of this process."""

    def __init__(self, step: int, total_steps: int) -> None:
        # If stderr is a file, write one line per minute instead of redrawing the bar.
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
        """Return the wall time since the last lap, in seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds

    def wait_for_next(self, global_batches: Iterator[Item]) -> Item:
        """Return the next global batch and count the time until it is available as waiting."""
        started = time.perf_counter()
        item = next(global_batches)
        self.last_wait = time.perf_counter() - started
        return item

    def show(self, report: StepReport, audio_seconds: float, seconds: float, peak_mib: float) -> None:
        """Advance the bar by one global batch of `audio_seconds` that took `seconds`."""
        self._audio_seconds += audio_seconds
        self._seconds += seconds
        self._waited += self.last_wait
        postfix = f"loss {report.loss:.3f}, {audio_seconds / seconds:.0f} audio s/s, {peak_mib:.0f} MiB"
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update(0 if report.is_skipped else 1)

    def tell(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line)

    def audio_seconds_per_second(self) -> float:
        """Return the mean speed over all global batches shown so far; 0 before the first."""
        return self._audio_seconds / self._seconds if self._seconds else 0.0

    def waiting_share(self) -> float:
        """Return the fraction of that time spent waiting for data; 0 before the first global batch."""
        return self._waited / self._seconds if self._seconds else 0.0

    def close(self) -> None:
        """Close the bar, leaving its last state visible."""
        self._bar.close()
