"""Folders of a run's logs and checkpoints, which may contain files of an earlier run, and its open logs.

Only one process at a time may use a log folder. Files of an earlier run are moved to a separate folder as a whole, with
a message, and never overwritten.
"""

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import Checkpoint
from konkanivani.checkpoints.checkpointer import Checkpointer, first_free_name
from konkanivani.checkpoints.run_lock import LOCK_NAME, LOGGING, RunLock, check_nobody_works
from konkanivani.config import RunConfig, TrainConfig
from konkanivani.console import count, say
from konkanivani.errors import ResourceError, UsageError, explained
from konkanivani.files import scratch_folder, visible_entries
from konkanivani.flags import config_to_text
from konkanivani.memory.monitor import BudgetWatch
from konkanivani.training.logbook import LOG_NAME, Logbook
from konkanivani.training.progress import Progress, Resumed, Utilisation
from konkanivani.training.run import RunLogs, TrainState
from konkanivani.training.step import StepParts

REJECTED = "rejected.jsonl"
REJECTED_BEFORE = "rejected_before.jsonl"


@dataclasses.dataclass(frozen=True)
class LogFolder:
    """Log folder of a run and its lock; the lock is None in a dry run."""

    run: RunConfig
    lock: RunLock | None


def take_log_folder(run: RunConfig, earlier: RunConfig | None) -> LogFolder:
    """Choose the log folder of a run and lock it.

    A log belongs to one checkpoint folder. A run with another checkpoint folder, such as a copy of it, logs under a new
    name and prints it; after a resume, the log of the original is copied there.

    Args:
        run: settings of this run.
        earlier: settings in its checkpoint; None for a new run.

    Raises a ResourceError that names the process that is logging there.
    """
    folder = run_folder(run)
    owner = _other_owner(run, earlier)
    # A log in use is not avoided by a new run: _lock raises an error that names the process.
    if owner is not None and (earlier or not _is_logged_to(folder)):
        named_run = dataclasses.replace(run, run_name=_own_name(run))
        say(f"{folder} is the log of the run in {owner}: this run logs to {run_folder(named_run)}.")
        return LogFolder(named_run, _lock(named_run, copied_from=folder if earlier else None))
    return LogFolder(run, _lock(run, copied_from=None))


def run_folder(run: RunConfig) -> Path:
    """Return the run's log folder."""
    return Path(run.log_dir) / run.run_name


def _lock(run: RunConfig, copied_from: Path | None) -> RunLock | None:
    folder = run_folder(run)
    _check_is_log(folder)
    if run.dry_run:
        check_nobody_works(folder, LOGGING)
        return None
    is_new = not (folder / LOCK_NAME).exists()
    # Relative to the log folder, see _owner_of.
    lock = RunLock(folder, LOGGING, note=os.path.relpath(_checkpoints_of(run), os.path.realpath(folder)))
    if copied_from and is_new:
        # Only into a new folder: a second start must not copy the original's log over its own.
        try:
            with lock.errors_explained():
                shutil.copytree(copied_from, folder, ignore=shutil.ignore_patterns(LOCK_NAME), dirs_exist_ok=True)
        except BaseException:
            lock.path.unlink(missing_ok=True)  # the next start has to copy again
            raise
    return lock


def _check_is_log(folder: Path) -> None:
    """Raise a UsageError if the folder is not a log, for example a corpus, and would be moved aside as one."""
    is_log = not folder.is_dir() or (folder / LOG_NAME).exists() or _owner_of(folder) is not None
    names = () if is_log else (path.name for path in visible_entries(folder))
    for name in (name for name in names if not name.startswith(("events.", "rejected"))):
        raise UsageError(
            f"{folder} contains {name} and is not the log of a run: choose another --log_dir or --run_name."
        )


def _other_owner(run: RunConfig, earlier: RunConfig | None) -> Path | None:
    """Return the checkpoint folder that the log belongs to, if it is another one and still contains a run.

    A log of a version that did not record its owner belongs to the run that has logged there before.
    """
    folder = run_folder(run)
    owner = _owner_of(folder)
    if owner is not None:
        return owner if owner != _checkpoints_of(run) and Checkpointer(owner, keep=2).has_checkpoints() else None
    is_its_own = earlier is None or (earlier.log_dir, earlier.run_name) == (run.log_dir, run.run_name)
    return None if is_its_own or not (folder / LOG_NAME).is_file() else Path("another folder")


def _checkpoints_of(run: RunConfig) -> Path:
    return Path(os.path.realpath(run.checkpoint_dir))


def _owner_of(folder: Path) -> Path | None:
    """Return the checkpoint folder named in the log folder, by a relative path: a project may be copied whole."""
    try:
        # Paths may contain bytes that are not UTF-8.
        lines = (folder / LOCK_NAME).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    return Path(os.path.realpath(folder / lines[1])) if len(lines) > 1 else None


def _own_name(run: RunConfig) -> str:
    """Return a run name after the checkpoint folder that is unused, or already belongs to this run."""
    checkpoints = _checkpoints_of(run)
    name = checkpoints.name or run.run_name  # the name of the root folder is empty
    named_run = dataclasses.replace(run, run_name=name)
    if not run_folder(named_run).exists() or _owner_of(run_folder(named_run)) == checkpoints:
        return name
    return first_free_name(Path(run.log_dir), name).name


