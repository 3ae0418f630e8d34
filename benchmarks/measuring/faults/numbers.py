"""Non-finite batches and states, and labels out of range."""

from collections.abc import Iterator
from functools import partial

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.faults.trials import Trial, try_all
from tests.faults.non_finite import (
    BAD_LABELS,
    BROKEN_RUNS,
    ODD_BATCHES,
    bad_label_findings,
    broken_run_findings,
    odd_batch_findings,
)
from tests.faults.resuming import ResumeBench


def measure(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every sixth."""
    trials = list(_trials(ResumeBench(effort.folder)))
    return try_all("Numbers that go wrong", trials, effort, each=6)


def _trials(bench: ResumeBench) -> Iterator[Trial]:
    for batch in ODD_BATCHES:
        kind = f"one batch is not finite, {batch.precision}: skipped, nothing changed by hash, named"
        yield Trial(kind, f"{batch.what} {batch.value}", partial(odd_batch_findings, bench, batch))
    for broken in BROKEN_RUNS:
        is_for_ever = broken.fault[0] == "not_finite"
        kind = "nothing is finite any more" if is_for_ever else "the state is not finite"
        kind += ": ends with 5, published is what can be gone on from"
        yield Trial(kind, broken.name, partial(broken_run_findings, bench, broken))
    for token in BAD_LABELS:
        for workers in (0, 2):
            findings = partial(bad_label_findings, bench, token, workers)
            yield Trial("a label is out of range: ends with 3, named", f"{token}, {workers} workers", findings)
