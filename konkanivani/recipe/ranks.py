"""The ranks that torchrun starts: a card for each, what all of them must have alike, and who speaks."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from konkanivani.base.config import TrainConfig
from konkanivani.base.console import count
from konkanivani.base.distributed import Topology, print_on_rank0, read_topology
from konkanivani.base.errors import UsageError
from konkanivani.base.files import digest_of_file
from konkanivani.base.flags import config_to_text
from konkanivani.base.process_group import process_group
from konkanivani.recipe.paths import check_manifests, named_manifests

PACKAGE = Path(__file__).parents[1]


def take_card(topology: Topology) -> None:
    """Makes each rank's own card the current one; a UsageError where its machine has cards, but fewer than ranks.

    Nothing where there is no card, or one process trains alone.
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
    """The block runs in each rank that torchrun has started, with a card of its own where there are cards.

    A rank waits at most `timeout` seconds for the others; one process alone just runs the block. Only the first rank's
    output is seen. An error ends all, and is told once.
    """
    topology = read_topology()
    with process_group(topology, timeout), print_on_rank0(topology):
        take_card(topology)
        yield topology


def digest_of_flags(config: TrainConfig) -> str:
    """Of what a command line asks for, however it is written."""
    return hashlib.sha256(config_to_text(config).encode()).hexdigest()


def digest_of_code() -> str:
    """Of the sources of this package, by name and content."""
    return _digest(sorted(PACKAGE.rglob("*.py")), PACKAGE)


def digest_of_data(config: TrainConfig) -> str:
    """Of the manifests that a run reads, whatever folders they lie in; a DataError where one cannot be read."""
    check_manifests(config)
    return _digest([Path(path) for path in named_manifests(config).values()], None)


def _digest(paths: Iterable[Path], folder: Path | None) -> str:
    named = [(str(path.relative_to(folder)) if folder else "", digest_of_file(path)) for path in paths]
    return hashlib.sha256(repr(named).encode()).hexdigest()
