"""Runs killed and gone on with, bit for bit against undisturbed ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from tests.faults.resuming import ResumeBench, ResumeCase, control_cases, recut_cases, resume_cases
from tests.faults.warm_trainer import WarmTrainer

SHORT = 9  # each so many-th case without --full


@dataclass(frozen=True)
class Trial:
    """Something to try, of one kind: `differences` of a folder to run it in says what is not the same."""

    kind: str
    name: str
    differences: Callable[[Path], list[str]]
    is_to_differ: bool = False


def measure(effort: Effort) -> FaultTable:
    """Every case, or each ninth."""
    found: dict[str, list[bool]] = {}
    failures = []
    with WarmTrainer() as trainer:
        trials = list(_trials(ResumeBench(trainer, effort.folder)))
        for number, trial in enumerate(trials if effort.is_full else trials[::SHORT]):
            differences = trial.differences(effort.folder / f"case_{number}")
            is_right = bool(differences) == trial.is_to_differ
            found.setdefault(trial.kind, []).append(is_right)
            if not is_right:
                failures.append(f"{trial.kind}, {trial.name}: {'; '.join(differences[:3]) or 'nothing differs'}")
    rows = [(kind, str(len(each)), str(sum(each))) for kind, each in found.items()]
    notes = (
        f"{sum(len(each) for each in found.values())} cases; all weights, moments, counters, the loss scale and every "
        "logged number that no clock decides.",
    )
    return FaultTable("Exact resume", ("What", "Tried", "As it should be"), tuple(rows), tuple(failures), notes)


def _trials(bench: ResumeBench) -> Iterator[Trial]:
    for case in resume_cases():
        yield Trial(f"bit for bit: {_kind(case)}", case.name, partial(bench.differences, case))
    for step, workers in ((5, (2, 0)), (9, (0, 4)), (13, (1, 2))):
        run = partial(bench.whole_process_differences, step, workers)
        yield Trial("bit for bit: whole processes against a fork", f"killed after step {step}", run)
    for case in recut_cases():
        what = "weights to 1e-9" if case.settings.precision == "fp64" else "order and counters"
        yield Trial(
            f"another cut, {what}: {case.settings.precision}", case.name, partial(bench.recut_differences, case)
        )
    for case in control_cases():
        yield Trial("negative control, must differ", case.name, partial(bench.differences, case), is_to_differ=True)


def _kind(case: ResumeCase) -> str:
    settings = case.settings
    skips = {"poisoned": "poisoned audio skipped", "surrounded": "shards, noise and rooms"}
    parts = [settings.precision, skips.get(settings.source, settings.source)]
    parts += ["out-of-memory splits"] if settings.splits else []
    parts += ["skipped steps"] if settings.precision == "fp16" else []
    return ", ".join((*parts, *settings.more[:1]))
