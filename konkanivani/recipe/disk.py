"""The room on the disk that a run's checkpoints and logs will take, and what there is."""

import os
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.auto_defaults import MAX_EPOCHS
from konkanivani.base.config import AUTO, OptimizerConfig, RunConfig, TrainConfig
from konkanivani.base.errors import ResourceError
from konkanivani.base.units import MIB
from konkanivani.model.architecture import Architecture
from konkanivani.recipe.paths import nearest_folder
from konkanivani.training.optimizers.build import build_optimizer

RECORD_BYTES = 400  # name, checksum and alignment of one tensor, of which a parameter has two to six
SETTINGS_BYTES = MIB  # flags, tokenizer, counters
BESIDE_EPOCHS = 4  # the last, the previous, the best, and the one that is being written
DRY_RUN_FILES = 6  # what a dry run goes on from needs as a run that keeps 2 does
ADAMW = OptimizerConfig()
LOG_BYTES_AN_EPOCH = MIB  # 2.3 kB a step, the sound and the picture of one utterance; logs that end, end no run


@dataclass(frozen=True)
class DiskRoom:
    """What the files of one file system will take more than they do now, and what is free there; bytes."""

    folders: tuple[Path, ...]
    needed: int
    free: int

    def sentence(self) -> str:
        """The room for a person."""
        folders = " and ".join(map(str, self.folders))
        return f"needs {-(-self.needed // MIB)} MiB for {folders}, has {self.free // MIB} MiB"


def check_disk(config: TrainConfig, architecture: Architecture) -> tuple[DiskRoom, ...]:
    """The room on each file system that the run writes to; a ResourceError where there is less than it will need.

    A quota cannot be seen: one that is reached shows as a full disk does, at a save.
    """
    run = config.run
    checkpoints = max_checkpoints(run) * checkpoint_bytes(architecture, config.optimizer)
    if run.resume:
        checkpoints -= _held_bytes(run)  # they make room as they are replaced
    least = DRY_RUN_FILES * checkpoint_bytes(architecture, config.optimizer) if run.dry_run else 0
    checkpoints = max(least, checkpoints)
    needs = (Path(run.checkpoint_dir), checkpoints), (Path(run.log_dir), max_epochs(run) * LOG_BYTES_AN_EPOCH)
    rooms: dict[int, DiskRoom] = {}
    for folder, needed in needs:
        device = os.stat(nearest_folder(folder)).st_dev
        shared = rooms.get(device, DiskRoom((), 0, free_disk(folder)))
        rooms[device] = DiskRoom((*shared.folders, folder), shared.needed + needed, shared.free)
    short = [room for room in rooms.values() if room.needed > room.free]
    if short:
        listed = "\n".join(
            f"Not enough disk space: the run {room.sentence()} ({room.needed} and {room.free} bytes)." for room in short
        )
        raise ResourceError(
            f"{listed} Free disk space, use --keep_checkpoints 2 or a smaller --preset, or put "
            "--checkpoint_dir and --log_dir on another disk."
        )
    return tuple(rooms.values())


def max_checkpoints(run: RunConfig) -> int:
    """How many different checkpoint files the run will have at one time."""
    return min(run.keep_checkpoints, max_epochs(run)) + BESIDE_EPOCHS


def max_epochs(run: RunConfig) -> int:
    """How many epochs the run will have at the most."""
    return MAX_EPOCHS if run.epochs == AUTO else run.epochs


def checkpoint_bytes(architecture: Architecture, optimizer: OptimizerConfig = ADAMW) -> int:
    """At most so many bytes does a checkpoint of this model take."""
    model = architecture.build_without_values()
    state = [tensor for kinds in build_optimizer(model, optimizer).state.values() for tensor in kinds.values()]
    tensors = [*model.parameters(), *model.buffers()]
    if architecture.has_base:
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
    return sum(tensor.nbytes + RECORD_BYTES for tensor in [*tensors, *state]) + SETTINGS_BYTES


def free_disk(folder: Path) -> int:
    """Bytes that a user may still write in the folder, or in the nearest above it."""
    found = os.statvfs(nearest_folder(folder))
    # Some mounted cloud folders tell no size at all.
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**62


def _held_bytes(run: RunConfig) -> int:
    """What the checkpoints take now that the resumed run replaces, a file with several names counted once.

    What is newer than the one that it goes back to is moved aside and stays.
    """
    found = [path.stat() for path in Path(run.checkpoint_dir).glob("checkpoint_*.pt") if path.is_file()]
    newest = float("inf") if run.resume == "auto" else os.stat(run.resume).st_mtime_ns
    return sum({entry.st_ino: entry.st_size for entry in found if entry.st_mtime_ns <= newest}.values())
