"""Killed and resumed runs, compared bit for bit with the undisturbed run of the same settings."""

import functools
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from tests.conftest import (
    TINY_MODEL,
    TRAINER,
    Corpus,
    read_log,
    run_folders,
    script_command,
    start_cold,
    write_augmentation,
    write_corpus,
    write_shards,
)
from tests.faults.faulty_runs import Fault, FinishedRun, run_with_faults, wait_for_run
from tests.fork_server import Fork
from tests.timeouts import PROCESS_TIMEOUT

STEPS = 17  # 7 global batches per epoch: two epochs and three global batches of a third
SCHEDULE = ("--epochs", "3", "--max_steps", str(STEPS), "--save_steps", "2")
TWO_BY_TWO = ("--batch_size", "2", "--gradient_accumulation_steps", "2")
ONE_BY_FOUR = ("--batch_size", "1", "--gradient_accumulation_steps", "4")
HALF_SCALE = 2.0**24  # seven global batches are skipped until the scale fits, and one a little later
POISONED = "audio/train_014.flac"  # name in the manifest; the squares of its samples overflow to infinity
# Measurements of time and memory; every other value in the log is determined by the training.
MEASUREMENTS = (
    *("audio_seconds_per_second", "seconds", "waiting_seconds", "model_flops_utilisation", "gpu_utilisation"),
    *("memory", "cache_clearing_seconds", "rank_peaks_mib"),
)

Source = Literal["files", "shards", "surrounded", "poisoned"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
# Values that do not depend on the split into micro-batches, unlike padding and dropout.
SPLIT_INDEPENDENT = ("step", "epoch", "learning_rate", "tokens", "utterances", "skipped_steps")
COUNTERS = ("step", "epoch", "window", "epochs_finished", "skipped_steps", "audio_seconds")


@dataclass(frozen=True)
class Settings:
    """Settings shared by a disturbed run and its undisturbed reference. `splits`: pairs above 1.5 s exceed memory."""

    source: Source = "files"
    precision: Precision = "fp32"
    splits: bool = False
    more: tuple[str, ...] = ()

    def faults(self) -> list[Fault]:
        by_precision = {"fp16": [("half_precision", HALF_SCALE)], "fp64": [("double_precision",)]}
        return by_precision.get(self.precision, []) + ([("out_of_memory", 1, 1.5)] if self.splits else [])

    def flags(self) -> tuple[str, ...]:
        precision = ("--mixed_precision",) if self.precision in ("fp16", "bf16") else ()
        return (*TINY_MODEL, "--encoder_layers", "1", *TWO_BY_TWO, *SCHEDULE, *precision, *self.more)


@dataclass(frozen=True)
class ResumeCase:
    """One process per stop and a last one that trains to the end, each with its number of audio workers."""

    name: str
    settings: Settings
    stops: tuple[Fault, ...]
    workers: tuple[int, ...]
    resumed_flags: tuple[str, ...] = ()
    resumed_faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.workers) == len(self.stops) + 1, self.name


KILLED_AFTER_SAVE = (("kill", "after the save of a global batch", 4),)
STOPS: dict[str, tuple[Fault, ...]] = {
    "mid-epoch, after a save": KILLED_AFTER_SAVE,
    "mid-epoch, between two saves": (("kill", "before the save of a global batch", 5),),
    "between two micro-batches": (("kill", "in a step", 11),),
    "in an update": (("kill", "in the update", 10),),
    "SIGTERM in a step": (("terminate", 10),),
    "epoch boundary, before its validation": (("kill", "before a validation", 1),),
    "epoch boundary, before its save": (("kill", "after a validation", 1),),
    "epoch boundary, after its save": (("kill", "in a step", 15),),
    "in a save, before the rename": (("kill", "before a checkpoint is renamed", 3),),
    "in a save, between two names": (("kill", "between two names of a checkpoint", 2),),
    "before the first save": (("kill", "in a step", 2),),
    "twice in one epoch": (("kill", "after the save of a global batch", 8), ("kill", "in a step", 5)),
    "in each epoch": (("kill", "in a step", 9), ("kill", "in a step", 9), ("kill", "in a step", 15)),
}
WORKERS = ((0, 2), (2, 0), (1, 4), (4, 1), (2, 2), (0, 0), (1, 2), (4, 0), (0, 1))


