#!/usr/bin/env python3
"""Test and measure multi-process training: invariant 9 over its whole grid, killed ranks, and speed; docs/scaling.md.

    python3 benchmarks/scaling.py                         a few tries of everything, in minutes
    python3 benchmarks/scaling.py --parts invariant --full      the grid of docs/scaling.md; an hour for all parts

The exit code is 1 if a result differs that should not, or a run ends in an unexpected way.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv("test")

import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from benchmarks.measuring.common import VOCABULARY, Effort, FaultTable, PartsFlags, random_example, run_parts
from konkanivani.command_line import end_script, read_flags
from konkanivani.config import PRESETS, TextConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, partition, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import ALONE, Topology, process_group, read_topology
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.sizes import Ranks, traffic_bytes
from konkanivani.training import gradient
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.gradient import accumulate, finish_gradient
from konkanivani.training.step import GradientTask, StepParts, forward_and_backward, loss_counts, train_step, update
from tests.conftest import write_corpus
from tests.faults.under_torchrun import SAVE_STEPS, RankRun, kill_ranks, rank_run_differences, train_undisturbed
from tests.fork_server import ROOT
from tests.invariants.parts import relative_difference
from tests.invariants.ranks import Case, Trained, environments_of, train_case, train_in_ranks
from tests.timeouts import PROCESS_TIMEOUT

BOUND = 1e-9  # relative, in float64; the order of summation differs
INVARIANT_STEPS, FEW_INVARIANT_STEPS = 50, 6
WHOLE_BATCH, QUARTER = 8, 2  # utterances in a micro-batch: accumulation 1 and 4


def cases_of(steps: int) -> dict[str, Case]:
    """Return the cases for each world size; the last one is the negative control."""
    grid = {
        f"{'FSDP2' if sharded else 'data parallel'}, {accumulation}": Case(steps, size, sharded, recompute)
        for sharded, (accumulation, size), recompute in itertools.product(
            (False, True), (("1 micro-batch", WHOLE_BATCH), ("4 micro-batches", QUARTER)), ("never",)
        )
    }
    grid["FSDP2, 4 micro-batches, all blocks recomputed"] = Case(steps, QUARTER, True, "always")
    grid["data parallel, rank 1 out of memory once"] = Case(steps, QUARTER, out_of_memory_rank=1)
    return grid | {"negative control: each rank's own divisor": Case(steps, QUARTER, own_divisor=True)}


def measure_invariant(effort: Effort) -> FaultTable:
    """Return a table with a row per case and world size."""
    steps = effort.count(INVARIANT_STEPS, short=FEW_INVARIANT_STEPS)
    cases = cases_of(steps)
    # One process is the reference for all ranks with the same micro-batches.
    alone = {size: train_case(Case(steps, size)) for size in (WHOLE_BATCH, QUARTER)}
    rows, failures = [], []
    for world_size in (1, 2, 4) if effort.is_full else (2,):
        for (name, case), trained in zip(
            cases.items(), train_in_ranks(list(cases.values()), world_size, effort.folder), strict=True
        ):
            if world_size == 1 and (case.sharded or case.own_divisor or case.out_of_memory_rank):
                continue  # no effect with a single rank
            weights, losses = differences(alone[case.batch_size], trained)
            rows.append((str(world_size), name, f"{weights:.1e}", f"{losses:.1e}", str(trained.splits)))
            # The negative control must exceed the bound, all others must not.
            if (max(weights, losses) < BOUND) == case.own_divisor:
                failures.append(f"{world_size} ranks, {name}: {weights:.1e}, and the bound is {BOUND:.0e}")
    return FaultTable(
        title=f"Invariant 9: {steps} steps in float64, by ranks and by one process",
        columns=("ranks", "way", "weights differ by", "losses differ by", "steps begun again"),
        rows=tuple(rows),
        failures=tuple(failures),
        notes=(
            "The largest difference of a tensor, as a share of its norm; every fifth window is ragged, one holds "
            "a single utterance.",
        ),
    )


def differences(one: Trained, other: Trained) -> tuple[float, float]:
    """Return the largest relative difference of the weight tensors and of the losses."""
    weights = max(relative_difference(weight, other.weights[name]) for name, weight in one.weights.items())
    return weights, max(abs(a - b) / abs(a) for a, b in zip(one.losses, other.losses, strict=True))


KILLS_A_RUN, RUNS = 5, 2


def measure_kills(effort: Effort) -> FaultTable:
    """Return a table with a row per run."""
    draw = random.Random(effort.seed)
    corpus = write_corpus(effort.folder / "corpus", {"train": 26, "valid": 5})
    rows, failures = [], []
    for sharded in (False, True):
        name = "FSDP2" if sharded else "data parallel"
        undisturbed = train_undisturbed(RankRun(corpus, effort.folder / f"undisturbed_{sharded}", sharded))
        for number in range(effort.count(RUNS, short=1)):
            run = RankRun(corpus, effort.folder / f"killed_{sharded}_{number}", sharded)
            where = kill_ranks(run, effort.count(KILLS_A_RUN, short=1), draw)
            found = rank_run_differences(run, undisturbed)
            rows.append((name, str(len(where)), "; ".join(where), str(len(found))))
            failures += [f"{name}: {difference}" for difference in found]
    return FaultTable(
        title=f"Ranks killed under torchrun: {sum(int(row[1]) for row in rows)} SIGKILLs, two ranks",
        columns=("run", "kills", "which", "differences from the undisturbed run"),
        rows=tuple(rows),
        failures=tuple(failures),
        notes=(
            f"Saved every {SAVE_STEPS} steps. Compared bit for bit: weights, optimizer, counters, every logged loss.",
        ),
    )


RANK = "rank"  # first argument of the process of a rank
MICRO_BATCH = 4
WARM_UP = 3
MIN_SECONDS, MAX_SECONDS = 3.0, 12.0
TIMEOUT = 600.0


def fixed_speech(utterances: int) -> list[Example]:
    """Return utterances of noise, equal on every machine."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.linspace(MIN_SECONDS, MAX_SECONDS, utterances).tolist()
    return [random_example(length, VOCABULARY, generator) for length in seconds]


