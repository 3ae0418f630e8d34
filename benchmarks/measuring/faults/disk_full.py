"""Full disks at every position of a save, full disks of logs, and checkpoint folders in use by another trainer."""

from collections.abc import Iterator
from functools import partial

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.faults.trials import Trial, try_all
from tests.faults.disk_full import (
    FULL_DISKS,
    FullDisk,
    full_disk_findings,
    full_log_findings,
    three_failures_findings,
    two_trainers_findings,
)
from tests.faults.resuming import ResumeBench


def measure(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every eighth."""
    return try_all("Disk full", list(_trials(ResumeBench(effort.folder))), effort, each=8)


def _trials(bench: ResumeBench) -> Iterator[Trial]:
    for case in FULL_DISKS:
        yield Trial(_kind(case), case.name, partial(full_disk_findings, bench, case))
    for share in (0.05, 0.5, 0.95):
        findings = partial(three_failures_findings, bench, share)
        yield Trial("three saves in a row fail: ends with 6, the old one stays", f"at {share:.0%}", findings)
    yield Trial("the logs' disk is full: trains on, exactly", "five steps long", partial(full_log_findings, bench))
    yield Trial("a second trainer is refused by the first one's number", "", partial(two_trainers_findings, bench))


def _kind(case: FullDisk) -> str:
    if case.operation:
        return "one save: an operation on the folder is refused"
    if case.name == "read-only":
        return "one save: the folder is read-only"
    return f"one save: {'a disk is full' if case.is_mounted else 'a file may not grow'} after a share of it"
