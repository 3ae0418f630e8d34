"""Search for the largest micro-batches, fewest recomputed blocks and longest utterance within a budget, by tracing.

Between traces, the peak is modelled as base + utterances x (fixed + slope x seconds). The model only guides the search:
every planned size has itself been traced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from konkanivani.lengths import CHUNK_FRAMES, SAMPLE_RATE
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.plan import BucketPlan
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import Traces

MAX_SECONDS = 3600.0
MAX_UTTERANCES = 512
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
        return self.traces.peak(shape, recompute).side_by_side(self.concurrent_micro_batches)

    def largest_batch(self, seconds: float, tokens: int, recompute: RecomputePolicy, most: int) -> BucketPlan:
        """Return the largest micro-batch of these utterances that fits, at most `most`; its size has been traced."""
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
            # Extrapolate linearly from the last trace, within the bounds; the loop ends if no untried size is left.
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
        in_chunks = math.ceil(CHUNK_FRAMES * self.traces.encoder_hop / SAMPLE_RATE) + 1.0
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
            one, other = (before, reached) if too_long is None else (fits, too_long)
            slope = max(1.0, (other[1] - one[1]) / (other[0] - one[0]))
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

    def validation_seconds(self, longest: float, tokens: int, asked: float) -> tuple[float, int]:
        """Return the seconds of padded audio per validation batch, at most `asked`, and the peak in bytes.

        The peak is that at the longest utterances. A single utterance is accepted even beyond the budget: validation
        needs far less memory than training, so that an actual failure is handled when it occurs.
        """
        utterances = max(1, int(asked // longest))
        seconds = asked
        while True:
            peak = self.traces.validation_peak(BatchShape(utterances, longest, tokens)) + self.beside()
            if peak <= self.budget or utterances == 1:
                return seconds, peak
            utterances //= 2
            seconds = utterances * longest

    def _growth(self, recompute: RecomputePolicy) -> Growth:
        """Return the linear model through three traces, whose sizes span most of the search."""
        if recompute not in self._growths:
            longest = min(20.0, self.traces.longest_seconds)
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
