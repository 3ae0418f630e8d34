"""Checkpoints made by an attacker: the error for each, and the memory until it is rejected."""

import os
from pathlib import Path

from benchmarks.measuring.faults.effort import Effort, FaultTable
from konkanivani.training.checkpoint.checkpointer import LAST
from tests.faults.small_run import train_small_run
from tests.faults.untrusted_input import HOSTILE, configured, read_sound, use_everywhere
from tests.faults.watching import Verdict, watch


def measure(effort: Effort) -> FaultTable:
    """Return a table with a row per checkpoint; all are tried at any effort."""
    path = effort.folder / "sound.pt"
    configured("--log_dir 'runs'")(read_sound(train_small_run(effort.folder / "run") / "checkpoints" / LAST), path)
    sound = read_sound(path)
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
    use_everywhere(folder / LAST)


def _reason(verdict: Verdict, folder: Path) -> str:
    """Return the reason in the error message, without file name and advice."""
    message = verdict.message.replace(str(folder / LAST), "").replace("|", "\\|").split("\n")[0]
    return (
        message.split(" Use another")[0]
        .removeprefix("The checkpoint  is damaged or not a KonkaniVani checkpoint ")
        .strip("().")[:90]
    )
