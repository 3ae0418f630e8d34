"""The real training script in a fork of a process that has imported everything and done nothing.

Importing takes six seconds of each run and training a miniature corpus one. The parent has one thread, has made no
tensor, no generator and no run: what a fork begins with is what a new interpreter has when its imports are done. It
calls the script's own `main` with the command line and ends as an interpreter ends. A fault is put in place after the
fork, so that no other run has it. A few runs elsewhere are whole processes, so that it is seen that these are alike.

As a program, it reads one JSON line a request and answers with one.
"""

import importlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "training_scripts" / "train_konkanivani_asr.py"

Fault = tuple  # the name of a function of inject.py and its arguments: strings and numbers


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code (a signal's number below 0) and what it has said, both streams in one."""

    code: int
    output: str


class WarmTrainer:
    """Starts runs of the script; closing it ends those that still go on."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.warm_trainer"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running: set[int] = set()

    def start(self, flags: Sequence[str], output: Path, faults: Sequence[Fault] = ()) -> int:
        """The process id of a run that has begun; what it says goes to the file `output`."""
        output.parent.mkdir(parents=True, exist_ok=True)
        process = self._ask({"start": list(flags), "output": str(output), "faults": list(faults)}, PATIENCE)
        self._running.add(process)
        return process

    def wait(self, process: int, output: Path, seconds: float = PATIENCE) -> Ended:
        """How the run has ended; a TimeoutError, and the run killed, where it has not within so many seconds."""
        try:
            code = self._ask({"wait": process}, seconds)
        except TimeoutError:
            os.killpg(process, signal.SIGKILL)
            self._read(PATIENCE)
            raise TimeoutError(f"The run still goes on:\n{output.read_text(encoding='utf-8')}") from None
        finally:
            self._running.discard(process)
        return Ended(code, output.read_text(encoding="utf-8", errors="replace"))

    def run(self, flags: Sequence[str], output: Path, faults: Sequence[Fault] = (), seconds: float = PATIENCE) -> Ended:
        """A run to its end."""
        return self.wait(self.start(flags, output, faults), output, seconds)

    def close(self) -> None:
        """Ends it."""
        for process in self._running:
            os.killpg(process, signal.SIGKILL)
        self._server.stdin.close()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def __enter__(self) -> "WarmTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict, seconds: float) -> int:
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return self._read(seconds)

    def _read(self, seconds: float) -> int:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._server.stdout, selectors.EVENT_READ)
            if not waiting.select(seconds):
                raise TimeoutError
        return int(self._server.stdout.readline())


def load_script() -> object:
    """The training script as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def serve() -> int | None:
    """Answers requests until there are none; in a fork, the exit code of its run."""
    script = load_script()
    import torch

    for name in (
        "konkanivani.recipe.train",
        "torch.utils.tensorboard.summary",
        "tensorboard.summary.writer.record_writer",
    ):
        importlib.import_module(name)
    from konkanivani.base.command_line import run_script
    from tests.faults.inject import inject

    assert torch.get_num_threads() == 1 and len(os.listdir("/proc/self/task")) == 1, "a fork would lack a thread"
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        process = os.fork()
        if process:
            print(process, flush=True)
            continue
        os.setpgid(0, 0)
        _redirect(request["output"])
        for name, *values in request["faults"]:
            inject(name, values)
        return run_script(lambda: script.main(request["start"]))  # noqa: B023
    return None


def _redirect(output: str) -> None:
    """Sends what is said to a file, and leaves nothing to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(nothing)
    os.close(file)


if __name__ == "__main__":
    sys.exit(serve())
