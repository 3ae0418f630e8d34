#!/usr/bin/env python3
"""Inject faults (kills, full disks, truncated and flipped files) and count losses: the tables of docs/reliability.md.

    python3 benchmarks/faults.py                         a few tries of every kind
    python3 benchmarks/faults.py --parts kills --full    the counts of docs/reliability.md

Every part trains with the real script as a child process, or reads files the way it does. The exit code is 1 if
anything is lost or read incorrectly, or a run ends in an unexpected way.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv("test")

import itertools
import os
import random
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from benchmarks.measuring.common import Effort, FaultTable, PartsFlags, run_parts
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.command_line import read_flags
from tests.conftest import write_corpus
from tests.faults.corrupt_checkpoints import (
    bit_flips,
    count_resume_outcomes,
    is_rejected_if_all_are_damaged,
    truncations,
)
from tests.faults.disk_full import (
    FULL_DISKS,
    FullDisk,
    full_disk_findings,
    full_log_findings,
    three_failures_findings,
    two_trainers_findings,
)
from tests.faults.fuzz import Kind, fuzz
from tests.faults.non_finite import (
    BAD_LABELS,
    NON_FINITE_BATCHES,
    PERMANENT_FAILURES,
    bad_label_findings,
    non_finite_batch_findings,
    permanent_failure_findings,
)
from tests.faults.repeated_kills import (
    SAVE_STEPS,
    KillResult,
    differences_from_undisturbed,
    kill_at_points,
    kill_at_random,
    run_for_kills_at_points,
    run_for_random_kills,
)
from tests.faults.resumed_runs import ResumeBench, ResumeCase, control_cases, resplit_cases, resume_cases
from tests.faults.signals import (
    SignalResult,
    Target,
    preset_run,
    run_for_signals,
    stop_by_closing_terminal,
    stop_by_second_signal,
    stop_by_signal,
    stop_while_workers_hang,
)
from tests.faults.small_run import train_small_run
from tests.faults.untrusted_input import HOSTILE, load_in_all_ways, read_valid_checkpoint, with_settings
from tests.faults.watched_process import Verdict, watch
from tests.faults.worker_failures import LOST_WORKERS, lost_worker_findings, pipe_findings, shared_memory_findings

Findings = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Trial:
    """Trial of a fault; `findings` runs it in a new folder and returns sentences on unexpected outcomes."""

    kind: str
    name: str
    findings: Findings


def try_all(title: str, trials: Sequence[Trial], effort: Effort, each: int, notes: tuple[str, ...] = ()) -> FaultTable:
    """Run all trials, or every `each`-th one unless the effort is full, and return their table."""
    right: dict[str, list[bool]] = {}
    failures = []
    for number, trial in enumerate(trials if effort.is_full else trials[::each]):
        found = trial.findings(effort.folder / f"trial_{number}")
        right.setdefault(trial.kind, []).append(not found)
        if found:
            failures.append(f"{trial.kind}, {trial.name}: {'; '.join(found[:3])}")
    rows = [(kind, str(len(tried)), str(sum(tried))) for kind, tried in right.items()]
    rows.append(("all", *(str(sum(int(row[column]) for row in rows)) for column in (1, 2))))
    return FaultTable(title, ("Fault", "Trials", "Correct"), tuple(rows), tuple(failures), notes)


AT_POINTS, AT_RANDOM, ANEW = 105, 88, 12


def measure_kills(effort: Effort) -> FaultTable:
    """Return a table with a row per point of a save, and rows for the random times."""
    draw = random.Random(effort.seed)
    corpus = write_corpus(effort.folder / "corpus", {"train": 26, "valid": 5, "test": 5})
    first = run_for_kills_at_points(corpus, effort.folder / "points")
    second = run_for_random_kills(corpus, effort.folder / "random")
    at_points = kill_at_points(first, effort.count(AT_POINTS, short=21))
    at_random = [kill_at_random(second, draw) for _ in range(effort.count(AT_RANDOM, short=6))]
    at_random += [kill_at_random(second, draw, is_new_interpreter=True) for _ in range(effort.count(ANEW, short=1))]
    # The undisturbed runs end at the same step as the killed ones.
    differences = [
        *differences_from_undisturbed(first, run_for_kills_at_points(corpus, effort.folder / "undisturbed_points")),
        *differences_from_undisturbed(second, run_for_random_kills(corpus, effort.folder / "undisturbed_random")),
    ]
    deaths = at_points + at_random
    failures = [f"{death.where}: {complaint}" for death in deaths for complaint in death.errors]
    return FaultTable(
        title=f"Killed in the act: {len(deaths)} SIGKILLs",
        columns=("killed", "times", "runs lost", "files that cannot be read", "steps lost at most", "save interval"),
        rows=(*_kill_rows("in a save, ", at_points, 1), *_kill_rows("at random, ", at_random, SAVE_STEPS)),
        failures=(*failures, *differences),
        notes=(
            f"Two runs lived through them, {first.logged_step()} and {second.logged_step()} steps long. Compared with "
            "runs to the same step that nobody killed, weights, optimizer state and logged losses differ in "
            f"{len(differences)} places; the logs hold each step once.",
        ),
    )


def _kill_rows(prefix: str, deaths: list[KillResult], interval: int) -> list[tuple[str, ...]]:
    by_place = defaultdict(list)
    for death in deaths:
        by_place[death.where].append(death.end_state)
    return [
        (
            prefix + place,
            str(len(found)),
            # Lost: no checkpoint although more than one save interval was logged.
            str(sum(each.saved == 0 and each.logged > interval for each in found)),
            str(sum(len(each.invalid_files) for each in found)),
            str(max(each.steps_lost for each in found)),
            f"{interval} step{'s' if interval > 1 else ''}",
        )
        for place, found in by_place.items()
    ]


SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIX_SECONDS = range(14, 15)  # words per utterance, about 6 s of audio
MAX_SECONDS = 5.0  # limit for the minimal preset, at the 95th percentile
DELAY = 2.0  # the signal comes within so many seconds after the first step: about two steps of the minimal preset


def measure_signals(effort: Effort) -> FaultTable:
    """Return a table with a row per signal and receiver, for models of two presets on utterances of 6 s."""
    draw = random.Random(effort.seed)
    counts = {"train": 24, "valid": 4}
    corpus = write_corpus(effort.folder / "long", counts, lengths=SIX_SECONDS)
    minimal, original = (preset_run(corpus, effort.folder / name, name) for name in ("minimal", "original"))
    small_corpus = write_corpus(effort.folder / "short", {"train": 26, "valid": 5})
    small = run_for_signals(small_corpus, effort.folder / "small")
    endings = {}
    for number, target in itertools.product(SIGNALS, get_args(Target)):
        tries = range(effort.count(20, short=2))
        endings[f"minimal, {number.name} to {target}"] = [
            stop_by_signal(minimal, number, target, 2 * (attempt % 2), DELAY * draw.random()) for attempt in tries
        ]
    endings["minimal, its terminal closes"] = [
        stop_by_closing_terminal(minimal, 2 * (attempt % 2)) for attempt in range(effort.count(20, short=2))
    ]
    tries = range(effort.count(6, short=1))
    endings["original, SIGTERM to the process"] = [
        stop_by_signal(original, signal.SIGTERM, "the process", 2, DELAY * draw.random()) for _ in tries
    ]
    endings["minimal, SIGTERM while the workers hang"] = [
        stop_while_workers_hang(minimal, signal.SIGTERM) for _ in range(effort.count(5, short=1))
    ]
    endings["minimal, a second signal to its group (seconds from it on)"] = [
        stop_by_second_signal(minimal, number, 2, draw.random())
        for number, _ in zip(itertools.cycle(SIGNALS), range(effort.count(20, short=2)), strict=False)
    ]
    endings["small model, SIGINT to its group"] = [
        stop_by_signal(small, signal.SIGINT, "its group", 2, 0.5 * draw.random()) for _ in range(effort.count(20, 2))
    ]
    failures = [f"{name}: {said}" for name, found in endings.items() for each in found for said in each.errors]
    failures += [
        f"{name}: {_percentile(found):.1f} s at the 95th percentile"
        for name, found in endings.items()
        if name.startswith(("minimal, SIG", "minimal, its")) and _percentile(found) > MAX_SECONDS
    ]
    differences = differences_from_undisturbed(small, run_for_signals(small_corpus, effort.folder / "undisturbed"))
    return FaultTable(
        title=f"Asked to stop: {sum(map(len, endings.values()))} lives ended by signals",
        columns=("model, signal", "times", "p50 s", "p95 s", "most s", "steps lost or exit codes wrong"),
        rows=tuple(_signal_row(name, found) for name, found in endings.items()),
        failures=(*failures, *differences),
        notes=(
            "Seconds from the signal to the end of the process, one thread on a shared machine; half of the lives read "
            "their audio in two workers. Exit codes 143, 130 and 129, nobody left in the process group. The small "
            f"model's run, {small.logged_step()} steps long, differs from one that nobody disturbed in "
            f"{len(differences)} places.",
        ),
    )


def _signal_row(name: str, found: Sequence[SignalResult]) -> tuple[str, ...]:
    seconds = [each.seconds for each in found]
    shown = statistics.median(seconds), _percentile(found), max(seconds)
    return (name, str(len(found)), *(f"{number:.2f}" for number in shown), str(sum(bool(e.errors) for e in found)))


def _percentile(found: Sequence[SignalResult]) -> float:
    """Return the 95th percentile of the seconds, the nearest rank without interpolation."""
    seconds = sorted(each.seconds for each in found)
    return seconds[int(0.95 * (len(seconds) - 1) + 0.5)]


COMPARED = "Compared are all weights, moments, counters, the loss scale and every logged number that no clock decides."


def measure_resumes(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every ninth."""
    trials = list(_resumes_trials(ResumeBench(effort.folder)))
    return try_all("Exact resume", trials, effort, each=9, notes=(COMPARED,))


