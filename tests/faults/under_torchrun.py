"""Ranks of the real script: forks with a rank's environment, or under torchrun, with kills and restarts.

Run as a script, it is the agent of torchrun, which forks its ranks to save their imports.
"""

import ctypes
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.front_end import FrontEnd
from tests.conftest import ROOT, TINY_MODEL, TRAINER, Corpus, read_log, run_folders, start_cold
from tests.faults.resumed_runs import run_differences
from tests.fork_server import Fork, Job, fork_server
from tests.invariants.ranks import environments_of
from tests.timeouts import PROCESS_TIMEOUT

STEPS = 60
SAVE_STEPS = 2
PR_SET_NAME = 15  # linux/prctl.h
Agent = Fork | subprocess.Popen


def run_ranks(
    output: Path, world_size: int, *arguments: str, restarts: int = 0, before: Callable[[], None] | None = None
) -> str:
    """Train with one fork per rank, one thread each, restart them as torchrun would, and return their output.

    The last attempt must succeed.
    """
    for restart in range(restarts + 1):
        variables = {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
        jobs = [
            Job(ROOT / TRAINER, arguments, output, environment=environment | variables, threads=1, before=before)
            for environment in environments_of(world_size)
        ]
        ranks = [fork_server().start(job) for job in jobs]
        codes = [rank.wait(PROCESS_TIMEOUT) for rank in ranks]
        if not any(codes):
            break
    message = output.read_text(encoding="utf-8")
    assert codes == [0] * world_size, message
    return message


def limit_memory_of_rank_1() -> None:
    """Limit rank 1 to 2.5 s of audio in memory, enough for any one utterance; other ranks are unlimited."""
    computed = FrontEnd.forward

    def forward(front_end, waveforms, sample_lengths, augment_seeds):
        if waveforms.numel() > 2.5 * SAMPLE_RATE and augment_seeds is not None:
            raise MemoryError("the test's memory is full")
        return computed(front_end, waveforms, sample_lengths, augment_seeds)

    if os.environ["RANK"] == "1":
        FrontEnd.forward = forward


def kill_all(agent: Agent) -> None:
    """Kill torchrun and its ranks, if any are alive."""
    ranks = rank_pids(agent)
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)


def rank_pids(agent: Agent) -> dict[int, int]:
    """Return the process ids of torchrun's living ranks, by local rank."""
    values = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names = (folder / "environ").read_bytes().split(b"\0") if parent == agent.pid else []
            names += [(folder / "comm").read_bytes()] if parent == agent.pid else []
        except (OSError, IndexError):  # it just ended
            continue
        values |= {int(name.partition(b"=")[2]): int(folder.name) for name in names if name.startswith(b"LOCAL_RANK=")}
    return values


@dataclass(frozen=True)
class RankRun:
    """Run of two ranks that saves every second step; `sharded`: the weights are sharded over the ranks.

    `is_cold`: started by the command line of torchrun.
    """

    corpus: Corpus
    directory: Path
    sharded: bool = False
    steps: int = STEPS
    is_cold: bool = True

    def flags(self) -> tuple[str, ...]:
        batch = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--epochs", "1000")
        steady = ("--schedule", "inverse_sqrt", "--warmup_steps", "2", "--max_steps", str(self.steps))
        saves = ("--save_steps", str(SAVE_STEPS), "--num_workers", "1", "--resume", "auto")
        shard = ("--shard", "always" if self.sharded else "never")
        model = (*TINY_MODEL, "--encoder_layers", "1")
        return (*model, *self.corpus.flags(), *run_folders(self.directory), *batch, *steady, *saves, *shard)

    def last_logged_step(self) -> int:
        try:
            return read_log(self.directory)[-1]["step"]
        except (OSError, IndexError):
            return 0

    def start(self, restarts: int) -> Agent:
        output = self.directory / "output.txt"
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.is_cold:
            return fork_server().start(Job(Path(__file__), (str(restarts), *self.flags()), output, threads=1))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        script = ["--max-restarts", str(restarts), str(ROOT / TRAINER), *self.flags()]
        return start_cold([*torchrun, *script], output, threads=1)


def train_undisturbed(run: RankRun) -> RankRun:
    run.directory.mkdir(parents=True)
    run_ranks(run.directory / "output.txt", 2, *run.flags())
    return run


def kill_ranks(run: RankRun, kills: int, draw: random.Random) -> list[str]:
    """Kill `kills` ranks of the run one after the other at random instants; return the place of each kill in words."""
    process, where = run.start(restarts=kills), []
    try:
        for number in range(kills):
            before = run.last_logged_step()
            until = time.monotonic() + PROCESS_TIMEOUT
            while len(ranks := rank_pids(process)) < 2 and process.poll() is None:
                assert time.monotonic() < until, "the ranks were not started again"
                time.sleep(0.02)
            starting = draw.random() < 0.25
            if starting:
                time.sleep(4.0 * draw.random())
            else:
                _wait_for_step(run, process, before if number else 0)
                time.sleep(0.3 * draw.random())
            if process.poll() is not None:
                break
            rank = draw.choice(sorted(ranks))
            os.kill(ranks[rank], signal.SIGKILL)
            where.append(f"rank {rank} {'while starting' if starting else 'while training'}")
            _wait_for_exit(set(ranks.values()), process)
        code = process.wait(PROCESS_TIMEOUT)
        assert code == 0, (run.directory / "output.txt").read_text()[-3000:]
    finally:
        kill_all(process)
    return where


def _wait_for_step(run: RankRun, process: Agent, before: int) -> None:
    until, seen = time.monotonic() + PROCESS_TIMEOUT, set()
    while process.poll() is None and not (seen and run.last_logged_step() not in seen | {before}):
        assert time.monotonic() < until, "no step was made"
        seen.add(run.last_logged_step())
        time.sleep(0.02)


def _wait_for_exit(pids: set[int], process: Agent) -> None:
    until = time.monotonic() + PROCESS_TIMEOUT
    while process.poll() is None and pids & set(rank_pids(process).values()):
        assert time.monotonic() < until, "the other rank did not end"
        time.sleep(0.05)


def rank_run_differences(run: RankRun, undisturbed: RankRun) -> list[str]:
    """Return every difference between weights, optimizers, counters and logged losses, as sentences."""
    result = run_differences(undisturbed.directory, run.directory)
    if [record["step"] for record in read_log(run.directory)] != list(range(1, run.steps + 1)):
        result.append("the log does not hold each step once")
    return result


def train_as_rank(arguments: list[str]) -> None:
    """Run the script in a fork of the agent, and name the process after its rank."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"LOCAL_RANK={os.environ['LOCAL_RANK']}".encode())
    sys.argv, sys.path[0] = [str(ROOT / TRAINER), *arguments], str(ROOT / "training_scripts")
    # The agent expects a return value, so `os._exit` must not end the process.
    variables = SimpleNamespace(**vars(os) | {"_exit": sys.exit})
    with patch("konkanivani.command_line.os", variables):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


def main(restarts: str, *arguments: str) -> None:
    """Run the agent of torchrun with forked ranks."""
    rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    agent = LaunchConfig(1, 1, 2, max_restarts=int(restarts), start_method="fork", **rendezvous)
    elastic_launch(agent, train_as_rank)(list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
