"""Named stateful parts in one verified file, published by rename.

A checkpoint is torch's zip format and holds tensors, strings, bytes (as a uint8 tensor) and plain numbers only. Reading
checks every record's CRC first, because torch.load does not, and refuses what torch.save never writes.
"""

import contextlib
import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from konkanivani.checkpoint_archive import is_whole, load_archive
from konkanivani.errors import CheckpointError, NumericsError, ResourceError

FORMAT = 2  # 1: the norm now at a block's beginning stood at its end
LAST, PREVIOUS, BEST = "checkpoint_last.pt", "checkpoint_previous.pt", "checkpoint_best.pt"
DAMAGE = (None, errno.EINVAL, errno.EIO)  # what reading a file can end with that does not hold what it says
EPOCH_NAME = re.compile(r"checkpoint_epoch_(\d+)\.pt")


class OtherVersionError(CheckpointError):
    """A checkpoint of another version of this trainer: sound, as far as this one can tell."""


class Stateful(Protocol):
    """A part of the training run whose state is saved: torch's own protocol."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> object: ...


@dataclass(frozen=True)
class Checkpoint:
    """What one file holds. `states` maps a part's name to its state; `config` is `config_to_text`'s text."""

    config: str
    tokenizer: bytes
    vocab_size: int
    step: int
    plan_digest: int
    states: Mapping[str, Mapping[str, object]]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes and fsyncs `path`; where that fails the file is removed and a ResourceError says why."""
    record = {
        "format": FORMAT,
        "config": checkpoint.config,
        "tokenizer": torch.frombuffer(bytearray(checkpoint.tokenizer), dtype=torch.uint8),
        "vocab_size": checkpoint.vocab_size,
        "step": checkpoint.step,
        "plan_digest": checkpoint.plan_digest,
        "states": {name: dict(state) for name, state in checkpoint.states.items()},
    }
    try:
        with open(path, "wb") as file:
            torch.save(record, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # a full disk reaches us as either
        path.unlink(missing_ok=True)
        if error.__context__ is not None and not isinstance(error.__context__, Exception):
            raise error.__context__ from None  # a signal, which torch's writer has buried under an error of its own
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ResourceError(
            f"The checkpoint {path} could not be written: {reason}. Free space or mend the folder."
        ) from None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The verified checkpoint at `path`, its tensors on the CPU; a CheckpointError says what is wrong with it.

    A file that may not be read, or not now for want of memory, is a ResourceError.
    """
    path = Path(path)
    check_is_there(path)
    try:
        return _parse_record(load_archive(path), path)
    except CheckpointError:
        raise
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno in DAMAGE:
            raise _damaged(path, error) from None
        # Nothing that moving the file aside would mend.
        reason = error.strerror or error if isinstance(error, OSError) else "not enough memory"
        raise ResourceError(f"The checkpoint {path} cannot be read: {reason}. Mend that and start again.") from None
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return CheckpointError(
        f"The checkpoint {path} is damaged or not ours ({reason:.300}). "
        "Use another one, or --resume auto for the newest sound one."
    )


def check_is_there(path: Path) -> None:
    """Raises a CheckpointError where there is no file."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint at {path}. Give the path of a checkpoint_*.pt file.")


