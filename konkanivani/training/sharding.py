"""Weights, gradients and optimizer state that are sharded over the ranks, and the trained part of a model.

Each rank keeps its part of every tensor. The weights of a block are gathered when it runs, forward and backward, and
freed afterwards; its gradient is reduced and sharded at once (Zhao et al., 2023). Therefore the ranks run in lockstep:
each makes the same number of passes over a global batch as the rank with the most micro-batches.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from konkanivani.checkpoints.checkpoint import Stateful
from konkanivani.distributed import Topology, raise_rank_lost
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.models.asr import SpeechNetwork, parameter_count

# --------------------
# Sharding of weights, gradients and optimizer state over the ranks with FSDP2, for models too large for one GPU.


def shard_model(model: SpeechNetwork, topology: Topology, device: torch.device) -> None:
    """Shard the weights of a model on the CPU over the ranks' devices, in place, one FSDP unit per block.

    Layers outside of the blocks (embedding, heads, norms) are gathered once per pass and kept until its backward pass
    ends.
    """
    mesh = init_device_mesh(device.type, (topology.world_size,))
    # Blocks first: the call on the whole model then only takes the parameters that are left.
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in _shards(model):
        # Sum, not average: the losses are divided by the counts of the whole global batch.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction


def bytes_per_rank(model: SpeechNetwork, world_size: int) -> int:
    """Return an upper bound of the bytes per rank of sharded weights, gradients and moments in fp32.

    The bound consists of this rank's part of all four tensors per weight; the weights and gradients outside of the
    blocks, unsharded; and six copies of the largest block: the weights of two blocks (one is prefetched), each in the
    buffer of the collective and unpacked, one gradient, and its copy on the way into two reductions.
    """
    blocks = [parameter_count(block) for block in model.blocks]
    everything = parameter_count(model)
    between = everything - sum(blocks)
    return STATE_BYTES * -(-everything // world_size) + 4 * (2 * between + 6 * max(blocks))


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the weights of the model are sharded over the ranks."""
    return isinstance(model, FSDPModule)


def _shards(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def full_weights(model: torch.nn.Module) -> Iterator[None]:
    """Gather all weights on every rank for the duration of the block; only without gradients.

    All ranks enter and leave together, but may run the model any number of times in between. Needs memory for the whole
    weights. Does nothing for a model that is not sharded.
    """
    for part in _shards(model):
        part.set_reshard_after_forward(False, recurse=False)
        with raise_rank_lost():
            # set_reshard_after_forward(False) keeps the weights gathered after each forward pass of the block.
            part.unshard()
    try:
        yield
    finally:
        for part in _shards(model):
            part.reshard()
            # The root stays gathered between forward and backward, as fully_shard sets it by default.
            part.set_reshard_after_forward(part is not model, recurse=False)


class FullState:
    """Wrapper of a part with sharded tensors that saves and loads the state_dict of a single-process run.

    All ranks call both methods; only the first rank receives the whole tensors, on the CPU.
    """

    def __init__(self, part: Stateful, topology: Topology) -> None:
        self._part = part
        self._topology = topology

    def state_dict(self) -> dict[str, object]:
        """Return the state with its tensors gathered one by one; ranks other than the first get empty tensors."""
        return {name: self._gathered(value) for name, value in self._part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> object:
        """Load this rank's shards of the whole tensors, which every rank passes."""
        own = self._part.state_dict()
        return self._part.load_state_dict({name: _shard_like(value, own.get(name)) for name, value in state.items()})

    def _gathered(self, value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        with raise_rank_lost():
            whole = value.full_tensor()
        # full_tensor() is a collective, so all ranks call it and all but the first drop the result at once.
        return whole.cpu() if self._topology.is_first else whole.new_empty(0, device="cpu")


def _shard_like(value: object, like: object) -> object:
    """Return this rank's shard of a whole tensor if `like` is sharded and has its shape, else `value`."""
    if not (isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape):
        return value
    value = value.to(like.device, like.dtype)
    # src_data_rank=None: every rank has the tensor, so no scatter is needed.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


# --------------------
# Checkpoint state of a model whose frozen weights stay in a pretrained model folder.


class TrainedPart:
    """Trainable weights of a model as a `Stateful` part of a checkpoint; the frozen ones are not saved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trainable weights by their names in the model."""
        return {name: weight.detach() for name, weight in self._trained().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the model; raise RuntimeError if names or shapes differ."""
        trained = self._trained()
        if trained.keys() != state.keys():
            raise RuntimeError(f"its weights do not match the trained part: {sorted(trained.keys() ^ state.keys())[0]}")
        # In-place copies keep the parameter objects that the optimizer holds.
        with torch.no_grad():
            for name, weight in trained.items():
                if weight.shape != state[name].shape:
                    raise RuntimeError(f"its {name} has a different shape")
                weight.copy_(state[name])