def fixed_global_batch(utterances: int, topology: Topology = ALONE) -> GlobalBatch:
    """Return a rank's share of the global batch, in micro-batches of four.

    Tokens and utterances are counted over all ranks, since the losses are divided by the counts of the whole.
    """
    speeches = fixed_speech(utterances)
    whole = split_into_micro_batches(speeches, same_size(MICRO_BATCH), OUR_TOKENS)
    # The same partition as in training.
    own = partition(np.array([speech.seconds for speech in speeches]), topology.world_size)[topology.rank]
    portion = split_into_micro_batches([speeches[number] for number in own], same_size(MICRO_BATCH), OUR_TOKENS)
    return dataclasses.replace(whole, micro_batches=portion.micro_batches)


def build_parts(topology: Topology = ALONE, sharded: bool = False) -> StepParts:
    """Return the step parts of the minimal preset on the CPU."""
    config, cpu = dataclasses.replace(TrainConfig(), model=PRESETS["minimal"]), torch.device("cpu")
    return build_step_parts(
        config, architecture_of(config, VOCABULARY), cpu, 1000, layout=StateLayout(topology, sharded)
    )


class SumClock:
    """Timer of the gradient sum over ranks.

    The sum does not overlap with computation, so that its time adds to the step time.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._sum = gradient.sum_tensors

    def __call__(self, topology: Topology, tensors: list[torch.Tensor], bucket: torch.Tensor) -> None:
        started = time.perf_counter()
        self._sum(topology, tensors, bucket)
        self.seconds.append(time.perf_counter() - started)


def run_rank(outcome: str, utterances: str, steps: str, sharded: str) -> None:
    """Run one rank: warm up and time the steps; the first rank writes the median and the share of the sums."""
    topology, clock = read_topology(), SumClock()
    # Replaced in the module that calls it, where the name is looked up.
    gradient.sum_tensors = clock
    with process_group(topology, TIMEOUT):
        parts, global_batch = build_parts(topology, sharded == "True"), fixed_global_batch(int(utterances), topology)
        for step in range(WARM_UP):
            train_step(parts, global_batch, step)
        # The warm-up does not count.
        clock.seconds.clear()
        times = []
        for step in range(int(steps)):
            started = time.perf_counter()
            train_step(parts, global_batch, WARM_UP + step)
            times.append(time.perf_counter() - started)
    if topology.is_first:
        found = {"step": statistics.median(times), "sums": sum(clock.seconds) / sum(times)}
        Path(outcome).write_text(json.dumps(found | {"audio": global_batch.audio_seconds}))


MAX_OVERHEAD = 0.02
OVERHEAD_STEPS, FEW_OVERHEAD_STEPS = 60, 4


def bare_step(parts: StepParts, global_batch: GlobalBatch, step: int) -> None:
    """Run a step without agreement between ranks, retries and topology."""
    task = GradientTask(parts, global_batch, step, forward_and_backward)
    totals = accumulate(task, task.plan)
    update(parts, finish_gradient(parts, totals), loss_counts(global_batch), step)


def measure_overhead(effort: Effort) -> FaultTable:
    """Return a table of one row with the median times of both steps."""
    torch.set_num_threads(1)
    parts, global_batch = build_parts(), fixed_global_batch(8)
    ways: dict[str, Callable[[StepParts, GlobalBatch, int], object]] = {"bare": bare_step, "as trained": train_step}
    seconds = {name: [] for name in ways}
    for step in range(effort.count(OVERHEAD_STEPS, short=FEW_OVERHEAD_STEPS)):
        # The order alternates, so that neither step is always the first of a round.
        for name, run in ways.items() if step % 2 else reversed(ways.items()):
            started = time.perf_counter()
            run(parts, global_batch, step)
            seconds[name].append(time.perf_counter() - started)
    # The first two rounds are a warm-up.
    bare, trained = (statistics.median(seconds[name][2:] or seconds[name]) for name in ways)
    overhead = trained / bare - 1
    is_too_much = effort.is_full and overhead > MAX_OVERHEAD  # too few steps for a verdict otherwise
    return FaultTable(
        title="The distributed path in a world of one",
        columns=("a step without, s", "a step as trained, s", "overhead"),
        rows=((f"{bare:.3f}", f"{trained:.3f}", f"{overhead:+.2%}"),),
        failures=(f"{overhead:.2%} is more than {MAX_OVERHEAD:.0%}",) if is_too_much else (),
    )


UTTERANCES = 32
SPEED_STEPS, FEW_SPEED_STEPS, ROUNDS = 10, 2, 3
MIN_SPEED = 0.95  # of two processes, as a share of one process on all threads


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
    errors = [rank.communicate(timeout=2 * PROCESS_TIMEOUT)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)


def settings(cores: int) -> list[Setting]:
    """Return the compared settings; all use the same cores."""
    return [
        Setting(f"1 process, {cores} threads", 1, cores),
        Setting("2 processes, data parallel", 2, max(1, cores // 2)),
        Setting("2 processes, FSDP2", 2, max(1, cores // 2), sharded=True),
        Setting("4 processes, data parallel", 4, 1),
    ]


def measure_speed(effort: Effort) -> FaultTable:
    """Return a table with a row per setting: the best of several rounds, in which the settings alternate."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in settings(cores)}
    for _ in range(effort.count(ROUNDS, short=1)):
        for setting in settings(cores):
            found[setting.name].append(
                run_setting(setting, effort.folder / "outcome.json", effort.count(SPEED_STEPS, FEW_SPEED_STEPS))
            )
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


