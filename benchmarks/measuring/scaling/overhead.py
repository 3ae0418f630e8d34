"""Overhead of the distributed code for a single process: the same steps with and without it, in turn."""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.scaling.fixed_run import build_parts, fixed_global_batch
from konkanivani.data.batch import GlobalBatch
from konkanivani.training.gradient import accumulate, finish_gradient
from konkanivani.training.step import GradientTask, StepParts, forward_and_backward, loss_counts, train_step, update

MAX_OVERHEAD = 0.02
STEPS, FEW_STEPS = 60, 4


def bare_step(parts: StepParts, global_batch: GlobalBatch, step: int) -> None:
    """Run a step without agreement between ranks, retries and topology."""
    task = GradientTask(parts, global_batch, step, forward_and_backward)
    totals = accumulate(task, task.plan)
    update(parts, finish_gradient(parts, totals), loss_counts(global_batch), step)


def measure(effort: Effort) -> FaultTable:
    """Return a table of one row with the median times of both steps."""
    torch.set_num_threads(1)
    parts, global_batch = build_parts(), fixed_global_batch(8)
    ways: dict[str, Callable[[StepParts, GlobalBatch, int], object]] = {"bare": bare_step, "as trained": train_step}
    seconds = {name: [] for name in ways}
    for step in range(effort.count(STEPS, short=FEW_STEPS)):
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
