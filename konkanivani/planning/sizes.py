"""Sizes that a plan depends on: the model's state on the device, on the host, in a checkpoint and per rank."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.config import PRESETS, OptimizerConfig, TextConfig, TrainConfig, WeightDtype
from konkanivani.console import MIB, budget_text, parse_budget, peak_text
from konkanivani.data.shape_grid import MAX_SHAPES
from konkanivani.distributed import BUCKET_BYTES
from konkanivani.errors import ResourceError
from konkanivani.memory.devices import DeviceCosts, cpu_costs, cuda_costs
from konkanivani.memory.monitor import available_bytes, measure_context
from konkanivani.memory.plan import STATE_BYTES, model_state_bytes
from konkanivani.memory.weights import Placement
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.asr import parameter_count
from konkanivani.models.families import read_architecture
from konkanivani.models.hub import locate_model
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.planning.tracer import Peak
from konkanivani.training.bfloat16 import store_in_bf16
from konkanivani.training.optimizer_state import bytes_per_rank
from konkanivani.training.optimizers import build_optimizer

LATER_KERNELS = 64 * MIB  # the driver loads a library's kernels when they are first used
# A graph's kernel arguments, static inputs and CTC gradient. An estimate, not measured on a card yet.
GRAPH_BYTES = 8 * MIB
RECORD_BYTES = 400  # name, checksum and alignment of one tensor of a checkpoint; a parameter has two to six tensors
SETTINGS_BYTES = MIB  # flags, tokenizer, counters of a checkpoint
ADAMW = OptimizerConfig()


@dataclass(frozen=True)
class Ranks:
    """Number of ranks, and whether the model's state is sharded over them."""

    world_size: int = 1
    sharded: bool = False


ONE_RANK = Ranks()


def device_costs(device: torch.device) -> DeviceCosts:
    """Return the device's fixed memory costs; the size of the CUDA context is measured if the driver reports it."""
    if device.type == "cpu":
        return cpu_costs()
    context = measure_context(device)
    context = None if context is None else context + LATER_KERNELS
    return cuda_costs(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), context)


def with_graphs(costs: DeviceCosts, config: TrainConfig) -> DeviceCosts:
    """Return the device's costs, captured graphs included if --cuda_graphs may use them."""
    if config.memory.cuda_graphs == "off" or not costs.is_cuda:
        return costs
    return dataclasses.replace(costs, graphs=MAX_SHAPES * GRAPH_BYTES)


def state_bytes(config: TrainConfig, architecture: Architecture) -> int:
    """Return the bytes of the model's weights, gradients and optimizer state."""
    # On the meta device: only the sizes of the tensors are needed.
    model = architecture.build_without_values()
    if config.memory.weight_dtype == "bf16":
        store_in_bf16(model)
    return model_state_bytes(model, build_optimizer(model, config.optimizer).tensors)


def checkpoint_bytes(
    architecture: Architecture, optimizer: OptimizerConfig = ADAMW, weight_dtype: WeightDtype = "fp32"
) -> int:
    """Return an upper bound of a checkpoint's size in bytes."""
    model = architecture.build_without_values()
    if weight_dtype == "bf16":
        store_in_bf16(model)
    state = [tensor for kinds in build_optimizer(model, optimizer).state.values() for tensor in kinds.values()]
    tensors = [*model.parameters(), *model.buffers()]
    if architecture.has_base:
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
    return sum(tensor.nbytes + RECORD_BYTES for tensor in [*tensors, *state]) + SETTINGS_BYTES


def planned_architecture(config: TrainConfig) -> Architecture:
    """Return the architecture for these settings before a corpus is read; weights of a folder are not read."""
    if config.pretrained.pretrained is None:
        return architecture_of(config, config.text.vocab_size)
    located = locate_model(config.pretrained.pretrained, config.pretrained.revision, "settings")
    read = dataclasses.replace(read_architecture(located.path), tuning=config.tuning)
    if isinstance(read, WhisperArchitecture) and config.pretrained.audio_context is not None:
        read = dataclasses.replace(read, audio_context=config.pretrained.audio_context)
    return read


