"""Race of contestants that run one step each in turn, round after round: A B C A B C …

Each has its own process, which waits while another one runs. A machine that becomes slower thus slows all contestants.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import bootstrap

from benchmarks.measuring.peers.contest import Entry, Work
from benchmarks.measuring.peers.machine_rate import MachineRate, mean_of, take_rate
from benchmarks.measuring.steal import Steal
from konkanivani.base.errors import ResourceError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
REST_SECONDS = 0.3  # after a step, a process's idle threads spin for a moment
CONTESTANTS = "benchmarks.measuring.peers.contestants"
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
            [str(python), "-m", "benchmarks.measuring.peers.child", asked],
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
