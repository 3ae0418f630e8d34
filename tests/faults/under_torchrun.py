"""Ranks of the real script: forks with a rank's environment, or under torchrun, where they are killed and come back."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.model.front_end import FrontEnd
from tests.conftest import ROOT, TINY_MODEL, TRAINER, Corpus, read_log, run_folders, start_cold
from tests.faults.resuming import run_differences
from tests.laws.ranks import environments_of
from tests.patience import PATIENCE
from tests.warm import Job, warm_parent

STEPS = 60
SAVE_STEPS = 2


def start_ranks(output: Path, world: int, restarts: int, *arguments: str) -> subprocess.Popen:
    """Starts the ranks under torchrun, one thread each; what they and torchrun print goes to `output`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command = [*launcher, "--max-restarts", str(restarts), str(ROOT / TRAINER), *arguments]
    output.parent.mkdir(parents=True, exist_ok=True)
    return start_cold(command, output, threads=1)


def run_ranks(
    output: Path, world: int, *arguments: str, restarts: int = 0, before: Callable[[], None] | None = None
) -> str:
    """What so many forks say that train together, one thread each, begun again as torchrun would; in the end, well."""
    for restart in range(restarts + 1):
        told = {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
        jobs = [
            Job(ROOT / TRAINER, arguments, output, environment=environment | told, threads=1, before=before)
            for environment in environments_of(world)
        ]
        ranks = [warm_parent().start(job) for job in jobs]
        codes = [rank.wait(PATIENCE) for rank in ranks]
        if not any(codes):
            break
    said = output.read_text(encoding="utf-8")
    assert codes == [0] * world, said
    return said


def hold_two_seconds() -> None:
    """Gives rank 1 a memory that holds 2.5 s of audio, any one utterance; other ranks hold as much as they get."""
    computed = FrontEnd.forward

    def forward(front_end, waveforms, sample_lengths, augment_seeds):
        if waveforms.numel() > 2.5 * SAMPLE_RATE and augment_seeds is not None:
            raise MemoryError("the test's memory is full")
        return computed(front_end, waveforms, sample_lengths, augment_seeds)

    if os.environ["RANK"] == "1":
        FrontEnd.forward = forward


def end_all(agent: subprocess.Popen) -> None:
    """Ends torchrun and its ranks, where any still live."""
    ranks = ranks_of(agent)
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)


def ranks_of(agent: subprocess.Popen) -> dict[int, int]:
    """The process ids of torchrun's ranks that live, by local rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names = (folder / "environ").read_bytes().split(b"\0") if parent == agent.pid else []
        except (OSError, IndexError):  # it has just ended
            continue
        found |= {int(name.partition(b"=")[2]): int(folder.name) for name in names if name.startswith(b"LOCAL_RANK=")}
    return found


@dataclass(frozen=True)
class RankRun:
    """A run of two ranks that saves every second step; `sharded`: the weights are sharded over them."""

    corpus: Corpus
    directory: Path
    sharded: bool = False
    steps: int = STEPS

    def flags(self) -> tuple[str, ...]:
        batch = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--epochs", "1000")
        steady = ("--schedule", "inverse_sqrt", "--warmup_steps", "2", "--max_steps", str(self.steps))
        saves = ("--save_steps", str(SAVE_STEPS), "--num_workers", "1", "--resume", "auto")
        shard = ("--shard", "always" if self.sharded else "never")
        return (*TINY_MODEL, *self.corpus.flags(), *run_folders(self.directory), *batch, *steady, *saves, *shard)

    def logged(self) -> int:
        try:
            return read_log(self.directory)[-1]["step"]
        except (OSError, IndexError):
            return 0

    def start(self, restarts: int) -> subprocess.Popen:
        return start_ranks(self.directory / "output.txt", 2, restarts, *self.flags())


def train_undisturbed(run: RankRun) -> RankRun:
    run.directory.mkdir(parents=True)
    run_ranks(run.directory / "output.txt", 2, *run.flags())
    return run


def kill_ranks(run: RankRun, kills: int, draw: random.Random) -> list[str]:
    """Kills so many ranks of the run, one after the other, at random instants; where each was, in words."""
    process, where = run.start(restarts=kills), []
    try:
        for number in range(kills):
            before = run.logged()
            until = time.monotonic() + PATIENCE
            while len(ranks := ranks_of(process)) < 2 and process.poll() is None:
                assert time.monotonic() < until, "the ranks were not started again"
                time.sleep(0.02)
            starting = draw.random() < 0.25
            if starting:
                time.sleep(4.0 * draw.random())
            else:
                _wait_for_a_step(run, process, before if number else 0)
                time.sleep(0.3 * draw.random())
            if process.poll() is not None:
                break
            rank = draw.choice(sorted(ranks))
            os.kill(ranks[rank], signal.SIGKILL)
            where.append(f"rank {rank} {'while starting' if starting else 'while training'}")
            _wait_for_the_end_of(set(ranks.values()), process)
        code = process.wait(PATIENCE)
        assert code == 0, (run.directory / "output.txt").read_text()[-3000:]
    finally:
        end_all(process)
    return where


def _wait_for_a_step(run: RankRun, process: subprocess.Popen, before: int) -> None:
    until, seen = time.monotonic() + PATIENCE, set()
    while process.poll() is None and not (seen and run.logged() not in seen | {before}):
        assert time.monotonic() < until, "no step was made"
        seen.add(run.logged())
        time.sleep(0.02)


def _wait_for_the_end_of(pids: set[int], process: subprocess.Popen) -> None:
    until = time.monotonic() + PATIENCE
    while process.poll() is None and pids & set(ranks_of(process).values()):
        assert time.monotonic() < until, "the other rank did not end"
        time.sleep(0.05)


def what_differs(run: RankRun, undisturbed: RankRun) -> list[str]:
    """Every difference of weights, optimizer, counters and logged losses, in sentences."""
    found = run_differences(undisturbed.directory, run.directory)
    if [record["step"] for record in read_log(run.directory)] != list(range(1, run.steps + 1)):
        found.append("the log does not hold each step once")
    return found
