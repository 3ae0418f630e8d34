"""Checks of the files and folders that a run names, before any of them is read."""

import errno
import os
import stat
from pathlib import Path

from konkanivani.base.config import TrainConfig
from konkanivani.base.errors import DataError, ErrorCollector, ResourceError, UsageError
from konkanivani.training.checkpoint.checkpoint import check_is_there


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
                "python3 training_scripts/prepare_builtin_corpus.py and give data/builtin/train.jsonl."
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
    named = {
        "--train_manifest": data.train_manifest,
        "--valid_manifest": data.valid_manifest,
        "--test_manifest": data.test_manifest,
        "--rir_manifest": augment.rir_manifest,
        "--noise_manifest": augment.noise_manifest,
        "--forgetting_manifest": config.pretrained.forgetting_manifest,
    }
    return {flag: path for flag, path in named.items() if path is not None}


def nearest_folder(path: Path) -> Path:
    """Return the path or its nearest existing parent, whose file system will hold the path."""
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("."))


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
