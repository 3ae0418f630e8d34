"""Memory plan of a run: from its utterances, settings and device, or from its checkpoint.

Also what a plan depends on: the size of the model's state on the device, on the host, in a checkpoint and per rank.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import AUTO, PRESETS, OptimizerConfig, TextConfig, TrainConfig
from konkanivani.base.console import count
from konkanivani.base.distributed import BUCKET_BYTES
from konkanivani.base.errors import ResourceError, UsageError
from konkanivani.base.units import MIB, budget_text, parse_budget, peak_text
from konkanivani.data.utterance import Utterances
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.budget import available_bytes
from konkanivani.memory.devices import DeviceCosts, cpu_costs, cuda_costs
from konkanivani.memory.gpu import measure_context
from konkanivani.memory.plan import STATE_BYTES, BucketPlan, MemoryPlan, model_state_bytes, read_plan
from konkanivani.memory.weights.placement import ON_CARD, Placement, choose_placement
from konkanivani.model.architecture import Architecture, architecture_of
from konkanivani.model.asr import parameter_count
from konkanivani.model.whisper.folder import read_whisper_architecture
from konkanivani.planning.planner import ALWAYS, NEVER, Planner, plan_bucket
from konkanivani.planning.tracer import BatchShape, Peak, kept_traces
from konkanivani.training.build_step import choose_concurrency, memory_conditions
from konkanivani.training.optimizers.build import build_optimizer
from konkanivani.training.sharding import bytes_per_rank

BUCKET_RATIO = 0.7  # between the longest utterances of neighbouring buckets
MAX_BUCKETS = 8
# On a CPU, longer micro-batches only add padding (4 x 2 beats 1 x 8: docs/performance.md); a GPU is faster the fuller
# it is.
MAX_CPU_SECONDS = 24.0
LATER_KERNELS = 64 * MIB  # the driver loads a library's kernels when they are first used
RECORD_BYTES = 400  # name, checksum and alignment of one tensor of a checkpoint; a parameter has two to six tensors
SETTINGS_BYTES = MIB  # flags, tokenizer, counters of a checkpoint
ADAMW = OptimizerConfig()


@dataclass(frozen=True)
class Ranks:
    """Number of ranks, and whether the model's state is sharded over them."""

    world_size: int = 1
    sharded: bool = False


ONE_RANK = Ranks()


@dataclass(frozen=True)
class SpeechSizes:
    """Sizes of N utterances: seconds (N,) at the slowest speed, and tokens (N,)."""

    utterances: Utterances
    seconds: np.ndarray
    tokens: np.ndarray


def resolve_plan(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    free: int,
    ranks: Ranks,
    train: SpeechSizes,
    validation: SpeechSizes | None,
    stored: Mapping[str, object] | None,
) -> MemoryPlan:
    """Return the checkpoint's plan if it was made under the same conditions, else make a new one.

    `free` is the budget in bytes without --memory_budget. The plan for one rank holds for each. Raises a ResourceError
    with advice if the model's state or an utterance exceeds the budget.
    """
    conditions = plan_conditions(config, architecture, device, ranks)
    if stored and not config.memory.replan:
        plan = read_plan(stored)
        if plan.conditions == conditions:
            return plan
        print("The checkpoint's memory plan was made under different conditions: making a new plan.", flush=True)
    budget = parse_budget(config.memory.memory_budget) if config.memory.memory_budget else free
    rate = float(train.tokens.sum() / train.seconds.sum())
    costs = costs_per_rank(device_costs(device), architecture, ranks)
    # The longest utterance in a micro-batch of one, with all recomputation that is allowed, decides on the placement.
    longest = BatchShape(1, bucket_edges(train.seconds)[-1], int(train.tokens.max()))
    policy = NEVER if config.memory.gradient_checkpointing == "never" else ALWAYS

    def trace(placement: Placement) -> Peak:
        with kept_traces(config, architecture, costs, placement) as traces:
            return Planner(traces, budget, 1.0).phases(longest, policy)

    has_room = partial(fits, config, architecture, costs, budget, trace)
    placement = resolve_placement(config, architecture, device, ranks, has_room)
    if placement.is_on_card:
        check_state(config, architecture, costs, budget)
    with kept_traces(config, architecture, costs, placement) as traces:
        plan = _plan_buckets(config, Planner(traces, budget, rate), conditions, train, validation)
        concurrent_micro_batches = choose_concurrency(config, device, ranks.sharded) if placement.is_on_card else 1
        # Parallel micro-batches share one budget: plan again for both at once.
        if concurrent_micro_batches > 1:
            side_by_side = _plan_buckets(
                config, Planner(traces, budget, rate, concurrent_micro_batches), conditions, train, validation
            )
            if _has_room_for_two(side_by_side, plan, is_asked_for=config.data.concurrent_micro_batches != AUTO):
                plan = side_by_side
    _check_every_utterance_fits(plan.buckets, train, config, budget)
    check_host(plan.host, config, costs, placement)
    return dataclasses.replace(plan, placement=placement)


