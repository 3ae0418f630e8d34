"""What several ranks make of a memory plan: the state sharded over them, and what each of them sends."""

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
    """How many train together, and whether the model's state is sharded over them."""

    world_size: int = 1
    sharded: bool = False


ONE_RANK = Ranks()


def costs_per_rank(costs: DeviceCosts, architecture: Architecture, ranks: Ranks) -> DeviceCosts:
    """What training takes beside the tensors of a model on one device where it is one of these ranks.

    The bucket in which gradients are summed over ranks more, or, where the state is sharded, the others' less.
    """
    if ranks.world_size == 1:
        return costs
    model = architecture.build_without_values()
    whole = parameter_count(model)
    more = (
        bytes_per_rank(model, ranks.world_size) - STATE_BYTES * whole if ranks.sharded else min(4 * whole, BUCKET_BYTES)
    )
    return dataclasses.replace(costs, among_ranks=more)


def choose_ranks(config: TrainConfig, costs: DeviceCosts, budget: int, world_size: int) -> Ranks:
    """So many ranks of one budget each, the state sharded over them as --shard says."""
    shard, architecture = config.memory.shard, planned_architecture(config)
    sharded = shard == "always" or (shard == "auto" and needs_sharding(config, architecture, costs, budget))
    return Ranks(world_size, sharded and world_size > 1)


def needs_sharding(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> bool:
    """Whether a rank cannot hold the whole state of the model in its budget: what --shard auto asks. AdamW's only."""
    return config.optimizer.optimizer == "adamw" and state_bytes(config, architecture) + costs.beside > budget


def traffic_bytes(architecture: Architecture, ranks: Ranks) -> int:
    """Bytes in fp32 that one rank sends: a step, or, where the state is sharded over the ranks, a micro-batch.

    A sum over N ranks sends each number 2 (N - 1) / N times, half to sum it and half to hand it round (Patarasuk and
    Yuan, 2009); sharded weights go round for the forward and for the backward pass, and gradients are summed only: 3
    halves, but what lies between the blocks goes round once.
    """
    model = architecture.build_without_values()
    whole, blocks = parameter_count(model), sum(map(parameter_count, model.blocks))
    halves = 3 * blocks + 2 * (whole - blocks) if ranks.sharded else 2 * whole
    return 4 * halves * (ranks.world_size - 1) // ranks.world_size
