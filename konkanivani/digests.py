"""Digests of what all ranks must have alike: their flags, their sources, their data."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from konkanivani.base.config import TrainConfig
from konkanivani.base.flags import config_to_text, parse_flags
from konkanivani.run_paths import check_manifests, manifests_of

PACKAGE = Path(__file__).parent
BLOCK_BYTES = 2**20


def digest_of_flags(arguments: list[str]) -> str:
    """Of what a command line asks for, however it is written."""
    return hashlib.sha256(config_to_text(parse_flags(arguments)).encode()).hexdigest()


def digest_of_code() -> str:
    """Of the sources of this package, by name and content."""
    return _digest(sorted(PACKAGE.rglob("*.py")), PACKAGE)


def digest_of_data(config: TrainConfig) -> str:
    """Of the manifests that a run reads, whatever folders they lie in; a DataError where one cannot be read."""
    check_manifests(config)
    return _digest([Path(path) for path in manifests_of(config).values()], None)


def _digest(paths: Iterable[Path], folder: Path | None) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder) if folder else ''}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