def resolve_placement(
    config: TrainConfig,
    architecture: Architecture,
    device: torch.device,
    ranks: Ranks,
    fits: Callable[[Placement], bool],
) -> Placement:
    """Return the placement of the weights according to --weights.

    `auto` offloads neither on a CPU nor with several ranks. Raises a UsageError for explicit offloading with several
    ranks, since each would fetch its own weights.
    """
    asked = config.memory.weights
    if ranks.world_size > 1 and asked not in (AUTO, "card"):
        raise UsageError(f"--weights {asked} supports one process: omit it, or use --shard always with several.")
    if asked == AUTO and (ranks.world_size > 1 or device.type == "cpu"):
        return ON_CARD
    blocks = len(architecture.build_without_values().blocks)
    return choose_placement(asked, blocks, config.memory.mixed_precision, fits)


def _has_room_for_two(side_by_side: MemoryPlan, plan: MemoryPlan, is_asked_for: bool) -> bool:
    """Return whether parallel micro-batches fit; unless requested, they must not recompute additional blocks."""
    if not all(bucket.utterances for bucket in side_by_side.buckets):
        return False
    pairs = zip(side_by_side.buckets, plan.buckets, strict=True)
    return is_asked_for or all(more.recomputed_blocks <= alone.recomputed_blocks for more, alone in pairs)


def plan_conditions(config: TrainConfig, architecture: Architecture, device: torch.device, ranks: Ranks) -> int:
    """Return a hash of everything that a plan depends on except the data."""
    asked = config.data.batch_size, config.global_batch_size, config.data.validation_batch_seconds
    return zlib.crc32(repr((memory_conditions(config, architecture, device), asked, ranks)).encode())


def bucket_edges(seconds: np.ndarray) -> list[float]:
    """Return the longest utterance of each bucket in seconds, ascending, rounded up to 0.01 s."""
    edges = [float(np.ceil(100 * seconds.max()) / 100)]
    while len(edges) < MAX_BUCKETS and (seconds <= BUCKET_RATIO * edges[-1]).any():
        edges.append(float(np.ceil(100 * seconds[seconds <= BUCKET_RATIO * edges[-1]].max()) / 100))
    return edges[::-1]


def _plan_buckets(
    config: TrainConfig, planner: Planner, conditions: int, train: SpeechSizes, validation: SpeechSizes | None
) -> MemoryPlan:
    buckets = []
    for edge in bucket_edges(train.seconds):
        tokens = int(train.tokens[train.seconds <= edge].max())
        most = max_at_once(config, planner, edge)
        buckets.append(plan_bucket(planner, edge, tokens, config.memory.gradient_checkpointing, most))
    # The peaks shown next to the measured ones are those reached by the most expensive bucket.
    costliest = max(buckets, key=lambda bucket: bucket.peak)
    load = BatchShape(max(1, costliest.utterances), costliest.seconds, costliest.tokens)
    peak = planner.phases(load, RecomputePolicy.first(costliest.recomputed_blocks))
    seconds = config.data.validation_batch_seconds
    validation_peak = 0
    if validation is not None:
        longest = float(validation.seconds.max())
        seconds, validation_peak = planner.validation_seconds(longest, int(validation.tokens.max()), seconds)
    # The allocator's statistics, with which the peaks are compared, do not include the context.
    beside = planner.traces.costs.beside - planner.traces.costs.context
    return MemoryPlan(
        conditions=conditions,
        budget=planner.budget,
        context=planner.traces.costs.context,
        buckets=tuple(buckets),
        validation_seconds=seconds,
        forward=peak.forward + beside,
        backward=peak.backward + beside,
        update=peak.update + beside,
        validation=max(0, validation_peak - planner.traces.costs.context),
        concurrent_micro_batches=planner.concurrent_micro_batches,
        host=peak.host,
    )


