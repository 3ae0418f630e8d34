"""Checks before a run creates any folder: ranks, paths, disk space, and equal code and data on all ranks."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import check_is_there
from konkanivani.config import AUTO, RunConfig, TrainConfig
from konkanivani.console import MIB, count
from konkanivani.distributed import Topology, print_on_rank0, process_group, read_topology
from konkanivani.errors import DataError, ErrorCollector, ResourceError, UsageError
from konkanivani.files import digest_of_files
from konkanivani.flags import MAX_EPOCHS, config_to_text
from konkanivani.models.architecture import Architecture
from konkanivani.planning.sizes import checkpoint_bytes

BESIDE_EPOCHS = 4  # the last, the previous, the best, and the one being written
DRY_RUN_FILES = 6  # 2 + BESIDE_EPOCHS: its resumed part runs with --keep_checkpoints 2
# 2.3 kB per step, audio and picture of one utterance; a full disk stops the logs but not the run.
LOG_BYTES_AN_EPOCH = MIB


def check_paths(config: TrainConfig, is_complete: bool = True) -> None:
    """Raise one error that lists all unusable paths, one per line, each with advice.

    With `is_complete` False, a checkpoint that has not been read yet supplies the missing paths, including the run's
    folders, so that those are not checked.
    """
    problems = ErrorCollector()
    run = config.run
    checkpoint = run.resume or run.init_from
    if checkpoint is not None and checkpoint != "auto":
        with problems.collect():
            check_is_there(Path(checkpoint))
    if is_complete and config.data.train_manifest is None:
        problems.add(
            UsageError(
                "--train_manifest is missing. Give your JSONL manifest, or generate the built-in corpus with "
                "konkanivani builtin and give data/builtin/train.jsonl."
            )
        )
    with problems.collect():
        check_manifests(config)
    if is_complete or run.resume == "auto":
        with problems.collect():
            _check_folder("checkpoint", Path(run.checkpoint_dir), "--checkpoint_dir")
    if is_complete:
        with problems.collect():
            _check_folder("log", Path(run.log_dir) / run.run_name, "--log_dir")
    problems.raise_all()


def check_manifests(config: TrainConfig) -> None:
    """Raise a DataError that names all given manifests that cannot be read."""
    problems = ErrorCollector()
    for flag, manifest in named_manifests(config).items():
        with problems.collect():
            _check_manifest(flag, Path(manifest))
    problems.raise_all()


def named_manifests(config: TrainConfig) -> dict[str, str]:
    """Return all given manifests by their flags."""
    data = config.data
    augment = config.augment
    path_by_flag = {
        "--train_manifest": data.train_manifest,
        "--valid_manifest": data.valid_manifest,
        "--test_manifest": data.test_manifest,
        "--rir_manifest": augment.rir_manifest,
        "--noise_manifest": augment.noise_manifest,
        "--forgetting_manifest": config.pretrained.forgetting_manifest,
    }
    return {flag: path for flag, path in path_by_flag.items() if path is not None}


def nearest_folder(path: Path) -> Path:
    """Return the path or its nearest existing parent, whose file system will hold the path."""
    return next((folder for folder in (path, *path.parents) if os.path.exists(folder)), Path("."))


def _check_manifest(flag: str, path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # A pipe could be read only once, but a manifest is read for its digest and for its rows.
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a file")
        # Permissions on network file systems are known only after an attempt to open the file.
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{flag} {path} cannot be read: {reason}. Give the path of a JSONL manifest.") from None


def _check_folder(kind: str, path: Path, flag: str) -> None:
    """Raise a ResourceError if the folder cannot be created or written."""
    nearest = nearest_folder(path)
    reason = None
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
        reason = "its file system is read-only"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"{nearest.absolute()} is not writable"
    if reason:
        raise ResourceError(f"The {kind} folder {path} cannot be written: {reason}. Choose another {flag}.")


@dataclass(frozen=True)
class DiskSpace:
    """Additional bytes that the run's files on one file system will need, and the free bytes there."""

    folders: tuple[Path, ...]
    needed: int
    free: int

    def sentence(self) -> str:
        """Return a phrase with the needed and the free space for the user."""
        folders = " and ".join(map(str, self.folders))
        return f"needs {-(-self.needed // MIB)} MiB for {folders}, has {self.free // MIB} MiB"


def check_disk(config: TrainConfig, architecture: Architecture) -> tuple[DiskSpace, ...]:
    """Return the space on each file system that the run writes to; raises a ResourceError if one is too small.

    Quotas are not visible here: an exceeded quota fails like a full disk, at a save.
    """
    run = config.run
    checkpoint_size = checkpoint_bytes(architecture, config.optimizer, config.memory.weight_dtype)
    checkpoints = max_checkpoints(run) * checkpoint_size
    if run.resume:
        checkpoints -= _replaced_bytes(Path(run.checkpoint_dir), run.resume)  # replaced checkpoints free their space
    least = DRY_RUN_FILES * checkpoint_size if run.dry_run else 0
    checkpoints = max(least, checkpoints)
    needs = (Path(run.checkpoint_dir), checkpoints), (Path(run.log_dir), max_epochs(run) * LOG_BYTES_AN_EPOCH)
    spaces: dict[int, DiskSpace] = {}
    for folder, needed in needs:
        # Folders on the same file system share its free space, so that their needs add up.
        device = os.stat(nearest_folder(folder)).st_dev
        shared = spaces.get(device, DiskSpace((), 0, free_disk(folder)))
        spaces[device] = DiskSpace((*shared.folders, folder), shared.needed + needed, shared.free)
    short = [space for space in spaces.values() if space.needed > space.free]
    if short:
        listed = "\n".join(
            f"Not enough disk space: the run {space.sentence()} ({space.needed} and {space.free} bytes)."
            for space in short
        )
        raise ResourceError(
            f"{listed} Free disk space, use --keep_checkpoints 2 or a smaller --preset, or put "
            "--checkpoint_dir and --log_dir on another disk."
        )
    return tuple(spaces.values())


