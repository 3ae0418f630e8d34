"""Memory plan: the search for micro-batches, recomputed blocks and placement that fit a budget.

Between traces, the peak is modelled as base + utterances x (fixed + slope x seconds). The model only guides the search:
every planned size has itself been traced.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from konkanivani.config import AUTO, TrainConfig
from konkanivani.console import budget_text, count, parse_budget, peak_text
from konkanivani.data.filtering import Selection
from konkanivani.data.index import Utterances
from konkanivani.errors import ResourceError, UsageError
from konkanivani.flags import resolved
from konkanivani.lengths import CHUNK_FRAMES, SECONDS, TOKENS, InputUnit
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.plan import BucketPlan, MemoryPlan, RecomputePolicy, read_plan
from konkanivani.memory.weights import ON_CARD, Placement, choose_placement
from konkanivani.models.architecture import Architecture
from konkanivani.ops.passes import ROOMY_PASSES
from konkanivani.planning.sizes import Ranks, check_host, check_state, costs_per_rank, device_costs, fits, with_graphs
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import Traces, kept_traces
from konkanivani.training.build_step import choose_concurrency, memory_conditions

# --------------------
# Search for the largest micro-batches, fewest recomputed blocks and longest utterance within a budget, by tracing.


MAX_SECONDS = 3600.0
MAX_UTTERANCES = 512
# Activations of a captured micro-batch relative to an eager one's: padding to the grid, masks, and a front end
# and CTC that cannot use the memory of the graphs. An estimate, not measured on a card yet.
GRAPH_GROWTH = 1.15
NEVER = RecomputePolicy("never")
ALWAYS = RecomputePolicy("always")

# Maximum number of tokens in an utterance of the given seconds.
TokenCount = Callable[[float], int]


@dataclass(frozen=True)
class Growth:
    """Linear model of a peak in bytes: base + utterances x (fixed + slope x seconds)."""

    base: float
    fixed: float
    slope: float

    def utterances(self, budget: int, seconds: float) -> float:
        """Return the number of utterances of `seconds` at which the peak reaches the budget."""
        return (budget - self.base) / max(1.0, self.fixed + self.slope * seconds)

    def seconds(self, budget: int) -> float:
        """Return the length in seconds at which the peak of one utterance reaches the budget."""
        return (budget - self.base - self.fixed) / max(1.0, self.slope)


class Planner:
    """Memory planner for one model on one device, under a budget in bytes.

    `tokens_per_second` is the average of the utterances and only speeds up the search. `concurrent_micro_batches` is
    the number of micro-batches that run in parallel.
    """

    def __init__(
        self, traces: Traces, budget: int, tokens_per_second: float, concurrent_micro_batches: int = 1
    ) -> None:
        self.traces = traces
        self.budget = budget
        self.tokens_per_second = tokens_per_second
        self.concurrent_micro_batches = concurrent_micro_batches
        self._growths: dict[RecomputePolicy, Growth] = {}

    def beside(self) -> int:
        """Return the bytes of fixed costs: workspaces, the context, and the effect of other ranks."""
        return self.traces.costs.beside

    def peak(self, shape: BatchShape, recompute: RecomputePolicy) -> int:
        """Return the peak in bytes of a step at this batch shape, everything included."""
        return self.phases(shape, recompute).bytes + self.beside()

    def phases(self, shape: BatchShape, recompute: RecomputePolicy) -> Peak:
        """Return the peaks of the step's phases in bytes of tensors."""
        peak = self.traces.peak(shape, recompute).side_by_side(self.concurrent_micro_batches)
        return peak.grown(GRAPH_GROWTH) if self.traces.costs.graphs else peak

    def largest_batch(self, seconds: float, tokens: int, recompute: RecomputePolicy, most: int) -> BucketPlan:
        """Return a micro-batch of these utterances that fits, at most `most`; its size has been traced.

        It is found by extrapolation from traced sizes: one that is slightly larger may fit too.
        """
        blocks = recompute(seconds).count
        blocks = min(blocks, self.traces.blocks)
        guess = self._growth(recompute).utterances(self.budget, seconds)
        utterances = int(np.clip(guess, 1, most))
        fits = 0
        too_large = most + 1
        while fits < utterances < too_large:
            peak = self.peak(BatchShape(utterances, seconds, tokens), recompute)
            fits, too_large = (utterances, too_large) if peak <= self.budget else (fits, utterances)
            base = self._growth(recompute).base
            reached = int(utterances * (self.budget - base) / max(1.0, peak - base))
            # Extrapolate linearly from the last trace, within the bounds; the loop ends if that is not a larger size.
            utterances = min(max(reached, fits), too_large - 1)
        peak = self.peak(BatchShape(max(1, fits), seconds, tokens), recompute)
        return BucketPlan(seconds, tokens, fits, blocks, peak)

    def min_recomputed(self, seconds: float, tokens: int) -> BucketPlan:
        """Return a micro-batch of one utterance with as few recomputed blocks as the budget allows."""
        shape = BatchShape(1, seconds, tokens)
        blocks = self.traces.blocks
        none = self.peak(shape, NEVER)
        every = self.peak(shape, ALWAYS)
        if every > self.budget:
            return BucketPlan(seconds, tokens, 0, blocks, every)
        # Block 0, the subsampling, differs from the others.
        a_block = max(1, (none - self.peak(shape, RecomputePolicy.first(2))) / 2)
        count = int(np.clip(np.ceil((none - self.budget) / a_block), 1, blocks))
        # The estimate assumes equal blocks: correct it in both directions.
        while self.peak(shape, RecomputePolicy.first(count)) > self.budget:
            count += 1
        while count > 1 and self.peak(shape, RecomputePolicy.first(count - 1)) <= self.budget:
            count -= 1
        return BucketPlan(seconds, tokens, 1, count, self.peak(shape, RecomputePolicy.first(count)))

    def longest_utterance(self, tokens: TokenCount, recompute: RecomputePolicy) -> float:
        """Return the longest utterance that trains alone, in whole seconds up to an hour; 0 if none fits.

        The search interpolates linearly between a length that fits and one that does not, and stops within 5 %.
        """
        fits = (0.0, self._growth(recompute).base)
        too_long = None
        seconds = min(MAX_SECONDS, float(int(self._growth(recompute).seconds(self.budget))))
        # An utterance just long enough for chunked computation takes less than a slightly shorter one: try it first.
        in_chunks = math.ceil(CHUNK_FRAMES * self.traces.encoder_hop / self.traces.unit.rate) + 1.0
        peak = self.peak(BatchShape(1, in_chunks, tokens(in_chunks)), recompute)
        if peak <= self.budget:
            fits = (in_chunks, float(peak))
            seconds = 4 * in_chunks
        while seconds > fits[0]:
            before = fits
            reached = (seconds, float(self.peak(BatchShape(1, seconds, tokens(seconds)), recompute)))
            fits, too_long = (reached, too_long) if reached[1] <= self.budget else (fits, reached)
            if self._is_close_enough(fits, too_long):
                break
            shorter, longer = (before, reached) if too_long is None else (fits, too_long)
            slope = max(1.0, (longer[1] - shorter[1]) / (longer[0] - shorter[0]))
            ahead = (self.budget - fits[1]) / slope
            # Far beyond the traced lengths the line is slightly too flat, and long traces take long: step below its
            # estimate.
            is_far = too_long is None and ahead > 4 * fits[0]
            seconds = min(MAX_SECONDS, float(int(fits[0] + (0.9 if is_far else 0.99) * ahead)))
        return fits[0]

    def _is_close_enough(self, fits: tuple[float, float], too_long: tuple[float, float] | None) -> bool:
        """Return whether `fits`, as (seconds, bytes), is within 3 % of the budget or 5 % (1 s) of a failed length."""
        if too_long is not None and too_long[0] - fits[0] <= max(1.0, too_long[0] / 20):
            return True
        return fits[1] > 0.97 * self.budget

    def validation_seconds(self, longest: float, tokens: int, asked: float, held_bytes: int = 0) -> tuple[float, int]:
        """Return the seconds of padded audio per validation batch, at most `asked`, and the peak in bytes.

        The peak is that at the longest utterances; `held_bytes` of training stay allocated. A single utterance is
        accepted even beyond the budget: validation needs far less memory than training, so that an actual failure is
        handled when it occurs.
        """
        utterances = max(1, int(asked // longest))
        seconds = asked
        while True:
            peak = self.traces.validation_peak(BatchShape(utterances, longest, tokens)) + self.beside() + held_bytes
            if peak <= self.budget or utterances == 1:
                return seconds, peak
            utterances //= 2
            seconds = utterances * longest

    def _growth(self, recompute: RecomputePolicy) -> Growth:
        """Return the linear model through three traces, whose sizes span most of the search."""
        if recompute not in self._growths:
            longest = min(self.traces.unit.typical, self.traces.longest_seconds)
            sizes = ((2, longest / 4), (2, longest), (6, longest / 2))
            shapes = [BatchShape(count, seconds, round(seconds * self.tokens_per_second)) for count, seconds in sizes]
            rows = np.array([[1.0, shape.utterances, shape.utterances * shape.seconds] for shape in shapes])
            peaks = np.array([self.peak(shape, recompute) for shape in shapes], dtype=float)
            self._growths[recompute] = Growth(*map(float, np.linalg.solve(rows, peaks)))
        return self._growths[recompute]


def plan_bucket(planner: Planner, seconds: float, tokens: int, mode: str, most: int) -> BucketPlan:
    """Return the plan of a bucket under --gradient_checkpointing `mode`.

    `auto` keeps all activations if one utterance fits with them, since smaller micro-batches cost less time than
    recomputation; otherwise it recomputes as few blocks as the budget allows.
    """
    plan = planner.largest_batch(seconds, tokens, ALWAYS if mode == "always" else NEVER, most)
    return planner.min_recomputed(seconds, tokens) if mode == "auto" and not plan.utterances else plan


# --------------------
# Memory plan of a run: from its utterances, settings and device, or from its checkpoint.


BUCKET_RATIO = 0.7  # between the longest utterances of neighbouring buckets
MAX_BUCKETS = 8


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


def generated_sizes(utterances: Selection) -> SpeechSizes:
    """Return the sizes of a validation set; of texts, generated tokens may reach the limit of targets."""
    sizes = speech_sizes(utterances, slowest=1.0)
    limits = utterances.text_limits
    if limits is None:
        return sizes
    return dataclasses.replace(sizes, tokens=np.maximum(sizes.tokens, limits.target_tokens - 1))


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
    if stored and not config.memory.replan and (stored_plan := _stored_plan(conditions, stored)):
        return stored_plan
    budget = parse_budget(config.memory.memory_budget) if config.memory.memory_budget else free
    rate = float(train.tokens.sum() / train.seconds.sum())
    costs = with_graphs(costs_per_rank(device_costs(device), architecture, ranks), config)
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
        alone = Planner(traces, budget, rate)
        plan = _plan_buckets(config, alone, conditions, train, validation)
        concurrent = choose_concurrency(config, device, ranks.sharded) if placement.is_on_card else 1
        # Parallel micro-batches share one budget: plan again for both at once.
        if concurrent > 1:
            shared = Planner(traces, budget, rate, concurrent)
            side_by_side = _plan_buckets(config, shared, conditions, train, validation)
            if _fits_concurrently(side_by_side, plan, is_asked_for=config.data.concurrent_micro_batches != AUTO):
                plan = side_by_side
    _check_every_utterance_fits(plan.buckets, train, config, budget, architecture.framing.unit)
    if costs.is_cuda and not costs.graphs and placement.is_on_card and ranks.world_size == 1:
        plan = _with_spare_memory(config, architecture, costs, plan, rate, validation)
    check_host(plan.host, config, costs, placement)
    return dataclasses.replace(plan, placement=placement)


def _stored_plan(conditions: int, stored: Mapping[str, object]) -> MemoryPlan | None:
    """Return the checkpoint's plan, or None if it was made under other conditions."""
    plan = read_plan(stored)
    if plan.conditions == conditions:
        return plan
    print("The checkpoint's memory plan was made under different conditions: making a new plan.", flush=True)
    return None


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
    requested = config.memory.weights
    if ranks.world_size > 1 and config.memory.weight_dtype == "bf16":
        raise UsageError("--weight_dtype bf16 supports one process: omit it, or use one process.")
    if ranks.world_size > 1 and requested not in (AUTO, "card"):
        raise UsageError(f"--weights {requested} supports one process: omit it, or use --shard always with several.")
    if requested == AUTO and (ranks.world_size > 1 or device.type == "cpu"):
        return ON_CARD
    blocks = len(architecture.build_without_values().blocks)
    has_masters = config.memory.mixed_precision and config.memory.weight_dtype == "fp32"
    return choose_placement(requested, blocks, has_masters, fits)


def _fits_concurrently(side_by_side: MemoryPlan, plan: MemoryPlan, is_asked_for: bool) -> bool:
    """Return whether parallel micro-batches fit; unless requested, they must not recompute additional blocks."""
    if not all(bucket.utterances for bucket in side_by_side.buckets):
        return False
    pairs = zip(side_by_side.buckets, plan.buckets, strict=True)
    return is_asked_for or all(
        concurrent.recomputed_blocks <= sequential.recomputed_blocks for concurrent, sequential in pairs
    )


def plan_conditions(config: TrainConfig, architecture: Architecture, device: torch.device, ranks: Ranks) -> int:
    """Return a hash of everything that a plan depends on except the data."""
    batch_settings = config.data.batch_size, config.global_batch_size, config.data.validation_batch_seconds
    return zlib.crc32(repr((memory_conditions(config, architecture, device), batch_settings, ranks)).encode())


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
    return _plan_of(config, planner, conditions, buckets, validation)


def _with_spare_memory(
    config: TrainConfig,
    architecture: Architecture,
    costs: DeviceCosts,
    plan: MemoryPlan,
    rate: float,
    validation: SpeechSizes | None,
) -> MemoryPlan:
    """Return the plan without the passes that save memory, if all of its buckets fit without them too.

    Micro-batches and recomputed blocks stay: smaller or more of them would cost more time than the passes.
    """
    with kept_traces(config, architecture, costs, passes=ROOMY_PASSES) as traces:
        planner = Planner(traces, plan.budget, rate)
        buckets = []
        for bucket in plan.buckets:
            shape = BatchShape(bucket.utterances, bucket.seconds, bucket.tokens)
            peak = planner.peak(shape, RecomputePolicy.first(bucket.recomputed_blocks))
            if peak > plan.budget:
                return plan
            buckets.append(dataclasses.replace(bucket, peak=peak))
        roomy = _plan_of(config, planner, plan.conditions, buckets, validation)
    return dataclasses.replace(roomy, has_spare_memory=True)


def _plan_of(
    config: TrainConfig, planner: Planner, conditions: int, buckets: list[BucketPlan], validation: SpeechSizes | None
) -> MemoryPlan:
    """Return the plan with these buckets, and with its peaks by phase."""
    # The peaks shown next to the measured ones are those reached by the most expensive bucket.
    costliest = max(buckets, key=lambda bucket: bucket.peak)
    load = BatchShape(max(1, costliest.utterances), costliest.seconds, costliest.tokens)
    peak = planner.phases(load, RecomputePolicy.first(costliest.recomputed_blocks))
    seconds = config.data.validation_batch_seconds
    validation_peak = 0
    if validation is not None:
        longest = float(validation.seconds.max())
        held_bytes = held_by_graphs(peak) if planner.traces.costs.graphs else 0
        seconds, validation_peak = planner.validation_seconds(
            longest, int(validation.tokens.max()), seconds, held_bytes
        )
    # The allocator's statistics, with which the peaks are compared, do not include the context.
    fixed_bytes = planner.traces.costs.beside - planner.traces.costs.context
    return MemoryPlan(
        conditions=conditions,
        budget=planner.budget,
        context=planner.traces.costs.context,
        buckets=tuple(buckets),
        validation_seconds=seconds,
        forward=peak.forward + fixed_bytes,
        backward=peak.backward + fixed_bytes,
        update=peak.update + fixed_bytes,
        validation=max(0, validation_peak - planner.traces.costs.context),
        concurrent_micro_batches=planner.concurrent_micro_batches,
        host=peak.host,
    )


def held_by_graphs(peak: Peak) -> int:
    """Return the bytes that captured steps keep between steps: their pool, and the gradients."""
    # Gradients are at most half of the state: 4 bytes per parameter, of at least 8 (Adafactor).
    return peak.bytes - peak.state + peak.state // 2


def max_at_once(config: TrainConfig, planner: Planner, seconds: float) -> int:
    """Return the largest micro-batch for utterances of `seconds`, regardless of memory."""
    if config.data.batch_size != "auto":
        return config.data.batch_size
    if planner.traces.costs.is_cuda:
        return config.global_batch_size
    max_utterances = -(
        -config.global_batch_size // planner.concurrent_micro_batches
    )  # at least one micro-batch for each concurrent slot
    return int(np.clip(planner.traces.unit.cpu_batch // seconds, 1, max_utterances))


def _check_every_utterance_fits(
    buckets: tuple[BucketPlan, ...], train: SpeechSizes, config: TrainConfig, budget: int, unit: InputUnit
) -> None:
    too_long = [bucket for bucket in buckets if not bucket.utterances]
    if not too_long:
        return
    limit = max((bucket.seconds for bucket in buckets if bucket.utterances), default=0.0)
    # Slow speed perturbation lengthens audio, and --max_duration applies to the recording. Rounded down to 0.1 s.
    as_recorded = int(10 * limit * min(resolved(config.augment.speed_perturbation))) / 10
    rows = [int(i) for i in np.argsort(-train.seconds) if train.seconds[i] > limit]
    listed = ", ".join(f"{train.utterances[i].id} ({unit.text(train.seconds[i])})" for i in rows[:3])
    helps = []
    if config.memory.gradient_checkpointing == "never":
        helps.append("--gradient_checkpointing auto")
    if unit == TOKENS and limit >= 2:
        helps.append(f"--max_input_tokens {limit:.0f}")
    elif unit == SECONDS and as_recorded > config.data.min_duration:
        helps.append(f"--max_duration {as_recorded:g}")
    if not config.memory.mixed_precision:
        helps.append("--mixed_precision")
    smaller = "model" if unit == TOKENS else "--preset"
    raise ResourceError(
        f"{count(len(rows), 'training utterance', 'does/do')} not fit the budget of {budget_text(budget)} even "
        f"in a micro-batch of one: {listed}{' and others' if len(rows) > 3 else ''}; the longest would need "
        f"{peak_text(too_long[-1].peak)}. Use {' or '.join([*helps, f'a smaller {smaller}'])}."
    )
