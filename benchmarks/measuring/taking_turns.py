"""Processes that take optimizer steps in turn; a process is stopped while another one runs.

Two consecutive runs of minutes each are not comparable on a machine whose speed varies. During turns of a few seconds,
the speed is nearly constant. This module does not import torch.
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
POLL_SECONDS = 0.005  # about a thousandth of a turn


@dataclass(frozen=True)
class Turn:
    """Wall time in seconds from the process's continuation to its last record, and the records that it logged.

    `complaint` is a message if the host took too much CPU time during the turn, otherwise empty.
    """

    seconds: float
    complaint: str
    logged: tuple[dict, ...]

    def records(self, kind: str) -> list[dict]:
        """Return the logged records of one kind."""
        return [record for record in self.logged if record["kind"] == kind]


class TurnTaker:
    """Python process, with its child processes, that runs only during its turns and appends records to `log`."""

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path) -> None:
        self._name, self._log, self._read = Path(arguments[0]).name, log, 0
        self._printed = folder / "printed.txt"
        folder.mkdir(parents=True)
        with self._printed.open("w", encoding="utf-8") as printed:
            both = {"stdout": printed, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True, **both)

    def advance(self, steps: int) -> Turn:
        """Let the process log `steps` more steps, then stop it; raise DataError if it ends early."""
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
        """Let the process run to its end and return its output; raise DataError if it fails."""
        self._signal(signal.SIGCONT)
        if self._process.wait():
            raise self._ended()
        return self._printed.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill the process and its children unless it has ended."""
        # SIGKILL also ends a stopped process.
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _ended(self) -> DataError:
        # The end of the output, which has the error message.
        words = self._printed.read_text(encoding="utf-8").strip()[-500:]
        return DataError(f"{self._name} ended with {self._process.returncode}: {words} Fix that and start again.")

    def _signal(self, number: signal.Signals) -> None:
        # The process leads its own group (start_new_session), which includes its data-loading workers.
        os.killpg(self._process.pid, number)

    def _news(self) -> list[dict]:
        """Return the records that were completely written since the last call."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            news = log.read()
        # The last line may be incomplete; it is read next time.
        news = news[: news.rfind(b"\n") + 1]
        self._read += len(news)
        return [json.loads(line) for line in news.splitlines()]


@contextmanager
def taking_turns(arguments: Sequence[str], folder: Path, log: Path) -> Iterator[TurnTaker]:
    """Start the process, and kill it on exit from the context."""
    process = TurnTaker(arguments, folder, log)
    try:
        yield process
    finally:
        process.kill()
