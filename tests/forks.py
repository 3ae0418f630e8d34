"""A script whose scripts run in forks of it: for what is not about how one interpreter starts another."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.patience import PATIENCE
from tests.warm import ROOT, Job, warm_parent


def start_forks() -> None:
    """From now on, this process starts no script in another interpreter."""
    subprocess.Popen = Forked


def run_in_forks(
    script: str, *words: str, cwd: Path = ROOT, before: Callable[[], None] = start_forks
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, with one thread: a second one doubles what a model as small as the tests' takes."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "output"), Path(folder, "errors")
        fork = warm_parent().start(Job(ROOT / script, words, *said, cwd, threads=1, before=before))
        try:
            code = fork.wait(PATIENCE)
        finally:
            fork.kill()
        return subprocess.CompletedProcess((script, *words), code, *(path.read_text("utf-8") for path in said))


class Forked:
    """A Python script begun in a fork of this process: as much of a Popen as our scripts use."""

    def __init__(self, command: list[str], stderr: int | None = None, **_: object) -> None:
        assert command[0] == sys.executable
        self.args = command
        pipes = [os.pipe(), *([os.pipe()] if stderr else [])]
        streams = [Path(f"/proc/self/fd/{end}") for end in (*(end for _, end in pipes), 2)[:2]]
        job = Job(Path(command[1]), command[2:], *streams, Path.cwd(), threads=1)
        self._process = multiprocessing.get_context("fork").Process(target=job.run)
        self._process.start()
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = [*(open(end, encoding="utf-8") for end, _ in pipes), None][:2]

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def communicate(self, *_: object, **__: object) -> tuple[str, None]:
        """What it says until its end, where that is all that is asked for."""
        return self.stdout.read(), None

    def wait(self) -> int:
        """Its exit code."""
        self._process.join()
        return self._process.exitcode

    poll = wait
