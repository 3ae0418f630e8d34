"""Checkpoint folder of a run: atomic publication by rename, retention, and search for the newest valid checkpoint."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import (
    Checkpoint,
    OtherVersionError,
    is_whole,
    read_checkpoint,
    read_step,
    write_checkpoint,
)
from konkanivani.console import say
from konkanivani.errors import CheckpointError, NumericsError, ResourceError

LAST = "checkpoint_last.pt"
PREVIOUS = "checkpoint_previous.pt"
BEST = "checkpoint_best.pt"
REHEARSAL = "rehearsal.partial"
EPOCH_NAME = re.compile(r"checkpoint_epoch_(\d+)\.pt")


class Checkpointer:
    """Checkpoints of one folder: last, previous, best, and the newest `keep` epochs."""

    def __init__(self, directory: str | Path, keep: int, step_of_last: int | None = None) -> None:
        """`step_of_last` is the step of the checkpoint that the run is resumed from."""
        self.directory = Path(directory)
        self.keep = keep
        self._step_of_last = step_of_last

    def has_checkpoints(self) -> bool:
        """Return whether a run has saved a checkpoint here, valid or not."""
        return bool(self._candidates() or self._damaged_checkpoints())

    def save(self, checkpoint: Checkpoint, epoch: int | None = None, is_best: bool = False) -> Path:
        """Publish the checkpoint as checkpoint_last.pt, and optionally as epoch `epoch` and as the best one.

        If the process is killed, every name refers to a complete file. Nothing is replaced or deleted before the new
        file has been read back. The replaced `last` becomes `previous`, unless it is of the same step (its weights are
        the same) or has been damaged since, in which case `previous` stays.

        Raises:
            ResourceError: writing failed; no existing name is lost.
            NumericsError: a number is not finite; such a state is never published.
        """
        self._check_finite(checkpoint)
        # Written once under a temporary name, then linked or renamed to its names.
        partial = self.directory / (LAST + ".partial")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # A partial file left by a kill may be a hard link to an epoch or the best checkpoint: never overwrite it.
            partial.unlink(missing_ok=True)
            write_checkpoint(partial, checkpoint)
            # Read back from the disk: a failing disk or a network folder may lose data without an error.
            if not is_whole(partial):
                partial.unlink(missing_ok=True)
                raise ResourceError(
                    f"The checkpoint {partial} was deleted: read back, it differs from the data written. Check "
                    f"the disk of {self.directory}, or choose another --checkpoint_dir."
                )
            if epoch is not None:
                _link(partial, self.directory / f"checkpoint_epoch_{epoch}.pt")
            if is_best:
                _link(partial, self.directory / BEST)
            last = self.directory / LAST
            if last.exists() and checkpoint.step != self._step_of_last and is_whole(last):
                _link(last, self.directory / PREVIOUS)
            # Last, so that a kill before this line leaves `last` at the old checkpoint.
            os.replace(partial, last)
            self._step_of_last = checkpoint.step
            # The renames are durable only after the directory itself is synced.
            _sync_directory(self.directory)
            # Old epochs are deleted only after the new checkpoint has its name.
            for path in epochs_in(self.directory)[self.keep :]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self.discard_unfinished()
            raise ResourceError(
                f"The checkpoint folder {self.directory} cannot be written: {error.strerror or error}. Free "
                "disk space, fix its permissions, or choose another --checkpoint_dir."
            ) from None
        return last

    @property
    def rehearsal_path(self) -> Path:
        """Path of the state before the rehearsal of the largest batches."""
        return self.directory / REHEARSAL

    def discard_unfinished(self) -> None:
        """Remove partial files of a run: of this process, or of one that was killed."""
        with contextlib.suppress(OSError):
            for partial in self.directory.glob("*.partial"):
                # Not those of another command that writes to this folder.
                if partial.name == REHEARSAL or is_name_of_a_run(partial.with_suffix("")):
                    partial.unlink()

    def read_newest_sound(self, sets_aside: bool = True) -> tuple[Path, Checkpoint] | None:
        """Return the valid checkpoint with the most steps; None if the folder has none.

        Damaged ones that are found on the way are reported and, with `sets_aside`, renamed to *.damaged. If none is
        valid, a CheckpointError is raised, because a new run in the same folder would replace them. A message is
        printed if the last checkpoint is missing or older than another, which happens if a write is lost with its
        machine or never reaches a cloud drive.
        """
        damaged = len(self._damaged_checkpoints())
        is_damaged = False
        for path in self._newest_first():
            try:
                checkpoint = read_checkpoint(path)
                if path.name != LAST and not is_damaged:
                    say(self._late_write_message(path, checkpoint.step))
                return path, checkpoint
            except OtherVersionError:
                raise  # not damaged: renaming would hide it from the version that wrote it
            except CheckpointError as error:
                damaged += 1
                is_damaged = True
                aside = path.with_name(path.name + ".damaged")
                if sets_aside:
                    os.replace(path, aside)
                moved = f"Renamed to {aside.name}. " if sets_aside else ""
                say(f"{error} {moved}Trying the previous one.")
        if damaged:
            renamed = ", all were renamed to *.damaged" if sets_aside else ""
            raise CheckpointError(
                f"None of the {damaged} checkpoints in {self.directory} is valid{renamed}. "
                "Restore a backup, or start a new run with --fresh."
            )
        return None

    def _newest_first(self) -> list[Path]:
        """Return the checkpoints, most steps first; an unreadable `last` or `previous` counts as newest.

        Names are not sufficient: after a crash a name may refer to an older file again.
        """
        candidates = self._candidates()
        # read_step() reads only the pickle, not the tensors.
        steps = {path: read_step(path) for path in candidates}
        newest = max((step for step in steps.values() if step is not None), default=0)
        unread = {LAST: newest, PREVIOUS: newest}

        def step_of(path: Path) -> int:
            step = steps[path]
            return unread.get(path.name, -1) if step is None else step

        return sorted(candidates, key=step_of, reverse=True)

    def _late_write_message(self, path: Path, step: int) -> str:
        """Return a message with the reason for using `path` instead of the last checkpoint."""
        last = self.directory / LAST
        state = f"is of step {read_step(last)}" if last.is_file() else "is missing"
        return (
            f"{last} {state}: its last write has not arrived, or it was moved. The newest valid checkpoint is "
            f"{path.name}, step {step}."
        )

    def newest_before(self, step: int) -> Path | None:
        """Return the valid checkpoint with the most steps before `step`: its weights gave a finite gradient once."""
        for path in self._newest_first():
            with contextlib.suppress(CheckpointError, ResourceError):
                if read_checkpoint(path).step < step:
                    return path
        return None

    def _check_finite(self, checkpoint: Checkpoint) -> None:
        """Raise a NumericsError if a weight or a moment is not finite."""
        tensors = {
            f"{part}/{name}": value
            for part, state in checkpoint.states.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        }
        # Minimum and maximum: unlike a sum they do not overflow, and aminmax propagates NaN.
        bounds: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            bounds.setdefault(tensor.device, []).extend(bound.double() for bound in tensor.aminmax())
        # One pass over each tensor, and one read per device.
        if all(torch.stack(norms).isfinite().all() for norms in bounds.values()):
            return
        # Only after a failure: one read per tensor, to name the tensors in the message.
        spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        good = self.newest_before(checkpoint.step)
        fallback = f"The last good checkpoint is {good}" if good else "No checkpoint was saved before"
        retry = f"Resume from it with --resume {good}" if good else "Start again with --fresh"
        raise NumericsError(
            f"The state of step {checkpoint.step} is not finite ({len(spoilt)} tensors, such as {spoilt[0]}) "
            f"and was not saved. {fallback}. {retry} and a lower --learning_rate."
        )

    def newer_than(self, resumed: Path, step: int) -> dict[Path, int | None]:
        """Return the folder's other checkpoints of more than `step` steps with their steps; None for a damaged one.

        If `resumed` is the last checkpoint, the newest of its run, only files modified after it are read.
        """
        own = resumed.stat()
        steps: dict[int, int | None] = {}  # by inode
        newer: dict[Path, int | None] = {}
        for path in self._candidates():
            entry = path.stat()
            # Modification times only exclude files; the step in a file decides.
            is_older = resumed.name == LAST and entry.st_mtime_ns <= own.st_mtime_ns
            if os.path.samestat(entry, own) or is_older:
                continue
            if entry.st_ino not in steps:  # several names are one file, which is read once
                steps[entry.st_ino] = None
                with contextlib.suppress(CheckpointError):
                    steps[entry.st_ino] = read_checkpoint(path).step
            found_step = steps[entry.st_ino]
            if found_step is None or found_step > step:
                newer[path] = found_step
        return newer

    def restore_best(self, epoch: int) -> None:
        """Link the checkpoint of this epoch as `best` if `best` is missing or has another step.

        A kill between two links of a save, or a write that never arrived, can leave the name with an earlier epoch.
        """
        epoch_path = self.directory / f"checkpoint_epoch_{epoch}.pt"
        best = self.directory / BEST
        if epoch_path.is_file() and read_step(epoch_path) != read_step(best) and is_whole(epoch_path):
            _link(epoch_path, best)

    def move_aside(self, paths: Iterable[Path] | None = None) -> Path | None:
        """Move these checkpoints, or all, into a new folder `replaced_N` and return it; None if there are none."""
        everything = (path for path in self.directory.glob("checkpoint_*") if path.is_file())
        names = list(everything if paths is None else paths)
        if not names:
            return None
        aside = first_free_name(self.directory, "replaced")
        aside.mkdir()
        for path in names:
            os.replace(path, aside / path.name)
        return aside

    def _candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, newest first."""
        candidates = [
            self.directory / LAST,
            self.directory / PREVIOUS,
            *epochs_in(self.directory),
            self.directory / BEST,
        ]
        return [path for path in candidates if path.is_file()]

    def _damaged_checkpoints(self) -> list[Path]:
        """Return the damaged checkpoints that were renamed; a folder with only these does not count as empty."""
        return sorted(self.directory.glob("checkpoint_*.damaged"))


