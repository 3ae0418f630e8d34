"""How a run begins: what its command line asks for, the checkpoint that it names, and the lock of its folder."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoint import Checkpoint, Checkpointer, read_checkpoint
from konkanivani.config import RunConfig, TrainConfig
from konkanivani.disk import check_disk
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import check_idle_flags, config_from_text, contradictions, parse_flags
from konkanivani.preflight import choose_device, choose_precision
from konkanivani.run_paths import check_paths, manifests_of
from konkanivani.stages import Tell, say_nothing
from konkanivani.training.interruption import RunLock, check_nobody_trains
from konkanivani.wording import count


@dataclass(frozen=True)
class Start:
    """How a run begins: its settings, its folder's lock, the checkpoint it goes on from or takes weights from.

    A dry run has no lock of the folder: it leaves the folder as it is.
    """

    config: TrainConfig
    lock: RunLock | None
    resumed: Checkpoint | None
    initial: Checkpoint | None


def resolve_start(arguments: list[str], tell: Tell = say_nothing) -> Start:
    """What a command line asks for, the checkpoint it names read and held against it.

    Flags, then paths, then the disk are looked at before any folder is made; each stage is told when it is done.
    """
    asked = parse_flags(arguments)
    tell("flags", "they go together")
    if asked.run.resume:
        check_paths(asked, is_complete=False)
    else:
        _check_places(asked, asked.text.vocab_size, tell)
    if asked.run.resume == "auto":
        return _resume_newest(arguments, asked, tell)
    if asked.run.resume:
        checkpoint = read_checkpoint(asked.run.resume)
        config = _resumed_config(arguments, checkpoint, Path(asked.run.resume))
        _check_places(config, checkpoint.vocab_size, tell)
        lock = _take_folder(config.run)
        _check_folder_is_its_own(Path(asked.run.resume), Path(config.run.checkpoint_dir))
        return Start(config, lock, checkpoint, None)
    initial = read_checkpoint(asked.run.init_from) if asked.run.init_from else None
    lock = _take_folder(asked.run)
    _claim_folder(Checkpointer(asked.run.checkpoint_dir, asked.run.keep_checkpoints), asked)
    return Start(asked, lock, None, initial)


def _check_places(config: TrainConfig, vocab_size: int, tell: Tell) -> None:
    choose_precision(config.memory, choose_device(config.run.device))  # flags too, of which torch must be asked
    check_paths(config)
    manifests = count(len(manifests_of(config)), "manifest", "is/are")
    tell("paths", f"{manifests} there, {config.run.checkpoint_dir} and {config.run.log_dir} can be written")
    tell("disk", "; ".join(room.sentence() for room in check_disk(config, vocab_size)))


def _resume_newest(arguments: list[str], asked: TrainConfig, tell: Tell) -> Start:
    folder = asked.run.checkpoint_dir
    lock = _take_folder(asked.run)
    found = Checkpointer(folder, asked.run.keep_checkpoints).read_newest_sound(sets_aside=not asked.run.dry_run)
    if found is None:
        check_idle_flags(asked.augment, arguments)
        _check_places(asked, asked.text.vocab_size, tell)
        print(f"No checkpoint in {folder} yet: training begins.", flush=True)
        return Start(asked, lock, None, None)
    path, checkpoint = found
    config = _resumed_config(arguments, checkpoint, path)
    # The folder may have been moved since the checkpoint wrote down its name.
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, checkpoint_dir=folder))
    _check_places(config, checkpoint.vocab_size, tell)
    return Start(config, lock, checkpoint, None)


def _take_folder(run: RunConfig) -> RunLock | None:
    if not run.dry_run:
        return RunLock(run.checkpoint_dir)
    check_nobody_trains(run.checkpoint_dir)
    return None


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
