"""The trainer in a process of its own: what it says is passed on, and so are the signals that ask for a stop."""

import ctypes
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from konkanivani.base.errors import Interrupted
from konkanivani.base.signals import defer_signals, stopping_signals

KEPT_LINES = 50  # of its last words
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LINE_OF_BAR = re.compile(r"\s*\d+%\|")  # of tqdm


@dataclass(frozen=True)
class Ended:
    """How a run of the trainer ended: its exit code, and the last lines of its stdout and its stderr."""

    exit_code: int
    said: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Why it failed, in its own words."""
        if self.exit_code == 128 + signal.SIGKILL:
            return "Killed (SIGKILL), perhaps by the system for lack of memory."
        lines = [line for line in self.errors if line.strip() and not LINE_OF_BAR.match(line)]
        start = len(lines) - 1
        while start > 0 and "  " in (lines[start][:2], lines[start - 1][:2]):  # a list, and what stands around it
            start -= 1
        told = lines[max(0, start) :]
        if told and told[0].startswith("Traceback"):
            told = told[-1:]
        return " ".join(line.strip() for line in told) or f"Exit code {self.exit_code}, without a message."


class Trainer:
    """Runs the training script, one process at a time.

    A process has a session of its own: a Ctrl-C reaches this process alone, which passes it on once. The trainer then
    saves and ends; so it does where this process is killed.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None
        self._signal_number = 0
        self._libc = ctypes.CDLL(None)

    def install(self) -> None:
        """Takes over the signals that ask for a stop."""
        for number in stopping_signals():
            signal.signal(number, self._pass_on)

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self._signal_number:
            raise Interrupted("Stopped by a signal; run the same command again to resume.", self._signal_number)

    def run(self, arguments: Sequence[str]) -> Ended:
        """Runs it to its end, what it says passed on to stderr."""
        self._process = process = subprocess.Popen(
            [sys.executable, str(self._script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=self._end_with_parent,
        )
        if self._signal_number:  # it came before there was a process to pass it on to
            process.send_signal(self._signal_number)
        kept = deque[str](maxlen=KEPT_LINES), deque[str](maxlen=KEPT_LINES)
        streams = zip((process.stdout, process.stderr), kept, strict=True)
        threads = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in streams]
        with defer_signals():  # which the threads then never get themselves
            for thread in threads:
                thread.start()
        code = process.wait()
        for thread in threads:
            thread.join()
        said, errors = map(tuple, kept)
        return Ended(code if code >= 0 else 128 - code, said, errors)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal_number = self._signal_number or number
        if self._process is not None:
            self._process.send_signal(number)

    def _end_with_parent(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy(stream: TextIO, kept: deque[str]) -> None:
    for line in stream:
        kept.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)