def check_state(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> None:
    """Raise a ResourceError if the model's state alone, gradients included, exceeds the budget."""
    state = state_bytes(config, architecture) + costs.among_ranks
    other_memory = costs.workspace + costs.context
    if state + other_memory > budget:
        raise ResourceError(
            f"The weights, gradients and optimizer of this model need {state / MIB:.0f} MiB, and {costs.name} "
            f"needs another {other_memory / MIB:.0f} MiB: more than the budget of {budget / MIB:.0f} MiB. "
            f"{_largest_preset(config, budget - other_memory)}"
        )


def _largest_preset(config: TrainConfig, free: int) -> str:
    """Return a sentence that suggests the largest preset whose state fits into `free` bytes."""
    if config.pretrained.pretrained is not None:
        return "Use --freeze encoder or --lora_rank 32, a smaller model, or a larger budget."
    # PRESETS are in descending order of size.
    for name, shape in PRESETS.items():
        architecture = architecture_of(dataclasses.replace(config, model=shape), TextConfig().vocab_size)
        state = state_bytes(config, architecture)
        if state <= free:
            return f"Use --preset {name}, which needs {state / MIB:.0f} MiB, or a larger budget."
    return "No preset is small enough. Use a larger budget."


def fits(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    budget: int,
    trace: Callable[[Placement], Peak],
    placement: Placement,
) -> bool:
    """Return whether a traced step fits the budget; with prefetch, also whether its copies fit into host memory."""
    # A trace costs seconds: reject by the size of the state first.
    if placement.is_on_card and state_bytes(config, architecture) + costs.beside > budget:
        return False
    peak = trace(placement)
    return peak.bytes + costs.beside <= budget and not (placement.prefetch and peak.host > host_budget(config))


def host_budget(config: TrainConfig) -> int:
    """Return the bytes that may be used in host memory: --host_budget, or the available memory."""
    budget = config.memory.host_budget
    return parse_budget(budget) if budget else available_bytes(torch.device("cpu"))


def check_host(host: int, config: TrainConfig, costs: DeviceCosts, placement: Placement) -> None:
    """Raise a ResourceError if `host` bytes of offloaded state exceed the host budget."""
    if costs.is_cuda and not placement.is_on_card and host > (most := host_budget(config)):
        limit = "--host_budget" if config.memory.host_budget else "free memory"
        raise ResourceError(
            f"The weights, gradients and optimizer state in host memory need {peak_text(host)}, more than the "
            f"{budget_text(most)} of {limit}. Use --lora_rank 32 or --freeze encoder, a smaller model, or close "
            "other programs."
        )


def costs_per_rank(costs: DeviceCosts, architecture: Architecture, ranks: Ranks) -> DeviceCosts:
    """Return the device's fixed costs for one of these ranks.

    Added is the bucket in which gradients are summed over the ranks or, with sharding, the (negative) difference
    between a rank's part of the state and the whole state.
    """
    if ranks.world_size == 1:
        return costs
    model = architecture.build_without_values()
    parameters = parameter_count(model)
    # bytes_per_rank includes all-gather buffers; unsharded gradients are all-reduced in buckets of BUCKET_BYTES.
    extra_bytes = (
        bytes_per_rank(model, ranks.world_size) - STATE_BYTES * parameters
        if ranks.sharded
        else min(4 * parameters, BUCKET_BYTES)
    )
    return dataclasses.replace(costs, among_ranks=extra_bytes)


def choose_ranks(config: TrainConfig, costs: DeviceCosts, budget: int, world_size: int) -> Ranks:
    """Return the layout of `world_size` ranks with one budget each; --shard decides on sharding."""
    shard = config.memory.shard
    architecture = planned_architecture(config)
    sharded = shard == "always" or (shard == "auto" and needs_sharding(config, architecture, costs, budget))
    return Ranks(world_size, sharded and world_size > 1)


def needs_sharding(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> bool:
    """Return whether the model's whole state exceeds a rank's budget (--shard auto). Sharding needs AdamW in fp32."""
    is_supported = config.optimizer.optimizer == "adamw" and config.memory.weight_dtype == "fp32"
    return is_supported and state_bytes(config, architecture) + costs.beside > budget


def traffic_bytes(architecture: Architecture, ranks: Ranks) -> int:
    """Return the bytes in fp32 that one rank sends per step or, with sharding, per micro-batch.

    An all-reduce over N ranks sends each number 2 (N - 1) / N times, half for the reduce-scatter and half for the
    all-gather (Patarasuk and Yuan, 2009). Sharded weights are gathered for the forward and for the backward pass, and
    gradients are only reduce-scattered: 3 halves. Weights outside of the blocks are gathered once: 2 halves.
    """
    model = architecture.build_without_values()
    parameters = parameter_count(model)
    blocks = sum(map(parameter_count, model.blocks))
    # Each half costs (N - 1) / N numbers per weight, 4 bytes each.
    halves = 3 * blocks + 2 * (parameters - blocks) if ranks.sharded else 2 * parameters
    return 4 * halves * (ranks.world_size - 1) // ranks.world_size
