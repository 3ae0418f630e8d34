"""Data-loading workers that are killed, stop, hang, or lack shared memory."""

from collections.abc import Iterator
from functools import partial

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.faults.trials import Trial, try_all
from tests.faults.losing_workers import LOST_WORKERS, lost_worker_findings, pipe_findings, shared_memory_findings
from tests.faults.resuming import ResumeBench


def measure(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every fifth."""
    return try_all("Loader faults", list(_trials(ResumeBench(effort.folder))), effort, each=5)


def _trials(bench: ResumeBench) -> Iterator[Trial]:
    once = "a worker is killed once: restarted at the same window, the run exact"
    always = "a worker is killed each time or stops: ends with 6 in time, named; resumed, the run is exact"
    for case in LOST_WORKERS:
        yield Trial(once if case.comes_back else always, case.name, partial(lost_worker_findings, bench, case))
    yield Trial("an audio file turns into a pipe: its row is refused (3), at once", "", partial(pipe_findings, bench))
    for kilobytes in (64, 400):
        findings = partial(shared_memory_findings, bench, kilobytes=kilobytes)
        yield Trial("too little shared memory: the same, at once", f"{kilobytes} KiB", findings)
