"""compare_models.py run in a fork, and its trainers in forks of that: each spares the seconds of a new interpreter."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.patience import PATIENCE
from tests.warm import Job, _live, warm_parent

SCRIPT = "training_scripts/compare_models.py"


class ForkedTrainer:
    """As subprocess.Popen where the comparison uses it."""

    def __init__(self, command: list[str], preexec_fn: Callable[[], None], **_: object) -> None:
        (output, told), (errors, warned) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            preexec_fn()
            streams = (Path(f"/proc/self/fd/{number}") for number in (told, warned))
            _live(Job(Path(command[1]), command[2:], *streams, Path.cwd()))
        os.close(told)
        os.close(warned)
        self.stdout, self.stderr = open(output, encoding="utf-8"), open(errors, encoding="utf-8")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _fork_trainers() -> None:
    from konkanivani.recipe.comparison import trainer

    trainer.subprocess.Popen = ForkedTrainer


def run_comparison(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "output"), Path(folder, "errors")
        fork = warm_parent().start(Job(ROOT / SCRIPT, arguments, *said, cwd, before=_fork_trainers))
        try:
            code = fork.wait(PATIENCE)
        finally:
            fork.kill()
        return subprocess.CompletedProcess((SCRIPT, *arguments), code, *(each.read_text("utf-8") for each in said))
