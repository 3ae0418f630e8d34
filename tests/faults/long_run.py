"""A training run in several processes: each runs the real script, resumes the run, and is ended by a test.

Most processes are forks (tests/fork_server.py), which saves four seconds each.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST, Checkpointer
from konkanivani.errors import CheckpointError
from tests.conftest import ROOT, run_folders, start_cold
from tests.fork_server import Fork, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT

SCRIPT = ROOT / "training_scripts" / "train_konkanivani_asr.py"
THREADS = 1
LOG_TAIL = 1 << 16  # bytes at the end of a log that are searched for its last step


class InjectedFault(Protocol):
    """Fault that is injected into a process."""

    def install(self, checkpoints: Path) -> None:
        """Inject the fault in the training process, before the script runs."""


@dataclass(frozen=True)
class EndState:
    """State after a process ended.

    Holds the last logged step, the step of the newest valid checkpoint (0: none), the names of invalid checkpoint
    files, and whether a checkpoint was being written.
    """

    logged: int
    saved: int
    invalid_files: tuple[str, ...]
    was_saving: bool

    @property
    def steps_lost(self) -> int:
        return self.logged - self.saved


@dataclass(frozen=True)
class TrainingProcess:
    """Training process that leads its own process group."""

    process: Fork | subprocess.Popen

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float = PROCESS_TIMEOUT) -> int | None:
        """Return the exit code (negative for a signal), or kill the process and return None after `seconds` seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def wait_until(self, is_reached: Callable[[], bool], what: str) -> None:
        """Wait for a condition; raise AssertionError if the process ends first or the condition takes too long."""
        deadline = time.monotonic() + PROCESS_TIMEOUT
        while not is_reached():
            assert self.is_alive(), f"it ended by itself, and {what} never came"
            assert time.monotonic() < deadline, f"{what} never came"
            time.sleep(0.01)


@dataclass(frozen=True)
class LongRun:
    """Training run in its own folder."""

    directory: Path
    flags: tuple[str, ...]

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def arguments(self, *more: str) -> list[str]:
        """Return the command line that starts or resumes the run."""
        return [*self.flags, *run_folders(self.directory), "--resume", "auto", *more]

    def start(self, *more: str, fault: InjectedFault | None = None) -> TrainingProcess:
        """Start a fork of the process that has imported torch, with a fault if given."""
        self.directory.mkdir(parents=True, exist_ok=True)
        before = partial(fault.install, self.checkpoints) if fault else None
        job = Job(SCRIPT, self.arguments(*more), self.output, threads=THREADS, before=before)
        return TrainingProcess(fork_server().start(job))

    def start_script(self, script: Path, *more: str) -> TrainingProcess:
        """Start a process in a new interpreter, like a user.

        The shell script finds a python3 that prints the interpreter of this environment, so that it installs nothing.
        """
        python = self.directory / "bin" / "python3"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "{sys.executable}"\n', encoding="utf-8")
        python.chmod(0o755)
        interpreter = [sys.executable] if script.suffix == ".py" else []
        command = [*interpreter, str(script), *self.arguments(*more)]
        return TrainingProcess(start_cold(command, self.output, THREADS, PATH=f"{python.parent}:{os.environ['PATH']}"))

    @property
    def output(self) -> Path:
        """Return the file with the output of all processes."""
        return self.directory / "output.txt"

    def tracebacks(self) -> list[str]:
        """Return a sentence on the first printed traceback, if any."""
        _, traceback, rest = self.output.read_text(encoding="utf-8").partition("Traceback")
        return [f"a traceback was printed: {traceback}{rest[:3000]}"] if traceback else []

    def logged_step(self) -> int:
        """Return the last step in the log, or 0."""
        log = self.directory / "runs" / "default" / "log.jsonl"
        if not log.exists():
            return 0
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
            matches = re.findall(rb'"kind": "step", "step": (\d+),.*\n', file.read())
        return int(matches[-1]) if matches else 0

    def end_state(self) -> EndState:
        """Return the current state. Read the files that a resumed run reads; change nothing if all are valid."""
        invalid_files, sound = [], set()  # of several names of one file, the first is read
        for path in sorted(self.checkpoints.glob("checkpoint_*")):
            if path.name.endswith(".partial") or path.stat().st_ino in sound:
                continue
            try:
                read_checkpoint(path)
                sound.add(path.stat().st_ino)
            except CheckpointError:
                invalid_files.append(path.name)
        result = Checkpointer(self.checkpoints, keep=2).read_newest_sound()
        partial = self.checkpoints / (LAST + ".partial")
        return EndState(self.logged_step(), result[1].step if result else 0, tuple(invalid_files), partial.exists())


def processes_in_group(group: int) -> list[int]:
    """Return the living processes of a group, without zombies."""
    results = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            results.append(int(path.parent.name))
    return results


def is_dying(pid: int) -> bool:
    """Return whether the process is gone, or has a pending SIGKILL and ends when it is scheduled next."""
    try:
        pending = re.findall(r"^S(?:ig|hd)Pnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(int(signals, 16) & (1 << (signal.SIGKILL - 1)) for signals in pending)
