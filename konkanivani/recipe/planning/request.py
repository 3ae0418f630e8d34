"""What is asked of the planner before anything is trained, answered in processes of their own."""

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
# Of Konkani read aloud: 15 characters a second at the most, and a subword holds at least two and a half of them.
TOKENS_PER_SECOND = {"char": 15, "bpe": 6, "unigram": 6}
BYTE_PAIRS_PER_SECOND = 17  # 1.13 of Whisper's a character of Konkani


@dataclass(frozen=True)
class PlanRequest:
    """What fits, with or without recomputing every block: what a process of its own needs to answer it."""

    config: TrainConfig
    costs: DeviceCosts
    budget: int
    mode: str
    placement: Placement = ON_CARD

    def fits(self, placement: Placement) -> bool:
        """Whether one utterance of the longest that are planned for fits, with the weights there."""
        return fits(self.config, self.architecture, self.costs, self.budget, self.longest_peak, placement)

    def longest_peak(self, placement: Placement) -> Peak:
        """The peaks of one of the longest utterances that are planned for, with the weights there."""
        window = self.architecture.longest_seconds
        longest = BUCKETS[-1] if window == math.inf else window
        with dataclasses.replace(self, placement=placement).planner() as planner:
            return planner.phases(BatchShape(1, longest, self.tokens(longest)), self.policy)

    @contextmanager
    def planner(self) -> Iterator[Planner]:
        """A planner of this configuration, who knows what was traced before."""
        asked = self.config.data.concurrent_micro_batches
        is_single_process = self.costs.is_cuda or asked == AUTO or not self.placement.is_on_card
        concurrent_micro_batches = 1 if is_single_process else asked  # auto: side by side only where there is room
        with kept_traces(self.config, self.architecture, self.costs, self.placement) as traces:
            yield Planner(traces, self.budget, _tokens_per_second(self.config), concurrent_micro_batches)

    @property
    def architecture(self) -> Architecture:
        """Which recogniser is asked about."""
        return planned_architecture(self.config)

    def tokens(self, seconds: float) -> int:
        """Of an utterance of so many seconds, as many as Konkani read aloud has at the most and the decoder takes."""
        return int(min(max(1, round(seconds * _tokens_per_second(self.config))), self.architecture.most_tokens))

    def longest_utterance(self, planner: Planner) -> float:
        """The longest utterance that trains alone, in seconds; 0 where none does. Of a window all cost the same."""
        window = self.architecture.longest_seconds
        if window == math.inf:
            return planner.longest_utterance(self.tokens, self.policy)
        fits = planner.peak(BatchShape(1, window, self.tokens(window)), self.policy) <= planner.budget
        return window if fits else 0.0

    def tell(self, found: str) -> None:
        """Says on the screen, and not where the answer goes, what has been found so far."""
        way = "keeping activations" if self.mode == "never" else "recomputing all"
        sys.stderr.write(f"  {_name(self.config)}, {way}: {found}\n")  # in one piece: two processes do so

    @property
    def policy(self) -> RecomputePolicy:
        """What is recomputed."""
        return NEVER if self.mode == "never" else ALWAYS


def settle_placement(request: PlanRequest, ranks: Ranks) -> tuple[Placement, Peak]:
    """Where the weights are to be, and what one of the longest utterances then takes; a ResourceError where it cannot.

    In a process of its own: who has traced cannot be forked any more.
    """
    device = torch.device("cuda" if request.costs.is_cuda else "cpu")
    placement = resolve_placement(request.config, request.architecture, device, ranks, request.fits)
    if placement.is_on_card:
        check_state(request.config, request.architecture, request.costs, request.budget)
    peak = request.longest_peak(placement)
    check_host(peak.host, request.config, request.costs, placement)
    return placement, peak


def peak_of_validation(request: PlanRequest) -> int:
    """Bytes at the peak of validation, which recomputes nothing."""
    config = request.config
    longest = min(config.data.max_validation_duration, request.architecture.longest_seconds)
    concurrent_micro_batches = config.data.validation_batch_seconds
    with request.planner() as planner:
        _, peak = planner.validation_seconds(longest, request.tokens(longest), concurrent_micro_batches)
    return peak


def two_processes() -> ProcessPoolExecutor:
    """Tracing is one thread of Python, so two of them take half the time."""
    return ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=_settle)


def _settle() -> None:
    """What a forked process must do first: OpenMP's threads were not forked with it, and to wait for them has no end.

    What is there at the fork is there to stay: frozen, the garbage collector need not walk through it.
    """
    torch.set_num_threads(1)
    gc.freeze()


def _tokens_per_second(config: TrainConfig) -> int:
    is_ours = config.pretrained.pretrained is None
    return TOKENS_PER_SECOND[config.text.tokenizer_type] if is_ours else BYTE_PAIRS_PER_SECOND


def _name(config: TrainConfig) -> str:
    return config.pretrained.pretrained or config.run.init_from or config.run.preset
