"""A model whose weights, gradients and optimizer state are sharded over the ranks: FSDP2, one block after the other.

For a model that one card cannot hold. Each rank keeps its part of every tensor; a block's weights are gathered when it
runs, forward and backward, and freed behind it, and its gradient is summed and sharded at once (Zhao et al., 2023). So
the ranks run in step: each makes as many passes over a window as the one that has most micro-batches.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from konkanivani.base.distributed import Topology, raise_rank_lost
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.model.asr import KonkaniVaniASR, parameter_count
from konkanivani.training.checkpoint.checkpoint import Stateful


def shard_model(model: KonkaniVaniASR, topology: Topology, device: torch.device) -> None:
    """Shards the weights of a model on the CPU over the ranks' devices, in place, a block at a time.

    What lies between the blocks (embedding, heads, norms) is gathered once a pass, and kept until its backward pass
    ends. Gradients are summed, not averaged: the losses are divided by the counts of the whole window.
    """
    mesh = init_device_mesh(device.type, (topology.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in _shards(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def bytes_per_rank(model: KonkaniVaniASR, world_size: int) -> int:
    """Bytes that one of `world_size` ranks holds of sharded weights, gradients and moments in fp32, at most.

    Its part of all four; what lies between the blocks whole, and its gradient; and of the largest block six copies:
    the weights of two, one gathered ahead, as they arrive and in place, a gradient, and that on its way to two sums.
    """
    blocks = [parameter_count(block) for block in model.blocks]
    everything = parameter_count(model)
    between = everything - sum(blocks)
    return STATE_BYTES * -(-everything // world_size) + 4 * (2 * between + 6 * max(blocks))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the model's weights are sharded over the ranks."""
    return isinstance(model, FSDPModule)


def _shards(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def full_weights(model: torch.nn.Module) -> Iterator[None]:
    """Within, every rank has all weights, and may run the model as often as it likes; without gradients only.

    All ranks enter and leave together. It takes the memory of the whole weights; a model that is not sharded has them.
    """
    for part in _shards(model):
        part.set_reshard_after_forward(False, recurse=False)
        with raise_rank_lost():
            part.unshard()
    try:
        yield
    finally:
        for part in _shards(model):
            part.reshard()
            part.set_reshard_after_forward(part is not model, recurse=False)


class FullState:
    """A part whose tensors are sharded over the ranks, saved and loaded as those of a world of one are.

    Every rank calls both; only the first one is given the whole tensors, on the CPU.
    """

    def __init__(self, part: Stateful, topology: Topology) -> None:
        self._part, self._topology = part, topology

    def state_dict(self) -> dict[str, object]:
        """The part's state, its tensors gathered one by one; on other ranks empty ones in their place."""
        return {name: self._gathered(value) for name, value in self._part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> object:
        """Takes this rank's parts of the whole tensors, which every rank has."""
        own = self._part.state_dict()
        return self._part.load_state_dict({name: _shard_like(value, own.get(name)) for name, value in state.items()})

    def _gathered(self, value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        with raise_rank_lost():
            whole = value.full_tensor()
        return whole.cpu() if self._topology.is_first else whole.new_empty(0, device="cpu")


def _shard_like(value: object, like: object) -> object:
    """This rank's part of a whole tensor, where `like` is sharded and of its shape."""
    if not (isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape):
        return value
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded over the ranks, all of which call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
