"""Training script in a subprocess, with its output and stop signals forwarded."""

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

KEPT_LINES = 50  # of each output stream
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LINE_OF_BAR = re.compile(r"\s*\d+%\|")  # a progress bar of tqdm


@dataclass(frozen=True)
class Ended:
    """Result of a training process: exit code and the last lines of stdout and stderr."""

    exit_code: int
    said: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Return the error message of a failed run."""
        if self.exit_code == 128 + signal.SIGKILL:
            return "Killed (SIGKILL), perhaps by the system for lack of memory."
        lines = [line for line in self.errors if line.strip() and not LINE_OF_BAR.match(line)]
        start = len(lines) - 1
        # Keep an indented list with the lines around it.
        while start > 0 and "  " in (lines[start][:2], lines[start - 1][:2]):
            start -= 1
        told = lines[max(0, start) :]
        # Of a traceback, only the exception itself.
        if told and told[0].startswith("Traceback"):
            told = told[-1:]
        return " ".join(line.strip() for line in told) or f"Exit code {self.exit_code}, without a message."


class Trainer:
    """Runner of the training script, one process at a time.

    A process has its own session, so that Ctrl-C reaches only this process, which forwards it once. The trainer then
    saves and exits; it also does if this process is killed.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[str] | None = None
        self._signal_number = 0
        self._libc = ctypes.CDLL(None)

    def install(self) -> None:
        """Install handlers that forward stop signals."""
        for number in stopping_signals():
            signal.signal(number, self._pass_on)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self._signal_number:
            raise Interrupted("Stopped by a signal; run the same command again to resume.", self._signal_number)

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run the trainer to its end and forward its output to stderr."""
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
        if self._signal_number:  # it arrived before the process existed
            process.send_signal(self._signal_number)
        kept = deque[str](maxlen=KEPT_LINES), deque[str](maxlen=KEPT_LINES)
        streams = zip((process.stdout, process.stderr), kept, strict=True)
        threads = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in streams]
        with defer_signals():  # threads inherit the blocked mask, so that signals reach the main thread only
            for thread in threads:
                thread.start()
        code = process.wait()
        for thread in threads:
            thread.join()
        said, errors = map(tuple, kept)
        # A negative code is the signal that ended the process; shells report 128 + signal.
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
