"""What fits a memory budget, as a table for a person or as JSON, before anything is trained."""

import dataclasses
import gc
import json
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context

import torch

from konkanivani.base.amount import resolve
from konkanivani.base.config import AUTO, PRESETS, ModelConfig, TrainConfig
from konkanivani.base.rules import settings_of
from konkanivani.base.units import GIB, MIB, budget_text, peak_text
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.placement import ON_CARD, Placement
from konkanivani.memory.plan import BucketPlan
from konkanivani.memory.planner import ALWAYS, MAX_UTTERANCES, NEVER, Planner
from konkanivani.memory.tracer import BatchShape, Peak
from konkanivani.model.architecture import Architecture
from konkanivani.recipe.disk import checkpoint_bytes
from konkanivani.recipe.origin import planned_architecture
from konkanivani.recipe.planning.plan import (
    ONE_RANK,
    Ranks,
    check_host,
    check_state,
    costs_per_rank,
    resolve_placement,
    state_bytes,
    traffic_bytes,
)
from konkanivani.recipe.planning.tracing import kept_traces

BUCKETS = (2.0, 5.0, 10.0, 20.0)
TABLE_BUDGETS = (2.0, 4.0, 8.0, 14.7, 24.0)
# Of Konkani read aloud: 15 characters a second at the most, and a subword holds at least two and a half of them.
TOKENS_PER_SECOND = {"char": 15, "bpe": 6, "unigram": 6}
BYTE_PAIRS_PER_SECOND = 17  # 1.13 of Whisper's a character of Konkani


@dataclass(frozen=True)
class Answer:
    """What fits with or without recomputing every block; bytes and seconds."""

    gradient_checkpointing: str
    buckets: tuple[BucketPlan, ...]
    longest_seconds: float


@dataclass(frozen=True)
class PlanReport:
    """The answers under one budget; bytes. `flags` is a line for the trainer."""

    device: str
    precision: str
    budget: int
    state: int
    workspace: int
    context: int
    validation_peak: int
    answers: tuple[Answer, ...]
    flags: str
    world: int = 1
    sharded: bool = False
    state_of_rank: int = 0
    traffic: int = 0
    placement: str = ""
    host: int = 0
    checkpoint: int = 0

    def as_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def as_table(self) -> str:
        """The lines for a person."""
        beside = f"workspaces {_mib(self.workspace)}" + (f", context {_mib(self.context)}" if self.context else "")
        lines = [
            f"Traced for {self.device} in {self.precision}; budget {_mib(self.budget)}.",
            f"State: weights, gradients and optimizer {_mib(self.state)}. Beside the tensors: {beside}.",
            *self._ranks(),
            f"{self.placement}{f', on the host {_mib(self.host)}' if self.host else ''}; a checkpoint takes "
            f"{_mib(self.checkpoint)} of the disk.",
            "",
            f"{'':24}{'utterances of':>14}{'at once':>9}{'audio':>9}{'activations':>13}{'peak':>11}",
        ]
        for answer in self.answers:
            title = f"{'keeping activations' if answer.gradient_checkpointing == 'never' else 'recomputing all'}"
            for bucket in answer.buckets:
                lines.append(f"{title:24}{self._row(bucket)}")
                title = ""
            longest = f"{answer.longest_seconds:g} s" if answer.longest_seconds else "none"
            lines.append(f"{'':24}longest utterance that trains: {longest}")
        lines += ["", f"Validation: peak {_mib(self.validation_peak)}.", "", f"Flags for the trainer: {self.flags}"]
        return "\n".join(lines)

    def _ranks(self) -> list[str]:
        """What several ranks make of it, a line if any."""
        if self.world == 1:
            return []
        way = "sharded over them, each rank holds at most" if self.sharded else "whole on each, with a bucket for sums"
        return [
            f"{self.world} ranks, the state {way} {_mib(self.state_of_rank)}; each sends {_mib(self.traffic)} a "
            f"{'micro-batch' if self.sharded else 'step'}. What follows is for one rank."
        ]

    def _row(self, bucket: BucketPlan) -> str:
        if not bucket.utterances:
            return f"{bucket.seconds:12.0f} s{'none':>9}{'':22}{peak_text(bucket.peak):>11}"
        activations = bucket.peak - self.state_of_rank - self.workspace - self.context
        return (
            f"{bucket.seconds:12.0f} s{bucket.utterances:9}{bucket.utterances * bucket.seconds:7.0f} s"
            f"{_mib(activations):>13}{peak_text(bucket.peak):>11}"
        )