def _resumes_trials(bench: ResumeBench) -> Iterator[Trial]:
    for case in resume_cases():
        yield Trial(f"bit for bit: {_resume_kind(case)}", case.name, partial(bench.differences, case))
    # The number of workers also changes between the two processes.
    for step, workers in ((5, (2, 0)), (9, (0, 4)), (13, (1, 2))):
        findings = partial(bench.new_interpreter_differences, step, workers)
        yield Trial("bit for bit: whole processes against a fork", f"killed after step {step}", findings)
    for case in resplit_cases():
        what = "weights to 1e-9" if case.settings.precision == "fp64" else "order and counters"
        findings = partial(bench.resplit_differences, case)
        yield Trial(f"other micro-batches, {what}: {case.settings.precision}", case.name, findings)
    for case in control_cases():
        yield Trial("negative control: differs", case.name, _must_differ(partial(bench.differences, case)))


def _must_differ(findings: Findings) -> Findings:
    """Return findings that fail if nothing differs, for a negative control."""

    def turned(folder: Path) -> list[str]:
        return [] if findings(folder) else ["nothing differs"]

    return turned


def _resume_kind(case: ResumeCase) -> str:
    settings = case.settings
    sources = {"poisoned": "poisoned audio skipped", "surrounded": "shards, noise and rooms"}
    parts = [settings.precision, sources.get(settings.source, settings.source)]
    parts += ["out-of-memory splits"] if settings.splits else []
    parts += ["skipped steps"] if settings.precision == "fp16" else []
    return ", ".join((*parts, *settings.more[:1]))


