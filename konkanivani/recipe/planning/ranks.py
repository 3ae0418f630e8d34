"""Effect of several ranks on a memory plan: sharded state, gradient buckets and network traffic."""

import dataclasses
from dataclasses import dataclass

from konkanivani.base.config import TrainConfig
from konkanivani.base.distributed import BUCKET_BYTES
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.plan import STATE_BYTES
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import parameter_count
from konkanivani.recipe.origin import planned_architecture
from konkanivani.recipe.planning.state import state_bytes
from konkanivani.training.sharding import bytes_per_rank


@dataclass(frozen=True)
class Ranks:
    """Number of ranks, and whether the model's state is sharded over them."""

    world_size: int = 1
    sharded: bool = False


ONE_RANK = Ranks()


def costs_per_rank(costs: DeviceCosts, architecture: Architecture, ranks: Ranks) -> DeviceCosts:
    """Return the device's fixed costs for one of these ranks.

    Added is the bucket in which gradients are summed over the ranks or, with sharding, the (negative) difference
    between a rank's part of the state and the whole state.
    """
    if ranks.world_size == 1:
        return costs
    model = architecture.build_without_values()
    whole = parameter_count(model)
    # bytes_per_rank includes all-gather buffers; unsharded gradients are all-reduced in buckets of BUCKET_BYTES.
    more = (
        bytes_per_rank(model, ranks.world_size) - STATE_BYTES * whole if ranks.sharded else min(4 * whole, BUCKET_BYTES)
    )
    return dataclasses.replace(costs, among_ranks=more)


def choose_ranks(config: TrainConfig, costs: DeviceCosts, budget: int, world_size: int) -> Ranks:
    """Return the layout of `world_size` ranks with one budget each; --shard decides on sharding."""
    shard = config.memory.shard
    architecture = planned_architecture(config)
    sharded = shard == "always" or (shard == "auto" and needs_sharding(config, architecture, costs, budget))
    return Ranks(world_size, sharded and world_size > 1)


def needs_sharding(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> bool:
    """Return whether the model's whole state exceeds a rank's budget (--shard auto). Sharding needs AdamW."""
    return config.optimizer.optimizer == "adamw" and state_bytes(config, architecture) + costs.beside > budget


def traffic_bytes(architecture: Architecture, ranks: Ranks) -> int:
    """Return the bytes in fp32 that one rank sends per step or, with sharding, per micro-batch.

    An all-reduce over N ranks sends each number 2 (N - 1) / N times, half for the reduce-scatter and half for the
    all-gather (Patarasuk and Yuan, 2009). Sharded weights are gathered for the forward and for the backward pass, and
    gradients are only reduce-scattered: 3 halves. Weights outside of the blocks are gathered once: 2 halves.
    """
    model = architecture.build_without_values()
    whole = parameter_count(model)
    blocks = sum(map(parameter_count, model.blocks))
    # Each half costs (N - 1) / N numbers per weight, 4 bytes each.
    halves = 3 * blocks + 2 * (whole - blocks) if ranks.sharded else 2 * whole
    return 4 * halves * (ranks.world_size - 1) // ranks.world_size
