"""Toolkits to compare: their Python environment, a process for each, and a race in which they step in turn.

A B C A B C …: a process waits while another one runs. A machine that becomes slower thus slows all toolkits.

    PYTHON -m benchmarks.peers.processes '{"module": ..., "entry": ..., "terms": ...}'

is the process of one contestant. It prints one line of JSON when ready (version, parameters), after each line `step` on
stdin (seconds, loss), and after `peak` (peaks). Any other line is the name of another method of the contestant to time.
The module has a function `build(entry, terms)` that returns a contestant.
"""

import hashlib
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import sysconfig
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TextIO

import bootstrap
import torch

from benchmarks.measuring.common import Steal
from konkanivani.console import MIB
from konkanivani.errors import ResourceError
from konkanivani.models.architecture import product_rate
from konkanivani.ops.products import fast_linear

OURS = "konkanivani"
PACKAGES = ("speechbrain", "espnet")


def pythons_of(toolkits: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """Return each toolkit's Python; create the environment of the others under `folder` unless it exists."""
    others = [toolkit for toolkit in toolkits if toolkit != OURS]
    pythons = {OURS: Path(sys.executable)} if OURS in toolkits else {}
    return pythons | (dict.fromkeys(others, peer_python(folder, PACKAGES)) if others else {})


def peer_python(folder: Path, packages: tuple[str, ...]) -> Path:
    """Return the Python of an environment under `folder` with `packages`; create it unless it exists.

    Raises ResourceError if the installation fails.
    """
    # Other packages, or another base environment, have another folder.
    environment = folder / hashlib.sha1(repr((packages, sys.prefix)).encode()).hexdigest()[:12]
    # `done` is created last, so that an interrupted installation is repeated.
    python, done = environment / "bin" / "python", environment / "done"
    if done.exists():
        return python
    print(f"Installing {', '.join(packages)} into {environment}: a minute or two, once.", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(environment)])
    own = next(environment.glob("lib/python*/site-packages"))
    # The packages of the running environment are visible too: both use the same torch, without another download.
    (own / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    _run([str(python), "-m", "pip", "install", "--quiet", *packages])
    done.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ResourceError(
            f"The command {' '.join(command)} failed: {last}. The other toolkits come from PyPI: see that it can be "
            "reached, or leave them out of --contestants or --parts."
        )


def check_plot(picture: str | None) -> None:
    """Raise ResourceError before the measurement if a picture is wanted and matplotlib is not installed."""
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ResourceError("--plot needs matplotlib, which is not installed. Install it, or leave --plot out.")


@dataclass(frozen=True)
class Entry:
    """Toolkit, its number of micro-batches, and a setting that the toolkit defines.

    Only this trainer supports a limit of the peak, `limit_mib`, and `at_once` concurrent micro-batches.
    """

    toolkit: str
    setting: str
    micro_batches: int
    limit_mib: int | None = None
    at_once: int = 1

    @property
    def name(self) -> str:
        """Name in the tables."""
        limit = f"within {self.limit_mib} MiB" if self.limit_mib else ""
        side_by_side = f"{self.at_once} side by side" if self.at_once > 1 else ""
        return " ".join(filter(None, (self.toolkit, self.setting, side_by_side, limit)))


class Work(Protocol):
    """Workload of all entries of a race: a step on `utterances` utterances on a device."""

    utterances: int
    device: str


class Contestant(Protocol):
    """Model in training by one toolkit."""

    version: str
    parameters: int
    resident_before: float
    """Resident MiB of the process with the toolkit imported, before the model is built."""

    def step(self) -> float:
        """Run one optimizer step on the global batch; return its loss."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of one more step in bytes, with weights, gradients and optimizer state."""
        ...

    def resident_peak_mib(self) -> float:
        """Return the peak resident memory since `resident_before` (VmHWM), in MiB."""
        ...


SIDE = 1024  # rows and columns of the matrices


@dataclass(frozen=True)
class MachineRate:
    """FLOP/s of a (SIDE, SIDE) matrix product in fp32, by torch.mm and by the kernel of this project's layers."""

    plain: float
    layers: float


def take_rate(device: str) -> MachineRate:
    """Measure the current rate, with twenty products of each kind."""
    where = torch.device(device)
    return MachineRate(*(product_rate(multiply, where, torch.float32, SIDE) for multiply in (torch.mm, fast_linear)))


def mean_of(before: MachineRate, after: MachineRate) -> MachineRate:
    """Return the mean, an estimate for a step between the two measurements."""
    return MachineRate((before.plain + after.plain) / 2, (before.layers + after.layers) / 2)


ROOT = Path(__file__).resolve().parent.parent.parent
REST_SECONDS = 0.3  # after a step, a process's idle threads spin for a moment
CONTESTANTS = "benchmarks.peers.toolkits"
TRIES = 3  # of a step: a host takes cores away for a few seconds at a time


@dataclass(frozen=True)
class Result:
    """Measurements of one contestant: seconds of each round's step, memory in MiB, loss of the last step.

    `cpu_seconds` is the CPU time of all threads, which is more reliable on a shared machine. `rates` is the machine's
    speed around each step, from matrix products immediately before and after it. `aside` has the seconds of other
    methods that were timed in each round.
    """

    entry: Entry
    version: str
    parameters: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    rates: tuple[MachineRate, ...]
    peak_mib: float
    growth_mib: float
    loss: float
    aside: Mapping[str, tuple[float, ...]]

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)


