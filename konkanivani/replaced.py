"""What a run finds of earlier ones under its names is moved aside, whole and told, and never written over."""

import shutil
from pathlib import Path

from konkanivani.base.console import count, say
from konkanivani.base.errors import ResourceError
from konkanivani.training.checkpoint.checkpoint import Checkpoint
from konkanivani.training.checkpoint.checkpointer import Checkpointer, first_free_name
from konkanivani.training.checkpoint.run_lock import LOCK_NAME

REJECTED = "rejected.jsonl"
REJECTED_BEFORE = "rejected_before.jsonl"


def keep_rejected(run_directory: Path) -> None:
    """Gives an earlier run's list of what it left out another name, until its folder is moved aside."""
    if (run_directory / REJECTED).exists() and not (run_directory / REJECTED_BEFORE).exists():
        (run_directory / REJECTED).rename(run_directory / REJECTED_BEFORE)


def move_aside(checkpointer: Checkpointer, run_directory: Path) -> None:
    """Moves an old run's files aside, once all that can go wrong with the new one's beginning has gone right."""
    checkpoints = checkpointer.move_aside()
    if checkpoints:
        say(f"The old checkpoints are now in {checkpoints}.")
    logs = [path for path in run_directory.iterdir() if path.name not in (REJECTED, LOCK_NAME)]
    if logs:
        aside = first_free_name(run_directory.parent, f"{run_directory.name}_replaced")
        aside.mkdir()
        for path in logs:
            path.rename(aside / path.name.replace(REJECTED_BEFORE, REJECTED))
        say(f"The old logs of this run's name are now in {aside}.")


def move_newer_aside(checkpointer: Checkpointer, run_directory: Path, resumed: Path, checkpoint: Checkpoint) -> None:
    """Moves aside what is newer than the checkpoint at `resumed` that a run goes back to, its log copied as it is.

    The copy comes first: a kill in between leaves both to be found, and the next start does it again.
    """
    step, progress = checkpoint.step, checkpoint.states["progress"]
    newer = checkpointer.newer_than(resumed, step)
    if not newer:
        return
    steps = [found.step for found in newer if found.step is not None]
    back = f"{count(max(steps) - step, 'step')} behind the newest" if steps else "behind a newer one that is damaged"
    say(f"This goes back: {resumed.name} is {back} in {checkpointer.directory}.")
    copied = _copy_aside(run_directory)
    aside = checkpointer.move_aside([found.path for found in newer])
    checkpointer.restore_best(progress["epochs_finished"] - progress["epochs_without_improvement"])
    names = ", ".join(sorted(found.path.name for found in newer))
    logs = f", the log up to there in {copied}" if copied else ""
    say(f"What is newer ({names}) is now in {aside}{logs}.")


def _copy_aside(run_directory: Path) -> Path | None:
    """The copy of all that the run has logged; None where that is nothing. Whole or absent."""
    if not any(path.name != LOCK_NAME for path in run_directory.iterdir()):
        return None
    aside = first_free_name(run_directory.parent, f"{run_directory.name}_replaced")
    partial = aside.with_name(aside.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run_directory, partial, ignore=shutil.ignore_patterns(LOCK_NAME))
        partial.rename(aside)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"The log in {run_directory} cannot be copied to {aside}: {error.strerror or error}. Free space there."
        ) from None
    return aside
