"""The processes that train together: who this one is, and what they agree on.

torchrun starts them and gives each its place in the environment; torch.distributed carries what they say. One process
alone is a world of one: the same calls, which then answer at once. The numbers that ranks agree on travel over gloo
between CPUs whatever they train on, so that agreeing never waits for a GPU.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from konkanivani.base.command_line import silence_output
from konkanivani.base.errors import ResourceError, UsageError

Item = TypeVar("Item")

BUCKET_BYTES = 25 * 2**20  # of gradients that are summed at once; also what their copy takes


class RankLost(ResourceError):
    """Contact to another rank was lost, which has ended or hangs; `process_group.joined` finds out which, and why."""


@dataclass(frozen=True)
class Topology:
    """This process's place: `rank` of `world_size` in all, `local_rank` of `local_world_size` on its machine.

    `restarts` counts how often torchrun has started the ranks anew, `max_restarts` how often it may. A single rank of
    torchrun's goes the way of several: it can be started again, and tries on one card what several do.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0
    max_restarts: int = 0
    is_launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads and writes for all."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether this is a process that nobody started as a rank."""
        return self.world_size == 1 and not self.is_launched


ALONE = Topology()


def read_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """This process's place as torchrun's environment says it; a world of one where nothing is said.

    A UsageError where it is no place.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    names += ("TORCHELASTIC_MAX_RESTARTS",)
    try:
        places = (int(environment.get(name, name.endswith("WORLD_SIZE"))) for name in names)
        topology = Topology(*places, is_launched=True)
    except ValueError:
        topology = Topology(rank=-1)
    is_place = 0 <= topology.rank < topology.world_size and 0 <= topology.local_rank < topology.local_world_size
    if not is_place:
        said = " ".join(f"{name}={environment[name]}" for name in names[:4] if name in environment)
        raise UsageError(
            f"The environment variables {said} do not describe a valid rank. Start with torchrun, or unset them."
        )
    return topology


@contextlib.contextmanager
def raise_rank_lost() -> Iterator[None]:
    """Turns what torch raises where ranks do not reach each other into a RankLost; other errors pass through."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise RankLost(
            f"The connection to another rank was lost ({reason:.200}). Resume from the newest checkpoint with "
            "--resume auto."
        ) from None


def gather_numbers(topology: Topology, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers, by rank; each gives as many."""
    if topology.is_single_process:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(topology.world_size)]
    with raise_rank_lost():
        dist.all_gather(all_ranks, mine)
    return [theirs.tolist() for theirs in all_ranks]


def all_reduce_max(topology: Topology, number: int) -> int:
    """The largest of all ranks' numbers."""
    return max(theirs for (theirs,) in gather_numbers(topology, [number]))


def gather(topology: Topology, item: Item) -> list[Item]:
    """Every rank's item, by rank, on each of them; what pickle takes."""
    if topology.is_single_process:
        return [item]
    items: list[Item | None] = [None] * topology.world_size
    with raise_rank_lost():
        dist.all_gather_object(items, item)
    return items


def broadcast_from_rank0(topology: Topology, make: Callable[[], Item]) -> Item:
    """What `make` returns on the first rank, on every rank; the others do not call it. What pickle takes."""
    if topology.is_single_process:
        return make()
    box = [make() if topology.is_first else None]
    with raise_rank_lost():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def sum_tensors(topology: Topology, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    """Replaces each tensor by its sum over ranks, the same on all to the last bit, a bucketful at a time.

    `bucket` (N,) is of their type, on their device; a tensor larger than it is summed where it lies. Nothing else is
    allocated here, so what a rank has memory for beforehand it has memory for.
    """
    if topology.is_single_process:
        return
    with raise_rank_lost():
        for group in _bucketfuls(tensors, bucket.numel()):
            if len(group) == 1 and group[0].is_contiguous():
                dist.all_reduce(group[0])
                continue
            flat = bucket[: sum(tensor.numel() for tensor in group)]
            parts = flat.split([tensor.numel() for tensor in group])
            for part, tensor in zip(parts, group, strict=True):
                part.view_as(tensor).copy_(tensor)
            dist.all_reduce(flat)
            for part, tensor in zip(parts, group, strict=True):
                tensor.copy_(part.view_as(tensor))


def new_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bucket in which these are summed over ranks: as large as all of them, at most BUCKET_BYTES."""
    first = tensors[0]
    return first.new_empty(min(sum(tensor.numel() for tensor in tensors), BUCKET_BYTES // first.element_size()))


def _bucketfuls(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, in groups of at most `size` numbers, or of one larger tensor."""
    group, held = [], 0
    for tensor in tensors:
        if group and held + tensor.numel() > size:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.numel()
    if group:
        yield group


def check_same(topology: Topology, digests: Mapping[str, str]) -> None:
    """Raises one UsageError, on every rank, where a rank's digest is not the first one's; it names rank and what."""
    ranks = gather(topology, dict(digests))
    differing = [
        f"rank {rank} has different {what}"
        for rank, theirs in enumerate(ranks)
        for what, digest in theirs.items()
        if digest != ranks[0][what]
    ]
    if differing:
        raise UsageError(
            f"The ranks disagree: {', '.join(differing)} than rank 0. Start all ranks with the same command "
            "line, source code, manifests and device type."
        )


@contextlib.contextmanager
def print_on_rank0(topology: Topology) -> Iterator[None]:
    """Drops what the block writes on stdout and stderr, but on the first rank."""
    with contextlib.nullcontext() if topology.is_first else silence_output():
        yield