def max_checkpoints(run: RunConfig) -> int:
    """Return the largest number of checkpoint files that exist at one time."""
    return min(run.keep_checkpoints, max_epochs(run)) + BESIDE_EPOCHS


def max_epochs(run: RunConfig) -> int:
    """Return the largest number of epochs of the run."""
    return MAX_EPOCHS if run.epochs == AUTO else run.epochs


def free_disk(folder: Path) -> int:
    """Return the bytes that a user may still write to the folder or its nearest existing parent."""
    status = os.statvfs(nearest_folder(folder))
    # Some mounted cloud folders report a size of zero.
    return status.f_bavail * status.f_frsize if status.f_blocks else 2**62


def _replaced_bytes(checkpoint_dir: Path, resumed: str) -> int:
    """Return the bytes of existing checkpoints that the resumed run will replace.

    Hard links to one file count once. Checkpoints newer than the resumed one are not included: they are moved aside and
    stay.
    """
    entries = [path.stat() for path in checkpoint_dir.glob("checkpoint_*.pt") if path.is_file()]
    newest = float("inf") if resumed == "auto" else os.stat(resumed).st_mtime_ns
    return sum({entry.st_ino: entry.st_size for entry in entries if entry.st_mtime_ns <= newest}.values())


def take_card(topology: Topology) -> None:
    """Set the current CUDA device of this rank; do nothing in a single process or on a machine without a GPU.

    Raises a UsageError if the machine has fewer GPUs than ranks.
    """
    cards = torch.cuda.device_count()
    if topology.is_single_process or cards == 0:
        return
    if cards < topology.local_world_size:
        raise UsageError(
            f"There are {topology.local_world_size} ranks on this machine but only {count(cards, 'GPU')}. "
            f"Use torchrun --nproc_per_node {cards}, or --device cpu and CUDA_VISIBLE_DEVICES= (empty)."
        )
    torch.cuda.set_device(topology.local_rank)


@contextlib.contextmanager
def in_ranks(timeout: float = 600.0) -> Iterator[Topology]:
    """Context manager that sets up the process group and this rank's GPU, if any.

    `timeout` is the time in seconds that a rank waits for the others. Only rank 0 prints. An error ends all ranks and
    is reported once. A single process runs the block without a process group.
    """
    topology = read_topology()
    with process_group(topology, timeout), print_on_rank0(topology):
        take_card(topology)
        yield topology


def digest_of_flags(config: TrainConfig) -> str:
    """Return a digest of the parsed flags, independent of their order and spelling."""
    return hashlib.sha256(config_to_text(config).encode()).hexdigest()


def digest_of_data(config: TrainConfig) -> str:
    """Return a digest of the contents of the run's manifests; raises a DataError if one cannot be read."""
    check_manifests(config)
    # Without names: the same manifests may have different paths on each machine.
    return digest_of_files(Path(path) for path in named_manifests(config).values())


def check_global_batch(config: TrainConfig, topology: Topology) -> None:
    """Raise a UsageError unless the global batch has at least one utterance per rank."""
    if problems := _few_utterances(config, topology):
        raise UsageError(f"These ranks cannot train: {'; '.join(problems)}.")


def _few_utterances(config: TrainConfig, topology: Topology) -> list[str]:
    if config.global_batch_size >= topology.world_size:
        return []
    return [
        f"the effective batch is {count(config.global_batch_size, 'utterance')}, fewer than the {topology.world_size} "
        "ranks: use a larger --batch_size or --gradient_accumulation_steps, or fewer ranks"
    ]


def check_ranks(config: TrainConfig, topology: Topology) -> None:
    """Raise a UsageError if the ranks cannot train with these flags: torchrun --max_restarts needs --resume auto.

    A global batch that the flags set is checked as in `check_global_batch`; that of a checkpoint is not known yet.
    """
    run = config.run
    problems = []
    if config.has_fixed_global_batch and not run.resume:
        problems += _few_utterances(config, topology)
    if topology.max_restarts and (run.fresh or run.resume not in (None, "auto")):
        flag = "--fresh" if run.fresh else f"--resume {run.resume}"
        problems.append(
            f"with torchrun --max_restarts, {flag} would be applied again at each restart: use --resume auto, "
            "and a --checkpoint_dir that is empty or contains the run to resume"
        )
    if problems:
        raise UsageError(f"These ranks cannot train: {'; '.join(problems)}.")