def resume_cases() -> list[ResumeCase]:
    """Return all cases, cycling through the numbers of audio workers."""
    cases: list[ResumeCase] = []

    def add(name: str, settings: Settings, stops: tuple[Fault, ...]) -> None:
        pair = WORKERS[len(cases) % len(WORKERS)]
        workers = tuple(pair[number % 2] for number in range(len(stops) + 1))
        cases.append(ResumeCase(name, settings, stops, workers))

    for name, stops in STOPS.items():
        add(name, Settings(), stops)
        add(name, Settings(precision="bf16"), stops)
    for name in ("mid-epoch, between two saves", "epoch boundary, after its save", "twice in one epoch"):
        add(name, Settings("shards"), STOPS[name])
        add(name, Settings("shards", "bf16"), STOPS[name])
        add(name, Settings("surrounded"), STOPS[name])
    for number in (2, 3, 5, 8):
        for precision in ("fp32", "bf16"):
            stops = (("kill", "after the save of a global batch", number),)
            add(f"after global batch {number}, out of memory before", Settings(precision=precision, splits=True), stops)
    for number in (3, 7, 12, 13):
        stops = (("kill", "after the save of a global batch", number),)
        add(f"after global batch {number}, fp16 steps skipped before", Settings(precision="fp16"), stops)
    add("twice in one epoch, fp16 steps skipped", Settings(precision="fp16"), STOPS["twice in one epoch"])
    for number in (4, 6):
        stops = (("kill", "after the save of a global batch", number),)
        add(f"after global batch {number}, poisoned audio skipped", Settings("poisoned"), stops)
    for more in (
        ("--gradient_checkpointing", "always"),
        ("--intermediate_ctc_weight", "0.3"),
        ("--empty_cache_interval", "1"),
    ):
        add(f"between two saves, {more[0]}", Settings(more=more), STOPS["mid-epoch, between two saves"])
    return cases


def resplit_cases() -> list[ResumeCase]:
    """Return cases that resume with another micro-batch size.

    The fp32 sums differ, so the weights are compared in fp64 without dropout.
    """
    cases = []
    exact = Settings(precision="fp64", more=("--dropout", "0"))
    for name in ("mid-epoch, after a save", "between two micro-batches", "twice in one epoch"):
        for settings in (Settings(), exact):
            workers = (0, 2, 1)[: len(STOPS[name]) + 1]
            cases.append(ResumeCase(f"{name}, cut 1 x 4", settings, STOPS[name], workers, ONE_BY_FOUR))
    return cases


def control_cases() -> list[ResumeCase]:
    """Return negative controls: cases with another seed, for the whole run or for one step."""
    stopped = KILLED_AFTER_SAVE
    return [
        ResumeCase("another --seed", Settings(), stopped, (0, 0), resumed_flags=("--seed", "4321")),
        ResumeCase("one step's seed", Settings(), stopped, (0, 0), resumed_faults=(("other_dropout_seed", 9),)),
    ]