class Runner:
    """Process of a contestant."""

    def __init__(self, python: Path, entry: Entry, terms: Work, module: str) -> None:
        asked = json.dumps({"module": module, "entry": asdict(entry), "terms": asdict(terms)})
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "training_scripts")])}
        if entry.toolkit == "konkanivani":
            # As for the training scripts, which set this before Python starts.
            bootstrap.set_process_defaults(environment)
            bootstrap.add_huge_pages(environment)
        self.entry, self.seconds, self.cpu_seconds, self.rates = entry, [], [], []
        self.aside = defaultdict(list)
        self.process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.processes", asked],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict:
        """Return the next answer; raise ResourceError with the last line of stderr if the process has died."""
        line = self.process.stdout.readline()
        if not line:
            words = self.process.stderr.read().strip().splitlines()
            reason = words[-1] if words else "it is gone, as where memory has run out"
            raise ResourceError(
                f"The contestant {self.entry.name} did not come to a step: {reason}. Leave it out with --contestants, "
                "or give fewer --utterances."
            )
        return json.loads(line)

    def ask(self, command: str) -> dict:
        """Send a command and return the answer."""
        print(command, file=self.process.stdin, flush=True)
        return self.hear()

    def step(self) -> dict:
        """Run a step and return the answer; repeat it if the host took cores away, at most TRIES times in all."""
        for left in reversed(range(TRIES)):
            steal = Steal()
            answer = self.ask("step")
            if not (complaint := steal.complaint()):
                break
            print(f"{self.entry.name}: {complaint}; {'again' if left else 'taken as it is'}", file=sys.stderr)
            time.sleep(REST_SECONDS)
        return answer


@contextmanager
def running(python: Path, entry: Entry, terms: Work, module: str) -> Iterator[Runner]:
    """Start the process of a contestant, and kill it on exit from the context."""
    runner = Runner(python, entry, terms, module)
    try:
        yield runner
    finally:
        runner.process.kill()
        runner.process.communicate()


def race(
    entries: tuple[Entry, ...],
    pythons: dict[str, Path],
    terms: Work,
    rounds: int,
    module: str = CONTESTANTS,
    aside: tuple[str, ...] = (),
) -> tuple[Result, ...]:
    """Return the results of all entries in their order; `pythons` has the Python of each toolkit.

    `module` builds the contestants; `aside` names other methods of a contestant to time after each step.
    """
    with ExitStack() as stack:
        runners, ready = [], []
        for entry in entries:  # sequentially, so that each warms up alone
            runners.append(stack.enter_context(running(pythons[entry.toolkit], entry, terms, module)))
            ready.append(runners[-1].hear())
            print(f"{entry.name}, {terms.utterances // entry.micro_batches} at once: ready", file=sys.stderr)
        before = take_rate(terms.device)
        for number in range(rounds):
            answers = []
            for runner in runners:
                time.sleep(REST_SECONDS)
                answers.append(runner.step())
                runner.seconds.append(answers[-1]["seconds"])
                runner.cpu_seconds.append(answers[-1]["cpu_seconds"])
                for command in aside:
                    runner.aside[command].append(runner.ask(command)["seconds"])
                time.sleep(REST_SECONDS)
                after = take_rate(terms.device)
                runner.rates.append(mean_of(before, after))
                before = after  # each measurement serves the steps before and after it
            times = " ".join(f"{answer['seconds']:.2f}" for answer in answers)
            print(f"round {number + 1} of {rounds}: {times} s", file=sys.stderr, flush=True)
        peaks = [runner.ask("peak") for runner in runners]
    return tuple(
        Result(
            entry=runner.entry,
            version=born["version"],
            parameters=born["parameters"],
            seconds=tuple(runner.seconds),
            cpu_seconds=tuple(runner.cpu_seconds),
            rates=tuple(runner.rates),
            peak_mib=peak["peak_mib"],
            growth_mib=peak["growth_mib"],
            loss=last["loss"],
            aside={command: tuple(seconds) for command, seconds in runner.aside.items()},
        )
        for runner, born, peak, last in zip(runners, ready, peaks, answers, strict=True)
    )


def serve(asked: dict, answers: TextIO) -> None:
    """Build the contestant, take a step to warm up, and answer each line of stdin with a line of JSON."""

    def answer(fields: dict[str, object]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    contestant = importlib.import_module(asked["module"]).build(asked["entry"], asked["terms"])
    is_cuda = asked["terms"]["device"] == "cuda"
    contestant.step()
    answer({"version": contestant.version, "parameters": contestant.parameters})
    for line in sys.stdin:
        command = line.strip()
        if command == "peak":
            # Read before `peak_bytes`, whose counter of live tensors allocates memory itself.
            growth = contestant.resident_peak_mib() - contestant.resident_before
            answer({"peak_mib": contestant.peak_bytes() / MIB, "growth_mib": growth})
            continue
        # CUDA kernels run asynchronously: without synchronisation, only their launch would be timed.
        if is_cuda:
            torch.cuda.synchronize()
        started, worked = time.perf_counter(), time.process_time()
        value = getattr(contestant, command)()
        if is_cuda:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
        answer({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": value})


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout carries only the answers; other output of a toolkit goes to stderr
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    serve(json.loads(sys.argv[1]), answers)