FLIPS = 1000


def measure_files(effort: Effort) -> FaultTable:
    """Return a table with a row per kind of damage."""
    checkpoints = train_small_run(effort.folder / "run") / "checkpoints"
    whole = (checkpoints / LAST).read_bytes()
    kinds = {
        "cut to 0 bytes, 1 byte, 50 %, 99.99 %, all but a byte": truncations(whole),
        "one bit flipped": bit_flips(whole, effort.count(FLIPS, 50), effort.seed),
    }
    rows, failures = [], []
    for number, (name, damages) in enumerate(kinds.items()):
        found = count_resume_outcomes(checkpoints, damages, effort.folder / f"work{number}")
        wrong = [outcome for outcome in found if outcome not in ("detected", "harmless")]
        rows.append((name, str(found.total()), str(found["detected"]), str(found["harmless"]), str(len(wrong))))
        failures += wrong
    # Every checkpoint of a run: empty, only the signature of a ZIP archive, the first half.
    contents = (b"", b"PK", whole[: len(whole) // 2])
    refused = [
        is_rejected_if_all_are_damaged(checkpoints, content, effort.folder / f"bad{number}")
        for number, content in enumerate(contents)
    ]
    rows.append(("every checkpoint damaged", str(len(refused)), str(sum(refused)), "0", str(refused.count(False))))
    failures += ["a run started from scratch over damaged checkpoints"] * refused.count(False)
    return FaultTable(
        "Damaged checkpoints",
        ("damage to the newest checkpoint", "tried", "detected", "harmless", "read wrongly"),
        tuple(rows),
        tuple(failures),
        (
            "Detected: named, moved aside, the previous one used (where all are damaged: refused, no fresh start). "
            "Harmless: what is loaded is what was saved, every tensor bit for bit.",
        ),
    )


def measure_disk_full(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every eighth."""
    return try_all("Disk full", list(_disk_full_trials(ResumeBench(effort.folder))), effort, each=8)


def _disk_full_trials(bench: ResumeBench) -> Iterator[Trial]:
    for case in FULL_DISKS:
        yield Trial(_disk_kind(case), case.name, partial(full_disk_findings, bench, case))
    for share in (0.05, 0.5, 0.95):
        findings = partial(three_failures_findings, bench, share)
        yield Trial("three saves in a row fail: ends with 6, the old one stays", f"at {share:.0%}", findings)
    yield Trial("the logs' disk is full: trains on, exactly", "five steps long", partial(full_log_findings, bench))
    yield Trial("a second trainer is refused by the first one's number", "", partial(two_trainers_findings, bench))


def _disk_kind(case: FullDisk) -> str:
    if case.operation:
        return "one save: an operation on the folder is refused"
    if case.name == "read-only":
        return "one save: the folder is read-only"
    return f"one save: {'a disk is full' if case.is_mounted else 'a file may not grow'} after a share of it"


def measure_numbers(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every sixth."""
    trials = list(_numbers_trials(ResumeBench(effort.folder)))
    return try_all("Numbers that go wrong", trials, effort, each=6)


def _numbers_trials(bench: ResumeBench) -> Iterator[Trial]:
    for batch in NON_FINITE_BATCHES:
        kind = f"one batch is not finite, {batch.precision}: skipped, nothing changed by hash, named"
        yield Trial(kind, f"{batch.what} {batch.value}", partial(non_finite_batch_findings, bench, batch))
    for broken in PERMANENT_FAILURES:
        is_permanent = broken.fault[0] == "not_finite"
        kind = "all batches are not finite" if is_permanent else "the state is not finite"
        kind += ": exits with 5, the last checkpoint can be resumed"
        yield Trial(kind, broken.name, partial(permanent_failure_findings, bench, broken))
    for token in BAD_LABELS:
        for workers in (0, 2):
            findings = partial(bad_label_findings, bench, token, workers)
            yield Trial("a label is out of range: ends with 3, named", f"{token}, {workers} workers", findings)


def measure_loaders(effort: Effort) -> FaultTable:
    """Return the table of all trials, or of every fifth."""
    return try_all("Loader faults", list(_loaders_trials(ResumeBench(effort.folder))), effort, each=5)


def _loaders_trials(bench: ResumeBench) -> Iterator[Trial]:
    once = "a worker is killed once: restarted at the same batch, the run is exact"
    always = "a worker is killed each time or stops: ends with 6 in time, named; resumed, the run is exact"
    for case in LOST_WORKERS:
        yield Trial(once if case.is_lost_once else always, case.name, partial(lost_worker_findings, bench, case))
    yield Trial("an audio file turns into a pipe: its row is refused (3), at once", "", partial(pipe_findings, bench))
    for kilobytes in (64, 400):
        findings = partial(shared_memory_findings, bench, kilobytes=kilobytes)
        yield Trial("too little shared memory: fewer workers or none, the run exact", f"{kilobytes} KiB", findings)


def measure_untrusted_input(effort: Effort) -> FaultTable:
    """Return a table with a row per checkpoint; all are tried at any effort."""
    path = effort.folder / "sound.pt"
    with_settings("--log_dir 'runs'")(
        read_valid_checkpoint(train_small_run(effort.folder / "run") / "checkpoints" / LAST), path
    )
    sound = read_valid_checkpoint(path)
    rows, failures = [], []
    for number, (name, write) in enumerate(HOSTILE.items()):
        folder = effort.folder / str(number)
        folder.mkdir()
        write(sound, folder / LAST)
        verdict = watch(lambda folder=folder: _use(folder), folder)
        (folder / LAST).unlink()
        rows.append((name, verdict.outcome, _reason(verdict, folder), f"{max(0.0, verdict.growth_mib):.0f} MiB"))
        if verdict.fault or verdict.outcome != "CheckpointError" or (folder / "exploded").exists():
            failures.append(f"{name}: {verdict.fault or verdict.outcome}")
    return FaultTable(
        "Checkpoints from strangers",
        ("checkpoint", "ends with", "reason", "growth"),
        tuple(rows),
        tuple(failures),
        ("Each is resumed, begun from, transcribed with and averaged; no code ran, no other file was written.",),
    )


def _use(folder: Path) -> None:
    os.chdir(folder)  # only in the child process: `watch` forks
    load_in_all_ways(folder / LAST)


def _reason(verdict: Verdict, folder: Path) -> str:
    """Return the reason in the error message, without file name and advice."""
    message = verdict.message.replace(str(folder / LAST), "").replace("|", "\\|").split("\n")[0]
    return (
        message.split(" Use another")[0]
        .removeprefix("The checkpoint  is damaged or not a KonkaniVani checkpoint ")
        .strip("().")[:90]
    )


COUNTS: dict[Kind, int] = {"audio": 10_000, "media": 1_000, "manifests": 5_000, "checkpoints": 1_000, "flags": 2_000}
NAMES: dict[Kind, str] = {
    "audio": "audio headers",
    "media": "containers of sound and film",
    "manifests": "manifest lines",
    "checkpoints": "checkpoints",
    "flags": "sets of flags",
}
MAX_NAMED = 5  # faults listed per kind of input


def measure_fuzz(effort: Effort) -> FaultTable:
    """Return a table with a row per kind of input."""
    run = train_small_run(effort.folder / "run")
    rows, failures = [], []
    for kind, full in COUNTS.items():
        tally = fuzz(kind, effort.count(full, full // 100), effort.seed, effort.folder / kind, run)
        refused = {name: count for name, count in sorted(tally.outcomes.items()) if name not in ("taken", "fault")}
        outcomes = ", ".join(f"{count:,} {name}" for name, count in refused.items())
        total = f"{sum(tally.outcomes.values()):,}"
        numbers = f"{tally.slowest:.2f} s", f"{max(0.0, tally.largest):.0f} MiB", str(tally.outcomes["fault"])
        rows.append((NAMES[kind], total, f"{tally.outcomes['taken']:,}", outcomes, *numbers))
        failures += [f"{NAMES[kind]}: {fault}" for fault in tally.faults[-MAX_NAMED:]]
    return FaultTable(
        "Input changed at random",
        ("input", "tried", "taken", "refused with an error of ours", "slowest", "largest growth", "faults"),
        tuple(rows),
        tuple(failures),
        (
            "A fault: another error, a hang over 5 s, growth over 200 MiB, a file written elsewhere, a program started;"
            " of containers also 5 s of a processor or 250 MiB in the process that decodes, or its death.",
        ),
    )


Part = Literal["kills", "signals", "resumes", "files", "disk_full", "numbers", "loaders", "untrusted_input", "fuzz"]


@dataclass(frozen=True)
class Flags(PartsFlags):
    """Flags of this script."""

    parts: tuple[Part, ...] = get_args(Part)
    """Kinds of faults."""


MEASURES = {
    "kills": measure_kills,
    "signals": measure_signals,
    "resumes": measure_resumes,
    "files": measure_files,
    "disk_full": measure_disk_full,
    "numbers": measure_numbers,
    "loaders": measure_loaders,
    "untrusted_input": measure_untrusted_input,
    "fuzz": measure_fuzz,
}

if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:], Flags())
    sys.exit(run_parts(MEASURES, flags.parts, flags))
