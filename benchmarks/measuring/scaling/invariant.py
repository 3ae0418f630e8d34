"""Invariant 9 over its grid: every distribution of a run's steps over processes gives the result of one process."""

import itertools

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.invariants.parts import relative_difference
from tests.invariants.ranks import Case, Trained, train_case, train_in_ranks

BOUND = 1e-9  # relative, in float64; the order of summation differs
STEPS, FEW_STEPS = 50, 6
WHOLE_WINDOW, QUARTER = 8, 2  # utterances in a micro-batch: accumulation 1 and 4


def cases_of(steps: int) -> dict[str, Case]:
    """Return the cases for each world size; the last one is the negative control."""
    grid = {
        f"{'FSDP2' if sharded else 'data parallel'}, {accumulation}": Case(steps, size, sharded, recompute)
        for sharded, (accumulation, size), recompute in itertools.product(
            (False, True), (("1 micro-batch", WHOLE_WINDOW), ("4 micro-batches", QUARTER)), ("never",)
        )
    }
    grid["FSDP2, 4 micro-batches, all blocks recomputed"] = Case(steps, QUARTER, True, "always")
    grid["data parallel, rank 1 out of memory once"] = Case(steps, QUARTER, out_of_memory_rank=1)
    return grid | {"negative control: each rank's own divisor": Case(steps, QUARTER, own_divisor=True)}


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per case and world size."""
    steps = effort.count(STEPS, short=FEW_STEPS)
    cases = cases_of(steps)
    # One process is the reference for all ranks with the same micro-batches.
    alone = {size: train_case(Case(steps, size)) for size in (WHOLE_WINDOW, QUARTER)}
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