def _is_logged_to(folder: Path) -> bool:
    try:
        check_nobody_works(folder, LOGGING)
    except ResourceError:
        return True
    return False


@contextlib.contextmanager
def listing_rejected(run_directory: Path | None, is_resumed: bool) -> Iterator[Path | None]:
    """Yield the file in which a start lists rejected utterances; None without a folder.

    The list of an earlier run is renamed until its folder is moved aside; it is renamed back if the start fails before
    it rejects any utterance.
    """
    if run_directory is None:
        yield None
        return
    listed = run_directory / REJECTED
    before = run_directory / REJECTED_BEFORE
    # If both exist, `listed` is of a failed start, and the earlier run's list is already renamed.
    if not is_resumed and listed.exists() and not before.exists():
        listed.rename(before)
    try:
        yield listed
    # BaseException: a keyboard interrupt restores the list as well.
    except BaseException:
        if not listed.exists() or not listed.stat().st_size:
            listed.unlink(missing_ok=True)
            if before.exists():
                before.rename(listed)
        raise


def move_aside(checkpointer: Checkpointer, run_directory: Path) -> None:
    """Move the files of an old run aside, as the last step of a successful start."""
    checkpoints = checkpointer.move_aside()
    if checkpoints:
        say(f"The old checkpoints were moved to {checkpoints}.")
    # The list and the lock of the new run stay.
    logs = [path for path in run_directory.iterdir() if path.name not in (REJECTED, LOCK_NAME)]
    if logs:
        aside = first_free_name(run_directory.parent, f"{run_directory.name}_replaced")
        aside.mkdir()
        for path in logs:
            path.rename(aside / path.name.replace(REJECTED_BEFORE, REJECTED))
        say(f"The old logs of this run name were moved to {aside}.")


def move_newer_aside(checkpointer: Checkpointer, run_directory: Path, resumed: Path, checkpoint: Checkpoint) -> None:
    """Move checkpoints newer than `resumed` aside, and copy the log with them.

    The copy is made first: if the process is killed in between, both are still there, and the next start does it again.
    """
    step = checkpoint.step
    newer = checkpointer.newer_than(resumed, step)
    if not newer:
        return
    steps = [newer_step for newer_step in newer.values() if newer_step is not None]
    back = f"{count(max(steps) - step, 'step')} behind the newest" if steps else "older than a damaged newer checkpoint"
    say(f"Resuming from an older checkpoint: {resumed.name} is {back} in {checkpointer.directory}.")
    copied = _copy_aside(run_directory)
    aside = checkpointer.move_aside(newer)
    names = ", ".join(sorted(path.name for path in newer))
    logs = f", a copy of the log to {copied}" if copied else ""
    say(f"The newer files ({names}) were moved to {aside}{logs}.")


def _copy_aside(run_directory: Path) -> Path | None:
    """Copy everything that the run has logged, completely or not at all; None if there is nothing to copy."""
    if not any(path.name != LOCK_NAME for path in run_directory.iterdir()):
        return None
    aside = first_free_name(run_directory.parent, f"{run_directory.name}_replaced")
    # A killed copy leaves only a .partial folder, which the next start deletes.
    partial = aside.with_name(aside.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run_directory, partial, ignore=shutil.ignore_patterns(LOCK_NAME))
        partial.rename(aside)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"The log in {run_directory} cannot be copied to {aside}: {error.strerror or error}. Free disk space there."
        ) from None
    return aside


def make_run_directory(run: RunConfig) -> Path:
    """Create and return the run's log folder."""
    directory = run_folder(run)
    with explained(ResourceError, f"The log folder {directory} cannot be created", "Choose another --log_dir."):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def scratch_config(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the configuration with scratch folders inside the run's: same disk, same permissions."""
    run = config.run
    with scratch_folder(Path(run.checkpoint_dir)) as checkpoints, scratch_folder(Path(run.log_dir)) as logs:
        folders = dataclasses.replace(run, checkpoint_dir=str(checkpoints), log_dir=str(logs))
        tuning = dataclasses.replace(config.tuning, freeze_steps=0)  # train all layers: --freeze_steps are the cheapest
        yield dataclasses.replace(config, run=folders, tuning=tuning)


def open_logs(
    config: TrainConfig, step: StepParts, state: TrainState, run_directory: Path | None, watch: BudgetWatch
) -> RunLogs:
    """Return the logs of a run; they are written to `run_directory`, on the first rank only."""
    resumed = Resumed(state.step, state.skipped_steps, state.epochs_finished, state.initial_cer < math.inf)
    logbook = Logbook(run_directory, resumed=resumed)
    logbook.log_settings(config_to_text(config))
    forward = step.forward
    return RunLogs(
        logbook=logbook,
        progress=Progress(state.step, step.total_steps, step.architecture.framing.unit),
        utilisation=Utilisation(step.architecture, forward.device, forward.amp_dtype or torch.float32),
        watch=watch,
    )