def max_at_once(config: TrainConfig, planner: Planner, seconds: float) -> int:
    """Return the largest micro-batch for utterances of `seconds`, regardless of memory."""
    if config.data.batch_size != "auto":
        return config.data.batch_size
    if planner.traces.costs.is_cuda:
        return config.global_batch_size
    most = -(
        -config.global_batch_size // planner.concurrent_micro_batches
    )  # at least one micro-batch for each concurrent slot
    return int(np.clip(MAX_CPU_SECONDS // seconds, 1, most))


def _check_every_utterance_fits(
    buckets: tuple[BucketPlan, ...], train: SpeechSizes, config: TrainConfig, budget: int
) -> None:
    too_long = [bucket for bucket in buckets if not bucket.utterances]
    if not too_long:
        return
    limit = max((bucket.seconds for bucket in buckets if bucket.utterances), default=0.0)
    # Slow speed perturbation lengthens audio, and --max_duration applies to the recording. Rounded down to 0.1 s.
    as_recorded = int(10 * limit * min(resolved(config.augment.speed_perturbation))) / 10
    rows = [int(i) for i in np.argsort(-train.seconds) if train.seconds[i] > limit]
    named = ", ".join(f"{train.utterances[i].id} ({train.seconds[i]:.1f} s)" for i in rows[:3])
    helps = []
    if config.memory.gradient_checkpointing == "never":
        helps.append("--gradient_checkpointing auto")
    if as_recorded > config.data.min_duration:
        helps.append(f"--max_duration {as_recorded:g}")
    if not config.memory.mixed_precision:
        helps.append("--mixed_precision")
    raise ResourceError(
        f"{count(len(rows), 'training utterance', 'does/do')} not fit the budget of {budget_text(budget)} even "
        f"in a micro-batch of one: {named}{' and others' if len(rows) > 3 else ''}; the longest would need "
        f"{peak_text(too_long[-1].peak)}. Use {', '.join(helps)} or a smaller --preset."
    )


def device_costs(device: torch.device) -> DeviceCosts:
    """Return the device's fixed memory costs; the size of the CUDA context is measured if the driver reports it."""
    if device.type == "cpu":
        return cpu_costs()
    context = measure_context(device)
    context = None if context is None else context + LATER_KERNELS
    return cuda_costs(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), context)


def state_bytes(config: TrainConfig, architecture: Architecture) -> int:
    """Return the bytes of the model's weights, gradients and optimizer state."""
    # On the meta device: only the sizes of the tensors are needed.
    model = architecture.build_without_values()
    return model_state_bytes(model, build_optimizer(model, config.optimizer).tensors)


def checkpoint_bytes(architecture: Architecture, optimizer: OptimizerConfig = ADAMW) -> int:
    """Return an upper bound of a checkpoint's size in bytes."""
    model = architecture.build_without_values()
    state = [tensor for kinds in build_optimizer(model, optimizer).state.values() for tensor in kinds.values()]
    tensors = [*model.parameters(), *model.buffers()]
    if architecture.has_base:
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
    return sum(tensor.nbytes + RECORD_BYTES for tensor in [*tensors, *state]) + SETTINGS_BYTES


def planned_architecture(config: TrainConfig) -> Architecture:
    """Return the architecture for these settings before a corpus is read; weights of a folder are not read."""
    if config.pretrained.pretrained is None:
        return architecture_of(config, config.text.vocab_size)
    read = read_whisper_architecture(Path(config.pretrained.pretrained))
    context = config.pretrained.audio_context or read.audio_context
    return dataclasses.replace(read, tuning=config.tuning, audio_context=context)


def check_state(config: TrainConfig, architecture: Architecture, costs: DeviceCosts, budget: int) -> None:
    """Raise a ResourceError if the model's state alone, gradients included, exceeds the budget."""
    state = state_bytes(config, architecture) + costs.among_ranks
    beside = costs.workspace + costs.context
    if state + beside > budget:
        raise ResourceError(
            f"The weights, gradients and optimizer of this model need {state / MIB:.0f} MiB, and {costs.name} "
            f"needs another {beside / MIB:.0f} MiB: more than the budget of {budget / MIB:.0f} MiB. "
            f"{_largest_preset(config, budget - beside)}"
        )


def _largest_preset(config: TrainConfig, room: int) -> str:
    """Return a sentence that suggests the largest preset whose state fits into `room` bytes."""
    if config.pretrained.pretrained is not None:
        return "Use --freeze encoder or --lora_rank 32, a smaller model, or a larger budget."
    # PRESETS are in descending order of size.
    for name, shape in PRESETS.items():
        architecture = architecture_of(dataclasses.replace(config, model=shape), TextConfig().vocab_size)
        state = state_bytes(config, architecture)
        if state <= room:
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
    asked = config.memory.host_budget
    return parse_budget(asked) if asked else available_bytes(torch.device("cpu"))


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
