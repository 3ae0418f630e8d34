"""Processes that take steps in turn, each standing still while another has the machine. No torch.

Of two runs one after another, minutes each, a machine that changes its speed in between makes anything; turns of
seconds find it much the same.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.steal import Steal
from konkanivani.base.errors import DataError

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_SECONDS = 0.005  # a thousandth of a turn of some seconds


@dataclass(frozen=True)
class Turn:
    """Seconds of wall time from its being let go to its last record, and what it logged.

    `complaint` says what the host took of the machine meanwhile, if that was too much.
    """

    seconds: float
    complaint: str
    logged: tuple[dict, ...]

    def records(self, kind: str) -> list[dict]:
        """What was logged of this kind."""
        return [record for record in self.logged if record["kind"] == kind]


class TurnTaker:
    """A Python process, with those it starts, that works in its turns only; it appends records to `log` as it goes."""

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path) -> None:
        self._name, self._log, self._read = Path(arguments[0]).name, log, 0
        self._printed = folder / "printed.txt"
        folder.mkdir(parents=True)
        with self._printed.open("w", encoding="utf-8") as printed:
            both = {"stdout": printed, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True, **both)

    def advance(self, steps: int) -> Turn:
        """Lets it work until it has logged so many steps more, then stops it. A DataError where it ends before."""
        logged, left = [], steps
        started, steal = time.perf_counter(), Steal()
        self._signal(signal.SIGCONT)
        while left > 0:
            if self._process.poll() is not None:
                raise self._ended()
            time.sleep(POLL_SECONDS)
            news = self._news()
            left -= sum(record["kind"] == "step" for record in news)
            logged += news
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return Turn(seconds, steal.complaint(), tuple(logged))

    def end(self) -> str:
        """Lets it work to its end; what it has printed. A DataError where it fails."""
        self._signal(signal.SIGCONT)
        if self._process.wait():
            raise self._ended()
        return self._printed.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Ends it, whatever it does, if it has not ended."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> DataError:
        words = self._printed.read_text(encoding="utf-8").strip()[-500:]
        return DataError(f"{self._name} ended with {self._process.returncode}: {words} Fix that and start again.")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _news(self) -> list[dict]:
        """The records that were logged whole since the last time."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            news = log.read()
        news = news[: news.rfind(b"\n") + 1]
        self._read += len(news)
        return [json.loads(line) for line in news.splitlines()]


@contextmanager
def taking_turns(arguments: Sequence[str], folder: Path, log: Path) -> Iterator[TurnTaker]:
    """The process, killed when all is done."""
    process = TurnTaker(arguments, folder, log)
    try:
        yield process
    finally:
        process.kill()
