"""How a run begins: what its command line asks for, the checkpoint that it names, and the lock of its folder."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoint import Checkpoint, Checkpointer, read_checkpoint
from konkanivani.config import TrainConfig
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import check_idle_flags, config_from_text, contradictions, parse_flags
from konkanivani.training.interruption import RunLock


@dataclass(frozen=True)
class Start:
    """How a run begins: its settings, its folder's lock, the checkpoint it goes on from or takes weights from."""

    config: TrainConfig
    lock: RunLock
    resumed: Checkpoint | None
    initial: Checkpoint | None


def resolve_start(arguments: list[str]) -> Start:
    """What a command line asks for, the checkpoint it names read and held against it."""
    asked = parse_flags(arguments)
    if asked.run.resume == "auto":
        return _resume_newest(arguments, asked)
    if asked.run.resume:
        checkpoint = read_checkpoint(asked.run.resume)
        config = _resumed_config(arguments, checkpoint, Path(asked.run.resume))
        lock = RunLock(config.run.checkpoint_dir)
        _check_folder_is_its_own(Path(asked.run.resume), Path(config.run.checkpoint_dir))
        return Start(config, lock, checkpoint, None)
    initial = read_checkpoint(asked.run.init_from) if asked.run.init_from else None
    lock = RunLock(asked.run.checkpoint_dir)
    _claim_folder(Checkpointer(asked.run.checkpoint_dir, asked.run.keep_checkpoints), asked)
    return Start(asked, lock, None, initial)


def _resume_newest(arguments: list[str], asked: TrainConfig) -> Start:
    folder = asked.run.checkpoint_dir
    lock = RunLock(folder)
    found = Checkpointer(folder, asked.run.keep_checkpoints).read_newest_sound()
    if found is None:
        check_idle_flags(asked.augment, arguments)
        print(f"No checkpoint in {folder} yet: training begins.", flush=True)
        return Start(asked, lock, None, None)
    path, checkpoint = found
    config = _resumed_config(arguments, checkpoint, path)
    # The folder may have been moved since the checkpoint wrote down its name.
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, checkpoint_dir=folder))
    return Start(config, lock, checkpoint, None)


def _resumed_config(arguments: list[str], checkpoint: Checkpoint, path: Path) -> TrainConfig:
    """The checkpoint's settings under the flags that are given; a CheckpointError lists what contradicts it."""
    stored = config_from_text(checkpoint.config)
    config = parse_flags(arguments, stored)
    found = contradictions(stored, config)
    if found:
        listed = "".join(f"\n  {difference}" for difference in found)
        raise CheckpointError(
            f"The flags contradict the checkpoint {path}:{listed}\nLeave these flags out to go on with it, or begin "
            f"anew from its weights with --init_from {path} and another --checkpoint_dir (or --fresh)."
        )
    print(f"Going on from {path}: step {checkpoint.step}.", flush=True)
    return config


def _claim_folder(checkpointer: Checkpointer, asked: TrainConfig) -> None:
    if checkpointer.has_checkpoints() and not asked.run.fresh:
        raise UsageError(
            f"{checkpointer.directory} holds checkpoints of a run. Go on with --resume auto, begin anew with --fresh "
            "(they are moved into a folder beside), or give another --checkpoint_dir."
        )


def _check_folder_is_its_own(resumed: Path, folder: Path) -> None:
    """Refuses to go on with a checkpoint from elsewhere in a folder that holds another run's."""
    if resumed.parent.resolve() != folder.resolve() and Checkpointer(folder, keep=2).has_checkpoints():
        raise UsageError(
            f"{resumed} does not lie in {folder}, which holds checkpoints already, and going on would replace them. "
            "Move it there (and resume it there), or give an empty --checkpoint_dir."
        )