@dataclass
class ResumeBench:
    """Corpora and undisturbed runs, each created once."""

    folder: Path
    _undisturbed: dict[Settings, Path] = field(default_factory=dict)

    @functools.cached_property
    def corpus(self) -> Corpus:
        return write_corpus(self.folder / "tones", {"train": 26, "valid": 5, "test": 5})

    @functools.cached_property
    def shards(self) -> Corpus:
        return write_shards(self.corpus, self.folder / "shards")

    @functools.cached_property
    def poisoned(self) -> Corpus:
        """Return the corpus with one utterance whose file is valid but whose power overflows fp32."""
        return poisoned_corpus(self.folder / "poisoned")

    @functools.cached_property
    def surroundings(self) -> tuple[str, ...]:
        return write_augmentation(self.folder / "sounds")

    def flags(self, settings: Settings, directory: Path, workers: int) -> tuple[str, ...]:
        corpora = {"files": "corpus", "surrounded": "shards"}
        corpus = getattr(self, corpora.get(settings.source, settings.source))
        sounds = self.surroundings if settings.source == "surrounded" else ()
        return (*settings.flags(), *corpus.flags(), *sounds, *run_folders(directory), *("--num_workers", str(workers)))

    def undisturbed(self, settings: Settings) -> Path:
        if settings not in self._undisturbed:
            directory = self.folder / f"undisturbed_{len(self._undisturbed)}"
            flags = self.flags(settings, directory, workers=0)
            ended = run_with_faults(flags, directory / "output.txt", settings.faults())
            assert ended.code == 0, ended.output
            assert _has_expected_skips(settings, directory), f"nothing was skipped or split: {settings}"
            self._undisturbed[settings] = directory
        return self._undisturbed[settings]

    def exit_code_errors(self, case: ResumeCase, directory: Path) -> list[str]:
        """Run the case and return sentences on unexpected exit codes."""
        wrong = []
        for number, workers in enumerate(case.workers):
            stops, is_last = case.stops[number : number + 1], number == len(case.stops)
            flags = self.flags(case.settings, directory, workers) + (("--resume", "auto") if number else ())
            flags += case.resumed_flags if is_last else ()
            faults = [*case.settings.faults(), *stops, *(case.resumed_faults if is_last else ())]
            ended = run_with_faults(flags, directory / f"output_{number}.txt", faults)
            wrong += _exit_code_errors(ended, stops)
            if number and "Resuming from" not in ended.output and case.stops != STOPS["before the first save"]:
                wrong.append(f"process {number + 1} started again from step 0")
        return wrong

    def differences(self, case: ResumeCase, directory: Path) -> list[str]:
        """Run the case in `directory` and return all differences from the undisturbed run of its settings."""
        undisturbed = self.undisturbed(case.settings)
        return self.exit_code_errors(case, directory) + run_differences(undisturbed, directory)

    def resume_errors(self, directory: Path) -> list[str]:
        """Resume the run with default settings in `directory` and return the errors."""
        resumed = run_with_faults(
            (*self.flags(Settings(), directory, 0), "--resume", "auto"), directory / "resumed.txt"
        )
        if resumed.code:
            return [f"it could not be resumed: {resumed.output[-600:]}"]
        return run_differences(self.undisturbed(Settings()), directory)

    def new_interpreter_differences(self, killed_at: int, workers: tuple[int, int], directory: Path) -> list[str]:
        """Return the differences with two new interpreters, the first killed from outside at a logged step."""
        undisturbed = self.undisturbed(Settings())
        output = directory / "output.txt"
        directory.mkdir()
        killed = start_cold(script_command(TRAINER, *self.flags(Settings(), directory, workers[0])), output, threads=1)
        assert signal_after(directory, killed_at, killed, signal.SIGKILL) == -signal.SIGKILL
        flags = (*self.flags(Settings(), directory, workers[1]), "--resume", "auto")
        ended = wait_for_run(start_cold(script_command(TRAINER, *flags), output, threads=1), output)
        wrong = _exit_code_errors(ended, ())
        if "Resuming from" not in ended.output:
            wrong.append("it started again from step 0")
        return wrong + run_differences(undisturbed, directory)

    def resplit_differences(self, case: ResumeCase, directory: Path) -> list[str]:
        """Return the differences with another micro-batch size: exact order and counters, weights to 1e-9 in fp64."""
        undisturbed = self.undisturbed(case.settings)
        result = self.exit_code_errors(case, directory)
        logs = [read_log(run) for run in (undisturbed, directory)]
        for name in SPLIT_INDEPENDENT:
            if [record[name] for record in logs[0]] != [record[name] for record in logs[1]]:
                result.append(f"{name} differs in the log")
        one, other = (last_checkpoint(run) for run in (undisturbed, directory))
        progress = one.states["progress"], other.states["progress"]
        result += [f"progress/{name}" for name in COUNTERS if progress[0][name] != progress[1][name]]
        if one.plan_digest != other.plan_digest:
            result.append("the plan of the epochs differs")
        return result + (_distant_tensors(one, other) if case.settings.precision == "fp64" else [])


