"""Memory plan of a run: from its utterances, settings and device, or from its checkpoint."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from konkanivani.auto_defaults import resolved
from konkanivani.config import AUTO, TrainConfig
from konkanivani.console import budget_text, count, parse_budget, peak_text
from konkanivani.data.filtering import Selection
from konkanivani.data.index import Utterances
from konkanivani.errors import ResourceError, UsageError
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.plan import BucketPlan, MemoryPlan, read_plan
from konkanivani.memory.weights import ON_CARD, Placement, choose_placement
from konkanivani.models.architecture import Architecture
from konkanivani.planning.planner import ALWAYS, NEVER, Planner, plan_bucket
from konkanivani.planning.sizes import Ranks, check_host, check_state, costs_per_rank, device_costs, fits
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import kept_traces
from konkanivani.training.build_step import choose_concurrency, memory_conditions

BUCKET_RATIO = 0.7  # between the longest utterances of neighbouring buckets
MAX_BUCKETS = 8
# On a CPU, longer micro-batches only add padding (4 x 2 beats 1 x 8: docs/performance.md); a GPU is faster the fuller
# it is.
MAX_CPU_SECONDS = 24.0


@dataclass(frozen=True)
class SpeechSizes:
    """Sizes of N utterances: seconds (N,) at the slowest speed, and tokens (N,)."""

    utterances: Utterances
    seconds: np.ndarray
    tokens: np.ndarray


def speech_sizes(utterances: Selection, slowest: float, more: int = 0) -> SpeechSizes:
    """Return the sizes of the utterances at the slowest speed, with `more` additional tokens each."""
    # Token counts are uint16: widen them before the addition.
    return SpeechSizes(utterances, utterances.durations / slowest, utterances.tokens.astype(np.int64) + more)


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
