"""Processes that take steps in turn, each standing still while another has the machine. No torch.

Of two runs one after another, minutes each, a machine that changes its speed in between makes anything; turns of
seconds find it much the same.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.measuring.steal import Steal
from konkanivani.errors import DataError

POLL_SECONDS = 0.005  # a thousandth of a turn of some seconds


@dataclass(frozen=True)
class Turn:
    """Seconds of wall time from its being let go to its last line, and the lines that it logged.

    `stolen` is the share of all cores' time that the host gave to other machines.
    """

    seconds: float
    stolen: float
    lines: tuple[str, ...]

    def records(self, kind: str) -> list[dict]:
        """What was logged of this kind."""
        found = (json.loads(line) for line in self.lines)
        return [record for record in found if record["kind"] == kind]


class Contestant:
    """A Python process, with those it starts, that works in its turns only; it appends lines to `log` as it goes."""

    def __init__(self, arguments: Sequence[str], python: str, folder: Path, log: Path) -> None:
        self.name, self.log = Path(arguments[0]).name, log
        self._printed, self._read = folder / "printed.txt", 0
        folder.mkdir(parents=True)
        with self._printed.open("w", encoding="utf-8") as printed:
            both = {"stdout": printed, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([python, *arguments], start_new_session=True, **both)

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def advance(self, steps: int) -> Turn:
        """Lets it work until it has logged so many steps more, then stops it. A DataError where it ends before."""
        lines: list[str] = []
        started, steal = time.perf_counter(), Steal()
        self._signal(signal.SIGCONT)
        while sum('"kind": "step"' in line for line in lines) < steps:
            if self._process.poll() is not None:
                raise DataError(f"{self.name} has ended too early: {self.printed()[-500:]} Mend that and start again.")
            time.sleep(POLL_SECONDS)
            lines += self._news()
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return Turn(seconds, steal.share(), tuple(lines))

    def end(self) -> str:
        """Lets it work to its end; what it has printed. A DataError where it fails."""
        self._signal(signal.SIGCONT)
        if code := self._process.wait():
            raise DataError(f"{self.name} ended with {code}: {self.printed()[-500:]} Mend that and start again.")
        return self.printed()

    def printed(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text(encoding="utf-8")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _news(self) -> list[str]:
        """The whole lines that the log has since the last time."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self._read)
            news = log.read()
        news = news[: news.rfind(b"\n") + 1]
        self._read += len(news)
        return news.decode("utf-8").splitlines()