def plan_budget(config: TrainConfig, costs: DeviceCosts, budget: int, ranks: Ranks = ONE_RANK) -> PlanReport:
    """What of this configuration fits `budget` bytes, on each rank; a ResourceError where not even its state does."""
    config = resolve(config)
    architecture = planned_architecture(config)
    costs = costs_per_rank(costs, architecture, ranks)
    with _two_processes() as pool:
        placement, longest = pool.submit(_placed, PlanRequest(config, costs, budget, "always"), ranks).result()
        requests = [PlanRequest(config, costs, budget, mode, placement) for mode in ("never", "always")]
        awaited = pool.map(_answer, requests)
        validation_peak = pool.submit(_validation_peak, requests[0]).result()  # by the process that is done first
        answers = tuple(awaited)
    state = state_bytes(architecture) if placement.is_on_card else longest.state
    return PlanReport(
        device=costs.name,
        precision="half precision" if config.memory.mixed_precision else "full precision",
        budget=budget,
        state=state,
        workspace=costs.workspace,
        context=costs.context,
        validation_peak=validation_peak,
        answers=answers,
        flags=_flags(config, answers, budget) + (" --shard always" if ranks.sharded else ""),
        world=ranks.world,
        sharded=ranks.sharded,
        state_of_rank=state + costs.among_ranks,
        traffic=traffic_bytes(architecture, ranks),
        placement=placement.describe(len(architecture.build_without_values().blocks)).capitalize(),
        host=longest.host,
        checkpoint=checkpoint_bytes(architecture),
    )


@dataclass(frozen=True)
class PlanRequest:
    """What fits, with or without recomputing every block: what a process of its own needs to answer it."""

    config: TrainConfig
    costs: DeviceCosts
    budget: int
    mode: str
    placement: Placement = ON_CARD

    def placed(self, placement: Placement) -> "PlanRequest":
        """The same question about weights elsewhere."""
        return dataclasses.replace(self, placement=placement)

    def fits(self, placement: Placement) -> bool:
        """Whether one utterance of the longest that are planned for fits, with the weights there."""
        if placement.is_on_card and state_bytes(self.architecture) + self.costs.beside > self.budget:
            return False
        return self.placed(placement).longest_peak().bytes + self.costs.beside <= self.budget

    def longest_peak(self) -> Peak:
        """The peaks of one of the longest utterances that are planned for."""
        window = self.architecture.longest_seconds
        longest = BUCKETS[-1] if window == math.inf else window
        with self.planner() as planner:
            return planner.phases(BatchShape(1, longest, self.tokens(longest)), self.policy)

    @contextmanager
    def planner(self) -> Iterator[Planner]:
        """A planner of this configuration, who knows what was traced before."""
        asked = self.config.data.micro_batches_at_once
        is_alone = self.costs.is_cuda or asked == AUTO or not self.placement.is_on_card
        at_once = 1 if is_alone else asked  # auto: side by side only where there is room
        with kept_traces(self.config, self.architecture, self.costs, self.placement) as traces:
            yield Planner(traces, self.budget, _tokens_per_second(self.config), at_once)

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


def _placed(request: PlanRequest, ranks: Ranks) -> tuple[Placement, Peak]:
    """Where the weights are to be, and what one of the longest utterances then takes; a ResourceError where it cannot.

    In a process of its own: who has traced cannot be forked any more.
    """
    device = torch.device("cuda" if request.costs.is_cuda else "cpu")
    placement = resolve_placement(request.config, request.architecture, device, ranks, request.fits)
    if placement.is_on_card:
        check_state(request.config, request.architecture, request.costs, request.budget)
    peak = request.placed(placement).longest_peak()
    check_host(peak.host, request.config, request.costs, placement)
    return placement, peak


def _validation_peak(request: PlanRequest) -> int:
    """Bytes at the peak of validation, which recomputes nothing."""
    config = request.config
    longest = min(config.data.max_validation_duration, request.architecture.longest_seconds)
    at_once = config.data.validation_batch_seconds
    with request.planner() as planner:
        _, peak = planner.validation_seconds(longest, request.tokens(longest), at_once)
    return peak


def _two_processes() -> ProcessPoolExecutor:
    """Tracing is one thread of Python, so two of them take half the time."""
    return ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=_settle)


def _settle() -> None:
    """What a forked process must do first: OpenMP's threads were not forked with it, and to wait for them has no end.

    What is there at the fork is there to stay: frozen, the garbage collector need not walk through it.
    """
    torch.set_num_threads(1)
    gc.freeze()


