"""Disk space that a run's checkpoints and logs will need, compared with the free space."""

import os
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.auto_defaults import MAX_EPOCHS
from konkanivani.base.config import AUTO, RunConfig, TrainConfig
from konkanivani.base.errors import ResourceError
from konkanivani.base.units import MIB
from konkanivani.model.architecture import Architecture
from konkanivani.planning.plan import checkpoint_bytes
from konkanivani.recipe.paths import nearest_folder

BESIDE_EPOCHS = 4  # the last, the previous, the best, and the one being written
DRY_RUN_FILES = 6  # 2 + BESIDE_EPOCHS: its resumed part runs with --keep_checkpoints 2
# 2.3 kB per step, audio and picture of one utterance; a full disk stops the logs but not the run.
LOG_BYTES_AN_EPOCH = MIB


@dataclass(frozen=True)
class DiskRoom:
    """Additional bytes that the run's files on one file system will need, and the free bytes there."""

    folders: tuple[Path, ...]
    needed: int
    free: int

    def sentence(self) -> str:
        """Return a phrase with the needed and the free space for the user."""
        folders = " and ".join(map(str, self.folders))
        return f"needs {-(-self.needed // MIB)} MiB for {folders}, has {self.free // MIB} MiB"


def check_disk(config: TrainConfig, architecture: Architecture) -> tuple[DiskRoom, ...]:
    """Return the space on each file system that the run writes to; raises a ResourceError if one is too small.

    Quotas are not visible here: an exceeded quota fails like a full disk, at a save.
    """
    run = config.run
    checkpoints = max_checkpoints(run) * checkpoint_bytes(architecture, config.optimizer)
    if run.resume:
        checkpoints -= _held_bytes(Path(run.checkpoint_dir), run.resume)  # replaced checkpoints free their space
    least = DRY_RUN_FILES * checkpoint_bytes(architecture, config.optimizer) if run.dry_run else 0
    checkpoints = max(least, checkpoints)
    needs = (Path(run.checkpoint_dir), checkpoints), (Path(run.log_dir), max_epochs(run) * LOG_BYTES_AN_EPOCH)
    rooms: dict[int, DiskRoom] = {}
    for folder, needed in needs:
        # Folders on the same file system share its free space, so that their needs add up.
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
    """Return the largest number of checkpoint files that exist at one time."""
    return min(run.keep_checkpoints, max_epochs(run)) + BESIDE_EPOCHS


def max_epochs(run: RunConfig) -> int:
    """Return the largest number of epochs of the run."""
    return MAX_EPOCHS if run.epochs == AUTO else run.epochs


def free_disk(folder: Path) -> int:
    """Return the bytes that a user may still write to the folder or its nearest existing parent."""
    found = os.statvfs(nearest_folder(folder))
    # Some mounted cloud folders report a size of zero.
    return found.f_bavail * found.f_frsize if found.f_blocks else 2**62


def _held_bytes(checkpoint_dir: Path, resumed: str) -> int:
    """Return the bytes of existing checkpoints that the resumed run will replace.

    Hard links to one file count once. Checkpoints newer than the resumed one are not included: they are moved aside and
    stay.
    """
    found = [path.stat() for path in checkpoint_dir.glob("checkpoint_*.pt") if path.is_file()]
    newest = float("inf") if resumed == "auto" else os.stat(resumed).st_mtime_ns
    return sum({entry.st_ino: entry.st_size for entry in found if entry.st_mtime_ns <= newest}.values())