def epochs_in(directory: Path) -> list[Path]:
    """Return the epoch checkpoints of a folder, newest first."""
    numbered = [(int(m.group(1)), p) for p in directory.glob("*.pt") if (m := EPOCH_NAME.fullmatch(p.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def is_name_of_a_run(path: str | Path) -> bool:
    """Return whether training runs use this file name, so that a later run could resume from the file."""
    name = Path(path).name
    return name in (LAST, PREVIOUS, BEST) or EPOCH_NAME.fullmatch(name) is not None


def first_free_name(directory: Path, name: str) -> Path:
    """Return `name`_1 in `directory`, or the first higher number that does not exist."""
    number = 1
    while (path := directory / f"{name}_{number}").exists():
        number += 1
    return path


def _link(source: Path, target: Path) -> None:
    """Give the file at `source` the second name `target`, atomically replacing an existing file of that name."""
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # FAT and mounted cloud folders have no hard links
        with open(source, "rb") as read, open(partial, "wb") as written:
            while block := read.read(1 << 20):
                written.write(block)
            written.flush()
            os.fsync(written.fileno())
    os.replace(partial, target)
    partial.unlink(missing_ok=True)  # rename does nothing if both names are links to the same file, e.g. after a kill


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # unsupported on some mounted folders; the rename itself is done
    finally:
        os.close(handle)