def _parse_record(record: object, path: Path) -> Checkpoint:
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CheckpointError(f"The file {path} is no checkpoint of this trainer. Give the path of one.")
    if record["format"] != FORMAT:
        raise OtherVersionError(
            f"The checkpoint {path} is of format {record['format']}; this version reads format {FORMAT}. "
            "Use the version that wrote it, or another --checkpoint_dir."
        )
    tokenizer, states = record["tokenizer"], record["states"]
    sound = (
        isinstance(record["config"], str)
        and isinstance(tokenizer, torch.Tensor)
        and tokenizer.dtype == torch.uint8
        and tokenizer.dim() == 1
        and all(type(record[name]) is int for name in ("vocab_size", "step", "plan_digest"))
        and 0 < record["vocab_size"] < 2**31
        and 0 <= record["step"] < 2**63
        and isinstance(states, dict)
        and all(isinstance(state, dict) for state in states.values())
    )
    if not sound:
        raise CheckpointError(f"The checkpoint {path} does not hold what one of ours holds. Use another one.")
    return Checkpoint(
        config=record["config"],
        tokenizer=tokenizer.numpy().tobytes(),
        vocab_size=record["vocab_size"],
        step=record["step"],
        plan_digest=record["plan_digest"],
        states=states,
    )


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
            self._check_written(partial)
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
            self._prune()
        except OSError as error:
            with contextlib.suppress(OSError):
                for left in self.directory.glob("checkpoint_*.partial"):
                    left.unlink()
            raise ResourceError(
                f"The checkpoint folder {self.directory} cannot be written: {error.strerror or error}. "
                "Free space, mend its permissions, or give another --checkpoint_dir."
            ) from None
        return last

    def _check_written(self, partial: Path) -> None:
        if not is_whole(partial):
            partial.unlink(missing_ok=True)
            raise ResourceError(
                f"The checkpoint {partial} was not kept: read again, it is not what was written. Check the disk of "
                f"{self.directory}, or give another --checkpoint_dir."
            )

    def read_newest_sound(self, sets_aside: bool = True) -> tuple[Path, Checkpoint] | None:
        """The newest checkpoint that verifies, or None in a folder without any.

        Damaged ones on the way are named and, where it `sets_aside`, renamed to *.damaged; where none is sound a
        CheckpointError is raised, since beginning anew without a word would lose the run.
        """
        damaged = len(self._damaged())
        for path in self._candidates():
            try:
                return path, read_checkpoint(path)
            except OtherVersionError:
                raise
            except CheckpointError as error:
                damaged += 1
                aside = path.with_name(path.name + ".damaged")
                if sets_aside:
                    os.replace(path, aside)
                moved = f"Moved aside to {aside.name}. " if sets_aside else ""
                print(f"{error} {moved}Trying the one before.", flush=True)
        if damaged:
            raise CheckpointError(
                f"None of the {damaged} checkpoints in {self.directory} is sound"
                f"{', all are now named *.damaged' if sets_aside else ''}. Restore a copy, or begin anew with --fresh."
            )
        return None

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
        raise NumericsError(
            f"The state of step {checkpoint.step} is not finite ({len(spoilt)} tensors, such as {spoilt[0]}) and is "
            f"not saved. {f'The last good checkpoint is {good}' if good else 'No checkpoint was saved before'}. "
            f"Try {f'to go on from it with --resume {good}' if good else 'again with --fresh'} and a lower "
            "--learning_rate."
        )

    def move_aside(self) -> Path | None:
        """Moves every checkpoint into a new folder `replaced_N` (for --fresh); None where there was none."""
        names = [path for path in self.directory.glob("checkpoint_*") if path.is_file()]
        if not names:
            return None
        aside = first_free_name(self.directory, "replaced")
        aside.mkdir()
        for path in names:
            os.replace(path, aside / path.name)
        return aside

    def _epochs(self) -> list[Path]:
        """Epoch checkpoints, newest first."""
        found = [(int(m.group(1)), p) for p in self.directory.glob("*.pt") if (m := EPOCH_NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def _candidates(self) -> list[Path]:
        """Checkpoints to resume from, newest first."""
        named = [self.directory / LAST, self.directory / PREVIOUS, *self._epochs(), self.directory / BEST]
        return [path for path in named if path.is_file()]

    def _damaged(self) -> list[Path]:
        """Checkpoints that were set aside; a folder of nothing else is no empty folder."""
        return sorted(self.directory.glob("checkpoint_*.damaged"))

    def _prune(self) -> None:
        for path in self._epochs()[self.keep :]:
            path.unlink(missing_ok=True)


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


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some mounted folders cannot; the rename itself has happened
    finally:
        os.close(handle)


def load_states(checkpoint: Checkpoint, stateful: Mapping[str, Stateful]) -> None:
    """Loads every part's state; a CheckpointError where one is missing or does not fit."""
    for name, part in stateful.items():
        if name == "splits" and name not in checkpoint.states:
            continue  # of a version that remembered none
        if name not in checkpoint.states:
            raise CheckpointError(
                f"The checkpoint holds no state of the {name} (an averaged one does not), and resuming needs it. "
                "Begin anew from its weights with --init_from."
            )
        try:
            if name == "scaler" and not checkpoint.states[name]:
                continue  # saved without loss scaling, gone on with it
            part.load_state_dict(checkpoint.states[name])
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"The checkpoint's {name} cannot be loaded: {reason} Use another checkpoint."
            ) from None