def _answer(request: PlanRequest) -> Answer:
    policy, buckets = request.policy, []
    with request.planner() as planner:
        for seconds in sorted({min(seconds, request.architecture.longest_seconds) for seconds in BUCKETS}):
            buckets.append(planner.largest_batch(seconds, request.tokens(seconds), policy, MAX_UTTERANCES))
            request.tell(f"utterances of {seconds:g} s, {buckets[-1].utterances} at once")
        longest = request.longest_utterance(planner)
    request.tell(f"the longest utterance, {longest:g} s")
    return Answer(request.mode, tuple(buckets), longest)


def plan_presets(
    config: TrainConfig,
    costs: DeviceCosts,
    presets: Mapping[str, ModelConfig] = PRESETS,
    budgets: tuple[float, ...] = TABLE_BUDGETS,
) -> str:
    """A table of presets by budgets in GiB: utterances of 10 s at once, and the longest that trains, in seconds."""
    config = resolve(config)
    runs = [(dataclasses.replace(config.run, preset=name), shape) for name, shape in presets.items()]
    shaped = [dataclasses.replace(config, run=run, model=shape) for run, shape in runs]
    requests = [PlanRequest(shape, costs, 0, mode) for shape in shaped for mode in ("never", "always")]
    with _two_processes() as pool:
        cells = list(pool.map(_cells, requests, repeat(budgets)))
    lines = [
        f"Traced for {costs.name}, {config.text.vocab_size} tokens: utterances of 10 s at once / longest utterance, in "
        "seconds, that trains;",
        "each pair first keeping activations, then recomputing every block.",
        "",
        f"{'':12}" + "".join(f"{f'{gib:g} GiB':>26}" for gib in budgets),
    ]
    for name, never, always in zip(presets, cells[::2], cells[1::2], strict=True):
        lines.append(f"{name:12}" + "".join(f"{'  '.join(pair):>26}" for pair in zip(never, always, strict=True)))
    return "\n".join(lines)


def _cells(request: PlanRequest, budgets: tuple[float, ...]) -> list[str]:
    """The question's cell for each budget in GiB."""
    policy, cells = request.policy, []
    state = state_bytes(request.architecture)
    with request.planner() as planner:
        for gib in budgets:
            planner.budget = int(gib * GIB)
            if state + planner.beside() > planner.budget:
                cells.append("- / -")
                continue
            at_once = planner.largest_batch(10.0, request.tokens(10.0), policy, MAX_UTTERANCES).utterances
            longest = request.longest_utterance(planner)
            cells.append(f"{at_once}{'+' if at_once == MAX_UTTERANCES else ''} / {longest:g}")
            request.tell(f"{gib:g} GiB, {cells[-1]}")
    return cells


def _tokens_per_second(config: TrainConfig) -> int:
    is_ours = config.pretrained.pretrained is None
    return TOKENS_PER_SECOND[config.text.tokenizer_type] if is_ours else BYTE_PAIRS_PER_SECOND


def _name(config: TrainConfig) -> str:
    return config.pretrained.pretrained or config.run.init_from or config.run.preset


def _flags(config: TrainConfig, answers: tuple[Answer, ...], budget: int) -> str:
    """The flags with which the trainer keeps to the budget, at the duration asked for or the longest that trains."""
    longest = min(config.data.max_duration, answers[-1].longest_seconds * min(config.augment.speed_perturbation))
    pairs = zip(settings_of(config), settings_of(TrainConfig()), strict=True)
    asked = [one for one, default in pairs if one.group in ("pretrained", "tuning") and one.value != default.value]
    words = ["--preset", config.run.preset] if config.pretrained.pretrained is None else []
    words = ["--init_from", config.run.init_from] if config.run.init_from else words
    for setting in asked:
        values = setting.value if isinstance(setting.value, tuple) else [setting.value]
        words += [f"--{setting.name}", *(str(value) for value in values if value is not True)]
    words += ["--memory_budget", budget_text(budget)]
    words += ["--batch_size", "auto", "--effective_batch_size", str(config.window_size)]
    words += ["--gradient_checkpointing", "auto", "--max_duration", f"{longest:g}"]
    if config.data.micro_batches_at_once != AUTO:
        words += ["--micro_batches_at_once", str(config.data.micro_batches_at_once)]
    return " ".join(words + (["--mixed_precision"] if config.memory.mixed_precision else []))


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
