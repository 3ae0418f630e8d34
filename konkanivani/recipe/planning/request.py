"""Requests to the memory planner before training, answered in worker processes."""

import dataclasses
import gc
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from konkanivani.base.config import AUTO, TrainConfig
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.planner import ALWAYS, NEVER, Planner
from konkanivani.memory.tracer import BatchShape, Peak
from konkanivani.memory.weights.placement import ON_CARD, Placement
from konkanivani.model.architecture import Architecture
from konkanivani.recipe.origin import planned_architecture
from konkanivani.recipe.planning.plan import resolve_placement
from konkanivani.recipe.planning.ranks import Ranks
from konkanivani.recipe.planning.state import check_host, check_state, fits
from konkanivani.recipe.planning.tracing import kept_traces

BUCKETS = (2.0, 5.0, 10.0, 20.0)
# Read Konkani: at most 15 characters per second, and at least 2.5 characters per subword.
TOKENS_PER_SECOND = {"char": 15, "bpe": 6, "unigram": 6}
BYTE_PAIRS_PER_SECOND = 17  # 1.13 tokens of Whisper's byte-pair encoding per character of Konkani


@dataclass(frozen=True)
class PlanRequest:
    """Question to the planner, with or without recomputing every block; picklable for a worker process."""

    config: TrainConfig
    costs: DeviceCosts
    budget: int
    mode: str
    placement: Placement = ON_CARD

    def fits(self, placement: Placement) -> bool:
        """Return whether one of the longest utterances fits with this placement of the weights."""
        return fits(self.config, self.architecture, self.costs, self.budget, self.longest_peak, placement)

    def longest_peak(self, placement: Placement) -> Peak:
        """Return the peaks of one of the longest utterances with this placement of the weights."""
        window = self.architecture.longest_seconds
        longest = BUCKETS[-1] if window == math.inf else window
        with dataclasses.replace(self, placement=placement).planner() as planner:
            return planner.phases(BatchShape(1, longest, self.tokens(longest)), self.policy)

    @contextmanager
    def planner(self) -> Iterator[Planner]:
        """Yield a planner of this configuration that reuses and stores traces."""
        asked = self.config.data.concurrent_micro_batches
        # auto runs two in parallel only if memory is left: plan for one.
        concurrent_micro_batches = 1 if asked == AUTO else asked
        if self.costs.is_cuda or not self.placement.is_on_card:
            concurrent_micro_batches = 1
        with kept_traces(self.config, self.architecture, self.costs, self.placement) as traces:
            yield Planner(traces, self.budget, _tokens_per_second(self.config), concurrent_micro_batches)

    @property
    def architecture(self) -> Architecture:
        """The architecture to plan for."""
        return planned_architecture(self.config)

    def tokens(self, seconds: float) -> int:
        """Return the most tokens of `seconds` of read Konkani, within the decoder's limit."""
        return int(min(max(1, round(seconds * _tokens_per_second(self.config))), self.architecture.most_tokens))

    def longest_utterance(self, planner: Planner) -> float:
        """Return the longest utterance in seconds that trains alone; 0 if none fits.

        With Whisper's 30 s window, all utterances cost the same.
        """
        window = self.architecture.longest_seconds
        if window == math.inf:
            return planner.longest_utterance(self.tokens, self.policy)
        fits = planner.peak(BatchShape(1, window, self.tokens(window)), self.policy) <= planner.budget
        return window if fits else 0.0

    def tell(self, found: str) -> None:
        """Report an intermediate result on stderr; the answer itself goes to stdout."""
        way = "keeping activations" if self.mode == "never" else "recomputing all"
        # A single write, since two processes share stderr.
        sys.stderr.write(f"  {_name(self.config)}, {way}: {found}\n")

    @property
    def policy(self) -> RecomputePolicy:
        """Policy that corresponds to `mode`."""
        return NEVER if self.mode == "never" else ALWAYS


def settle_placement(request: PlanRequest, ranks: Ranks) -> tuple[Placement, Peak]:
    """Return the placement of the weights and the peaks of one of the longest utterances.

    Runs in a worker process, because a process that has traced can no longer be forked safely. Raises a ResourceError
    if the state alone exceeds the budget or the host memory.
    """
    device = torch.device("cuda" if request.costs.is_cuda else "cpu")
    placement = resolve_placement(request.config, request.architecture, device, ranks, request.fits)
    if placement.is_on_card:
        check_state(request.config, request.architecture, request.costs, request.budget)
    peak = request.longest_peak(placement)
    check_host(peak.host, request.config, request.costs, placement)
    return placement, peak


def peak_of_validation(request: PlanRequest) -> int:
    """Return the peak bytes of validation, which recomputes nothing."""
    config = request.config
    longest = min(config.data.max_validation_duration, request.architecture.longest_seconds)
    concurrent_micro_batches = config.data.validation_batch_seconds
    with request.planner() as planner:
        _, peak = planner.validation_seconds(longest, request.tokens(longest), concurrent_micro_batches)
    return peak


def two_processes() -> ProcessPoolExecutor:
    """Return a pool of two worker processes: tracing is single-threaded Python, so that two of them halve the time."""
    return ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=_settle)


def _settle() -> None:
    """Prepare a forked worker: use one thread, and freeze the garbage collector's objects."""
    # OpenMP's threads do not survive the fork, and waiting for them would deadlock.
    torch.set_num_threads(1)
    # Inherited objects live as long as the process: the garbage collector need not scan them.
    gc.freeze()


def _tokens_per_second(config: TrainConfig) -> int:
    is_ours = config.pretrained.pretrained is None
    return TOKENS_PER_SECOND[config.text.tokenizer_type] if is_ours else BYTE_PAIRS_PER_SECOND


def _name(config: TrainConfig) -> str:
    return config.pretrained.pretrained or config.run.init_from or config.run.preset
