"""The folder of a run's checkpoints: what is published there by rename, what is kept, and the newest that is sound."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from konkanivani.base.console import say
from konkanivani.base.errors import CheckpointError, NumericsError, ResourceError
from konkanivani.training.checkpoint.archive import is_whole
from konkanivani.training.checkpoint.checkpoint import (
    Checkpoint,
    OtherVersionError,
    read_checkpoint,
    read_step,
    write_checkpoint,
)

LAST, PREVIOUS, BEST = "checkpoint_last.pt", "checkpoint_previous.pt", "checkpoint_best.pt"
EPOCH_NAME = re.compile(r"checkpoint_epoch_(\d+)\.pt")


class Checkpointer:
    """The checkpoints of one folder: last, previous, best, and the newest `keep` epochs."""

    def __init__(self, directory: str | Path, keep: int, step_of_last: int | None = None) -> None:
        """`step_of_last` is the step of the checkpoint that the run goes on from."""
        self.directory, self.keep = Path(directory), keep
        self._step_of_last = step_of_last

    def has_checkpoints(self) -> bool:
        """Whether a run has saved something here, sound or not."""
        return bool(self._candidates() or self._damaged())

    def save(self, checkpoint: Checkpoint, epoch: int | None = None, is_best: bool = False) -> Path:
        """Publishes the checkpoint as checkpoint_last.pt, and as epoch `epoch` and as the best one where asked.

        Whatever the instant of a kill, every name holds a whole file: the data is written once, beside, and linked or
        renamed into place; `last` goes last, and the one it replaces stays as `previous` (one of as many steps does
        not: its weights are the same). Where it fails, a ResourceError, no name is lost. Numbers that are not finite
        are never published: a NumericsError.

        Nothing is replaced or deleted before the new file has been read back; and of `last` and `previous`, where the
        one has been damaged since, the other stays.
        """
        self._check_finite(checkpoint)
        partial = self.directory / (LAST + ".partial")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # What a kill left may share its bytes with an epoch or the best one, which writing over it would change.
            partial.unlink(missing_ok=True)
            write_checkpoint(partial, checkpoint)
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
            os.replace(partial, last)
            self._step_of_last = checkpoint.step
            _sync_directory(self.directory)
            for path in epochs_in(self.directory)[self.keep :]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self.discard_unfinished()
            raise ResourceError(
                f"The checkpoint folder {self.directory} cannot be written: {error.strerror or error}. Free "
                "disk space, fix its permissions, or choose another --checkpoint_dir."
            ) from None
        return last

    def discard_unfinished(self) -> None:
        """Removes what was begun to be written and has not its name yet, by this process or by one that was killed."""
        with contextlib.suppress(OSError):
            for left in self.directory.glob("*.partial"):
                left.unlink()

    def read_newest_sound(self, sets_aside: bool = True) -> tuple[Path, Checkpoint] | None:
        """Return the checkpoint of the most steps that verifies; None if the folder has none.

        Damaged ones on the way are named and, if it `sets_aside`, renamed to *.damaged. If none verifies, a
        CheckpointError is raised: a new run in its place would lose this one. A message says so if the last
        checkpoint is missing or older than another: the write of a lost machine or of a cloud drive that never arrived.
        """
        damaged, is_damaged = len(self._damaged()), False
        for path in self._newest_first():
            try:
                found = read_checkpoint(path)
                if path.name != LAST and not is_damaged:
                    say(self._late_write(path, found.step))
                return path, found
            except OtherVersionError:
                raise
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

        Names alone do not tell: after a crash a name may refer to an older file again.
        """
        candidates = self._candidates()
        steps = {path: read_step(path) for path in candidates}
        newest = max((step for step in steps.values() if step is not None), default=0)
        unread = {LAST: newest, PREVIOUS: newest}
        return sorted(candidates, key=lambda path: -(unread.get(path.name, -1) if steps[path] is None else steps[path]))

    def _late_write(self, found: Path, step: int) -> str:
        """Return a sentence that says why the last checkpoint is not used, but `found`."""
        last = self.directory / LAST
        state = f"is of step {read_step(last)}" if last.is_file() else "is missing"
        return (
            f"{last} {state}: its last write has not arrived, or it was moved. The newest valid checkpoint is "
            f"{found.name}, step {step}."
        )

    def newest_before(self, step: int) -> Path | None:
        """The newest sound checkpoint of fewer steps than `step`: its weights gave a finite gradient at least once."""
        for path in self._candidates():
            with contextlib.suppress(CheckpointError, ResourceError):
                if read_checkpoint(path).step < step:
                    return path
        return None

    def _check_finite(self, checkpoint: Checkpoint) -> None:
        """Raises a NumericsError where a weight or a moment is not finite: one pass, one read a device."""
        tensors = {
            f"{part}/{name}": value
            for part, state in checkpoint.states.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        }
        # The least and the greatest number: unlike a sum they do not overflow, and NaN is both.
        bounds: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            bounds.setdefault(tensor.device, []).extend(bound.double() for bound in tensor.aminmax())
        if all(torch.stack(found).isfinite().all() for found in bounds.values()):
            return
        spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        good = self.newest_before(checkpoint.step)
        known = f"The last good checkpoint is {good}" if good else "No checkpoint was saved before"
        retry = f"Resume from it with --resume {good}" if good else "Start again with --fresh"
        raise NumericsError(
            f"The state of step {checkpoint.step} is not finite ({len(spoilt)} tensors, such as {spoilt[0]}) "
            f"and was not saved. {known}. {retry} and a lower --learning_rate."
        )

    def newer_than(self, resumed: Path, step: int) -> dict[Path, int | None]:
        """The steps of the folder's other checkpoints that are of more; None of a damaged one, so that nobody can say.

        Beside `last`, which is the newest of a run, only what has been changed after it is read.
        """
        own, steps, newer = resumed.stat(), {}, {}
        for path in self._candidates():
            entry = path.stat()
            is_older = resumed.name == LAST and entry.st_mtime_ns <= own.st_mtime_ns
            if os.path.samestat(entry, own) or is_older:
                continue
            if entry.st_ino not in steps:  # several names are one file, which is read once
                steps[entry.st_ino] = None
                with contextlib.suppress(CheckpointError):
                    steps[entry.st_ino] = read_checkpoint(path).step
            found = steps[entry.st_ino]
            if found is None or found > step:
                newer[path] = found
        return newer

    def restore_best(self, epoch: int) -> None:
        """Name this epoch `best` if it is there and another step, or none, has that name.

        A kill between the names of a save, or a write that never arrived, leaves the name to an earlier epoch.
        """
        found, best = self.directory / f"checkpoint_epoch_{epoch}.pt", self.directory / BEST
        if found.is_file() and read_step(found) != read_step(best) and is_whole(found):
            _link(found, best)

    def move_aside(self, paths: Iterable[Path] | None = None) -> Path | None:
        """Moves these checkpoints, or every one, into a new folder `replaced_N`; None where there is none."""
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
        """Checkpoints to resume from, newest first."""
        named = [self.directory / LAST, self.directory / PREVIOUS, *epochs_in(self.directory), self.directory / BEST]
        return [path for path in named if path.is_file()]

    def _damaged(self) -> list[Path]:
        """Checkpoints that were set aside; a folder of nothing else is no empty folder."""
        return sorted(self.directory.glob("checkpoint_*.damaged"))


def epochs_in(directory: Path) -> list[Path]:
    """The epoch checkpoints of a folder, newest first."""
    found = [(int(m.group(1)), p) for p in directory.glob("*.pt") if (m := EPOCH_NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def first_free_name(directory: Path, name: str) -> Path:
    """`name`_1 in `directory`, or the first number after it that nothing has."""
    number = 1
    while (path := directory / f"{name}_{number}").exists():
        number += 1
    return path


def _link(source: Path, target: Path) -> None:
    """Gives the file at `source` the second name `target`, replacing what had it, whole at every instant."""
    beside = target.with_name(target.name + ".partial")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:  # no hard links on FAT and on mounted cloud folders
        with open(source, "rb") as read, open(beside, "wb") as written:
            while block := read.read(1 << 20):
                written.write(block)
            written.flush()
            os.fsync(written.fileno())
    os.replace(beside, target)
    beside.unlink(missing_ok=True)  # renamed to another name of the same file, as a kill leaves one, it stays


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some mounted folders cannot; the rename itself has happened
    finally:
        os.close(handle)