def run_setting(setting: Setting, outcome: Path, steps: int) -> dict[str, float]:
    """Return the step time, the share of the sums and the seconds of audio of one setting."""
    arguments = (str(outcome), str(UTTERANCES), str(steps), str(setting.sharded))
    command = [sys.executable, __file__, RANK, *arguments]
    # PASSIVE: spinning idle threads of one rank would take cores from the others.
    start_and_wait(command, setting.world_size, OMP_NUM_THREADS=str(setting.threads), OMP_WAIT_POLICY="passive")
    return json.loads(outcome.read_text())


WORLDS = (2, 4, 8, 64)
GIGABITS = (1, 10, 100)
LATENCY = 50e-6  # seconds per message; a sum over N ranks in a ring has 2 (N - 1) consecutive messages
MICRO_BATCHES = 4
COMPUTING = 1.0  # seconds of computation in a step


def seconds(sent: int, ranks: Ranks, gigabits: float) -> float:
    """Return the seconds for `sent` bytes from each rank of a ring: bytes / bandwidth + messages x latency."""
    return sent / (gigabits * 1e9 / 8) + 2 * (ranks.world_size - 1) * LATENCY


def measure_traffic(_: Effort) -> FaultTable:
    """Return a table with a row per preset, kind of parallelism and world size."""
    rows = []
    for preset, shape in PRESETS.items():
        architecture = architecture_of(TrainConfig(model=shape), TextConfig().vocab_size)
        for sharded in (False, True):
            for world_size in WORLDS:
                ranks = Ranks(world_size, sharded)
                # Sharded weights are gathered for every micro-batch; otherwise gradients are summed once per step.
                sent = traffic_bytes(architecture, ranks) * (MICRO_BATCHES if sharded else 1)
                taken = [seconds(sent, ranks, gigabits) for gigabits in GIGABITS]
                shares = [f"{time:.3f} s, {time / (COMPUTING + time):.0%}" for time in taken]
                rows.append(
                    (preset, "FSDP2" if sharded else "data parallel", str(world_size), f"{sent / 2**20:.0f}", *shares)
                )
    return FaultTable(
        title="What one rank sends a step, and its time and share of a step that computes for 1 s",
        columns=("preset", "way", "ranks", "MiB", *(f"at {gigabits} Gbit/s" for gigabits in GIGABITS)),
        rows=tuple(rows),
        notes=(
            f"A model, not a measurement: a ring, bytes / bandwidth + 2 (N - 1) x {LATENCY * 1e6:.0f} µs, nothing "
            f"hidden behind computing; FSDP2 with {MICRO_BATCHES} micro-batches a step.",
        ),
    )


Part = Literal["invariant", "kills", "overhead", "speed", "traffic"]


@dataclass(frozen=True)
class Flags(PartsFlags):
    """Flags of this script."""

    parts: tuple[Part, ...] = get_args(Part)
    """invariant: 1, 2 and 4 ranks against one process; kills: ranks killed under torchrun; overhead: of the distributed
    code with a single rank; speed: 1, 2 and 4 processes on the same cores (otherwise idle machine); traffic: by a model
    of the network."""


MEASURES = {
    "invariant": measure_invariant,
    "kills": measure_kills,
    "overhead": measure_overhead,
    "speed": measure_speed,
    "traffic": measure_traffic,
}

if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        run_rank(*sys.argv[2:])
        end_script(0)
    flags = read_flags(Flags, sys.argv[1:], Flags())
    sys.exit(run_parts(MEASURES, flags.parts, flags))
