"""Runs of the real script with injected faults: forks, each with its own faults."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.conftest import TRAINER
from tests.faults.fault_injection import Fault, inject
from tests.fork_server import ROOT, Fork, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT


@dataclass(frozen=True)
class FinishedRun:
    """Finished run: exit code (negative for a signal) and output, both streams in one."""

    code: int
    output: str


def start_with_faults(flags: Sequence[str], output: Path, faults: Sequence[Fault] = ()) -> Fork:
    """Start a run with one thread, whose output goes to the file `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    return fork_server().start(Job(ROOT / TRAINER, flags, output, threads=1, before=partial(inject, faults)))


def wait_for_run(run: Fork | subprocess.Popen, output: Path, seconds: float = PROCESS_TIMEOUT) -> FinishedRun:
    """Wait for a run and return its end; kill it and raise TimeoutError after `seconds`."""
    try:
        code = run.wait(seconds)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
        raise TimeoutError(f"The run still goes on:\n{output.read_text(encoding='utf-8')}") from None
    return FinishedRun(code, output.read_text(encoding="utf-8", errors="replace"))


def run_with_faults(
    flags: Sequence[str], output: Path, faults: Sequence[Fault] = (), seconds: float = PROCESS_TIMEOUT
) -> FinishedRun:
    return wait_for_run(start_with_faults(flags, output, faults), output, seconds)
