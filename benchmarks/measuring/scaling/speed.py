"""Speed of 1, 2 and 4 local processes on the same cores with the same global batch, in seconds of audio per second."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.base.config import PRESETS, TrainConfig
from konkanivani.model.architecture import architecture_of
from konkanivani.planning.sizes import Ranks, traffic_bytes
from tests.invariants.ranks import environments_of
from tests.patience import PATIENCE
from tests.warm import ROOT

UTTERANCES = 32
STEPS, FEW_STEPS, ROUNDS = 10, 2, 3
MIN_SPEED = 0.95  # of two processes, as a share of one process on all threads
MODULE = "benchmarks.measuring.scaling.fixed_run"
VOCABULARY = 1000


@dataclass(frozen=True)
class Setting:
    """Number of ranks, and threads of each."""

    name: str
    world_size: int
    threads: int
    sharded: bool = False


def start_and_wait(command: Sequence[str], world_size: int, **environment: str) -> None:
    """Run the command as `world_size` ranks on this machine until they end; raise AssertionError if one fails."""
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=place | environment, stderr=subprocess.PIPE, text=True)
        for place in environments_of(world_size)
    ]
    # A rank whose peers have failed would wait for them, hence the timeout.
    errors = [rank.communicate(timeout=2 * PATIENCE)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)


def settings(cores: int) -> list[Setting]:
    """Return the compared settings; all use the same cores."""
    return [
        Setting(f"1 process, {cores} threads", 1, cores),
        Setting("2 processes, data parallel", 2, max(1, cores // 2)),
        Setting("2 processes, FSDP2", 2, max(1, cores // 2), sharded=True),
        Setting("4 processes, data parallel", 4, 1),
    ]


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per setting: the best of several rounds, in which the settings alternate."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in settings(cores)}
    for _ in range(effort.count(ROUNDS, short=1)):
        for setting in settings(cores):
            found[setting.name].append(run(setting, effort.folder / "outcome.json", effort.count(STEPS, FEW_STEPS)))
    rows, rates = [], {}
    for setting in settings(cores):
        # The best round: other processes of the machine can only make a step slower.
        best = min(found[setting.name], key=lambda one: one["step"])
        rates[setting.name] = best["audio"] / best["step"]
        architecture = architecture_of(TrainConfig(model=PRESETS["minimal"]), VOCABULARY)
        sent = traffic_bytes(architecture, Ranks(setting.world_size, setting.sharded)) / 2**20
        unit = "micro-batch" if setting.sharded else "step"
        cells = f"{best['step']:.2f}", f"{rates[setting.name]:.1f}", f"{best['sums']:.1%}", f"{sent:.1f} MiB a {unit}"
        rows.append((setting.name, *cells))
    one, two, *_ = rates.values()
    is_slow = effort.is_full and two < MIN_SPEED * one
    return FaultTable(
        title=f"Processes on {cores} cores, minimal preset, effective batch {UTTERANCES}",
        columns=("processes", "s a step", "audio s/s", "of it in sums over ranks", "sent by each"),
        rows=tuple(rows),
        failures=(f"two processes make {two / one:.0%} of one's audio seconds a second",) if is_slow else (),
        notes=("Only on an otherwise idle machine do these figures mean anything. The sums are what is not hidden.",),
    )


def run(setting: Setting, outcome: Path, steps: int) -> dict[str, float]:
    """Return the step time, the share of the sums and the seconds of audio of one setting."""
    arguments = (str(outcome), str(UTTERANCES), str(steps), str(setting.sharded))
    command = [sys.executable, "-m", MODULE, *arguments]
    # PASSIVE: spinning idle threads of one rank would take cores from the others.
    start_and_wait(command, setting.world_size, OMP_NUM_THREADS=str(setting.threads), OMP_WAIT_POLICY="passive")
    return json.loads(outcome.read_text())
