"""Rank and collective operations of the training processes.

torchrun starts the processes and sets their environment variables; torch.distributed exchanges the data. A single
process has a world size of 1 and every operation returns at once. Numbers and objects are exchanged with gloo between
CPUs, even when training on GPUs, so that these operations never wait for a GPU.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from konkanivani.base.command_line import silence_output
from konkanivani.base.errors import ResourceError, UsageError

Item = TypeVar("Item")

BUCKET_BYTES = 25 * 2**20  # gradients per all-reduce, and the memory of their copy


class RankLost(ResourceError):
    """Lost connection to another rank, which has ended or hangs; `process_group` finds out which rank, and why."""


@dataclass(frozen=True)
class Topology:
    """Position of this process: `rank` of `world_size`, and `local_rank` of `local_world_size` on its machine.

    `restarts` counts how often torchrun has restarted the ranks, `max_restarts` is its limit. A single rank started by
    torchrun (`is_launched`) runs the code of several ranks: torchrun can restart it, and one GPU suffices to test it.
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
        """Whether this is rank 0, which reads and writes for all ranks."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether this process was started without torchrun."""
        return self.world_size == 1 and not self.is_launched


ALONE = Topology()


def read_topology(environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology from torchrun's environment variables; ALONE if they are not set.

    Raises UsageError if they do not describe a valid rank.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return ALONE
    names = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    )
    try:
        numbers = [int(environment.get(name, "1" if name.endswith("WORLD_SIZE") else "0")) for name in names]
        rank, world_size, local_rank, local_world_size, restarts, max_restarts = numbers
        topology = Topology(rank, world_size, local_rank, local_world_size, restarts, max_restarts, is_launched=True)
    except ValueError:
        # Not a number: fails the range check below, with the same message.
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
    """Convert the errors of torch.distributed for a lost connection to RankLost; other errors pass through."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises a plain RuntimeError, which only its text identifies.
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise RankLost(
            f"The connection to another rank was lost ({reason:.200}). Resume from the newest checkpoint with "
            "--resume auto."
        ) from None


def gather_numbers(topology: Topology, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, by rank; each rank must pass the same count."""
    if topology.is_single_process:
        return [list(numbers)]
    # A CPU tensor selects gloo also in a group with NCCL.
    mine = torch.tensor(numbers, dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(topology.world_size)]
    with raise_rank_lost():
        dist.all_gather(all_ranks, mine)
    return [theirs.tolist() for theirs in all_ranks]


def all_reduce_max(topology: Topology, number: int) -> int:
    """Return the maximum of `number` over ranks."""
    return max(theirs for (theirs,) in gather_numbers(topology, [number]))


def gather(topology: Topology, item: Item) -> list[Item]:
    """Return the items of all ranks, by rank, on every rank; an item must be picklable."""
    if topology.is_single_process:
        return [item]
    # all_gather_object replaces every item of this list.
    items = [item] * topology.world_size
    with raise_rank_lost():
        dist.all_gather_object(items, item)
    return items


def broadcast_from_rank0(topology: Topology, make: Callable[[], Item]) -> Item:
    """Call `make` on rank 0 only and return its result on every rank; it must be picklable."""
    if topology.is_single_process:
        return make()
    # broadcast_object_list writes the received object into this list.
    box: list[Any] = [make() if topology.is_first else None]
    with raise_rank_lost():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def sum_tensors(topology: Topology, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    """Replace each tensor by its sum over ranks, bit-identical on all ranks, one bucket at a time.

    Args:
        tensors: all of one dtype, on one device.
        bucket: (N,) workspace of the same dtype and device. A tensor larger than it is summed in place.

    No other memory is allocated here, so a rank that has allocated its bucket does not run out of memory.
    """
    if topology.is_single_process:
        return
    with raise_rank_lost():
        for group in _bucketfuls(tensors, bucket.numel()):
            # A single tensor needs no copy into the bucket.
            if len(group) == 1 and group[0].is_contiguous():
                dist.all_reduce(group[0])
                continue
            flat = bucket[: sum(tensor.numel() for tensor in group)]
            parts = flat.split([tensor.numel() for tensor in group])
            for part, tensor in zip(parts, group, strict=True):
                # One all-reduce per bucket: the latency of a collective would dominate for small tensors.
                part.view_as(tensor).copy_(tensor)
            dist.all_reduce(flat)
            for part, tensor in zip(parts, group, strict=True):
                tensor.copy_(part.view_as(tensor))


def new_bucket(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bucket for `sum_tensors`: the size of all tensors together, at most BUCKET_BYTES."""
    first = tensors[0]
    return first.new_empty(min(sum(tensor.numel() for tensor in tensors), BUCKET_BYTES // first.element_size()))


def _bucketfuls(tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """Group the tensors in order: at most `size` elements per group, or one larger tensor."""
    group: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if group and held + tensor.numel() > size:
            yield group
            group = []
            held = 0
        group.append(tensor)
        held += tensor.numel()
    if group:
        yield group


def check_same(topology: Topology, digests: Mapping[str, str]) -> None:
    """Raise one UsageError on every rank if a digest differs from rank 0's; it names the rank and the digest."""
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
    """Discard the output of the block on stdout and stderr, except on rank 0."""
    with contextlib.nullcontext() if topology.is_first else silence_output():
        yield


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded; a collective in that case."""
    # Only a DTensor has this method; its class takes 0.7 s to import, which commands without ranks need not wait for.
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return gather() if gather else tensor