def _distant_tensors(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the weights and moments that differ by more than 1e-9 of their norm."""
    pairs = [
        (f"{part}/{name}", tensor, other.states[part][name])
        for part in ("model", "optimizer")
        for name, tensor in one.states[part].items()
    ]
    return [f"{name} is another" for name, mine, theirs in pairs if (mine - theirs).norm() > 1e-9 * mine.norm()]


def _has_expected_skips(settings: Settings, directory: Path) -> bool:
    """Return whether the log shows exactly the skips and splits that the settings cause."""
    skips, splits = len(read_log(directory, "skip")), sum(record["splits"] for record in read_log(directory))
    is_skipped = settings.precision == "fp16" or settings.source == "poisoned"
    return bool(skips) == is_skipped and bool(splits) == settings.splits


def signal_after(directory: Path, step: int, process: Fork | subprocess.Popen, number: signal.Signals) -> int:
    """Send a signal to a run in this directory once its log has `step`; return its exit code."""
    log = directory / "runs" / "default" / "log.jsonl"
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while not (log.exists() and f'"step": {step},' in log.read_text(encoding="utf-8")):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it was sent a signal"
        time.sleep(0.01)
    os.kill(process.pid, number)
    return process.wait(PROCESS_TIMEOUT)


def _exit_code_errors(ended: FinishedRun, stops: Sequence[Fault]) -> list[str]:
    expected = 0 if not stops else 143 if stops[0][0] == "terminate" else -9
    return [] if ended.code == expected else [f"a process ended with {ended.code}: {ended.output[-600:]}"]


def run_differences(one: Path, other: Path) -> list[str]:
    """Return the differences between the logs, skipped global batches and last checkpoints of two runs, bit for bit."""
    results = []
    for kind in ("step", "skip", "validation"):
        logs = [
            [
                {name: value for name, value in record.items() if name not in MEASUREMENTS}
                for record in read_log(run, kind)
            ]
            for run in (one, other)
        ]
        places = [[record["step"] for record in log] for log in logs]
        if places[0] != places[1]:
            results.append(f"the log has {kind} records at {places[1]}, not {places[0]}")
        else:
            results += [
                f"log.jsonl {kind} {mine['step']}: {name} is {theirs.get(name)}, not {mine[name]}"
                for mine, theirs in zip(*logs, strict=True)
                for name in mine
                if mine[name] != theirs.get(name)
            ]
    return results + checkpoint_differences(*(last_checkpoint(directory) for directory in (one, other)))


def last_checkpoint(directory: Path) -> Checkpoint:
    return read_checkpoint(directory / "checkpoints" / LAST)


def checkpoint_differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Return every tensor and number that differs between two checkpoints by one bit or more."""
    results = [f"only one of them has the state {name}" for name in one.states.keys() ^ other.states.keys()]
    for part in one.states.keys() & other.states.keys():
        mine, theirs = one.states[part], other.states[part]
        names = mine.keys() | theirs.keys()
        results += [f"{part}/{name}" for name in sorted(names) if not _is_identical(mine.get(name), theirs.get(name))]
    return results


def _is_identical(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and one.numpy().tobytes() == other.numpy().tobytes()
    return type(one) is type(other) and one == other


def poisoned_corpus(directory: Path) -> Corpus:
    """Write a corpus with one utterance of finite samples and infinite power."""
    corpus = write_corpus(directory, {"train": 26, "valid": 5})
    path = directory / POISONED
    samples, rate = soundfile.read(path, dtype="float32")
    # FLAC cannot store such numbers; libsndfile detects the format from the content, not from the name.
    soundfile.write(path, samples * np.float32(1e30), rate, subtype="FLOAT", format="WAV")
    return corpus
