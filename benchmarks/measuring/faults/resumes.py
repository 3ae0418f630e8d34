"""Killed and resumed runs, compared bit for bit with undisturbed ones."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from benchmarks.measuring.faults.trials import Findings, Trial, try_all
from tests.faults.resuming import ResumeBench, ResumeCase, control_cases, recut_cases, resume_cases

COMPARED = "Compared are all weights, moments, counters, the loss scale and every logged number that no clock decides."


def measure(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every ninth."""
    trials = list(_trials(ResumeBench(effort.folder)))
    return try_all("Exact resume", trials, effort, each=9, notes=(COMPARED,))


def _trials(bench: ResumeBench) -> Iterator[Trial]:
    for case in resume_cases():
        yield Trial(f"bit for bit: {_kind(case)}", case.name, partial(bench.differences, case))
    # The number of workers also changes between the two processes.
    for step, workers in ((5, (2, 0)), (9, (0, 4)), (13, (1, 2))):
        findings = partial(bench.whole_process_differences, step, workers)
        yield Trial("bit for bit: whole processes against a fork", f"killed after step {step}", findings)
    for case in recut_cases():
        what = "weights to 1e-9" if case.settings.precision == "fp64" else "order and counters"
        findings = partial(bench.recut_differences, case)
        yield Trial(f"another cut, {what}: {case.settings.precision}", case.name, findings)
    for case in control_cases():
        yield Trial("negative control: differs", case.name, _must_differ(partial(bench.differences, case)))


def _must_differ(findings: Findings) -> Findings:
    """Return findings that fail if nothing differs, for a negative control."""

    def turned(folder: Path) -> list[str]:
        return [] if findings(folder) else ["nothing differs"]

    return turned


def _kind(case: ResumeCase) -> str:
    settings = case.settings
    sources = {"poisoned": "poisoned audio skipped", "surrounded": "shards, noise and rooms"}
    parts = [settings.precision, sources.get(settings.source, settings.source)]
    parts += ["out-of-memory splits"] if settings.splits else []
    parts += ["skipped steps"] if settings.precision == "fp16" else []
    return ", ".join((*parts, *settings.more[:1]))
