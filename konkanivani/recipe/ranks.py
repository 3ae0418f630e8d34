"""Ranks started by torchrun: device assignment, digests for consistency checks, and output from rank 0 only."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from konkanivani.base.config import TrainConfig
from konkanivani.base.console import count
from konkanivani.base.distributed import Topology, print_on_rank0, read_topology
from konkanivani.base.errors import UsageError
from konkanivani.base.files import digest_of_files
from konkanivani.base.flags import config_to_text
from konkanivani.base.process_group import process_group
from konkanivani.recipe.paths import check_manifests, named_manifests


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
