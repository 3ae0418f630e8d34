"""Report of a memory plan before training, as a table or as JSON."""

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import repeat

from konkanivani.base.auto_defaults import resolve, resolved
from konkanivani.base.config import PRESETS, ModelConfig, Preset, TrainConfig
from konkanivani.base.rules import settings_of
from konkanivani.base.units import GIB, MIB, budget_text, peak_text
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.plan import BucketPlan
from konkanivani.memory.planner import MAX_UTTERANCES
from konkanivani.recipe.disk import checkpoint_bytes
from konkanivani.recipe.origin import planned_architecture
from konkanivani.recipe.planning.ranks import ONE_RANK, Ranks, costs_per_rank, traffic_bytes
from konkanivani.recipe.planning.request import (
    BUCKETS,
    PlanRequest,
    peak_of_validation,
    settle_placement,
    two_processes,
)
from konkanivani.recipe.planning.state import state_bytes

TABLE_BUDGETS = (2.0, 4.0, 8.0, 14.7, 24.0)
# Flags that the plan itself sets.
DECIDED = {"memory_budget", "batch_size", "effective_batch_size", "gradient_accumulation_steps"} | {
    *("gradient_checkpointing", "max_duration", "shard")
}


@dataclass(frozen=True)
class Answer:
    """Planned buckets with or without recomputing every block; sizes in bytes, lengths in seconds."""

    gradient_checkpointing: str
    buckets: tuple[BucketPlan, ...]
    longest_seconds: float


@dataclass(frozen=True)
class PlanReport:
    """Planner's answers under one budget, in bytes; `flags` is a command line for the trainer."""

    device: str
    precision: str
    budget: int
    state: int
    workspace: int
    context: int
    validation_peak: int
    answers: tuple[Answer, ...]
    flags: str
    world_size: int = 1
    sharded: bool = False
    state_of_rank: int = 0
    traffic: int = 0
    placement: str = ""
    host: int = 0
    checkpoint: int = 0

    def as_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    def as_table(self) -> str:
        """Return the report as a table for the user."""
        beside = f"workspaces {_mib(self.workspace)}" + (f", context {_mib(self.context)}" if self.context else "")
        host = f", host memory {_mib(self.host)}" if self.host else ""
        lines = [
            f"Traced for {self.device} in {self.precision}; budget {_mib(self.budget)}.",
            f"State (weights, gradients, optimizer): {_mib(self.state)}. Other memory: {beside}.",
            *self._ranks(),
            f"{self.placement}{host}; a checkpoint needs {_mib(self.checkpoint)} of disk space.",
            "",
            f"{'':24}{'utterances of':>14}{'at once':>9}{'audio':>9}{'activations':>13}{'peak':>11}",
        ]
        for answer in self.answers:
            title = f"{'keeping activations' if answer.gradient_checkpointing == 'never' else 'recomputing all'}"
            for bucket in answer.buckets:
                lines.append(f"{title:24}{self._row(bucket)}")
                title = ""
            longest = f"{answer.longest_seconds:g} s" if answer.longest_seconds else "none"
            lines.append(f"{'':24}longest utterance that fits: {longest}")
        lines += ["", f"Validation: peak {_mib(self.validation_peak)}.", "", f"Flags for the trainer: {self.flags}"]
        return "\n".join(lines)

    def _ranks(self) -> list[str]:
        """Return a line about sharding and traffic if there are several ranks."""
        if self.world_size == 1:
            return []
        way = (
            "sharded: each rank holds at most"
            if self.sharded
            else "replicated: each rank, with an all-reduce bucket, holds"
        )
        return [
            (
                f"{self.world_size} ranks, state {way} {_mib(self.state_of_rank)}; each sends {_mib(self.traffic)} "
                f"per {'micro-batch' if self.sharded else 'step'}. The table is for one rank."
            )
        ]

    def _row(self, bucket: BucketPlan) -> str:
        if not bucket.utterances:
            return f"{bucket.seconds:12.0f} s{'none':>9}{'':22}{peak_text(bucket.peak):>11}"
        activations = bucket.peak - self.state_of_rank - self.workspace - self.context
        return (
            f"{bucket.seconds:12.0f} s{bucket.utterances:9}{bucket.utterances * bucket.seconds:7.0f} s"
            f"{_mib(activations):>13}{peak_text(bucket.peak):>11}"
        )


def plan_budget(
    config: TrainConfig, costs: DeviceCosts, budget: int, ranks: Ranks = ONE_RANK, given: Collection[str] = ()
) -> PlanReport:
    """Plan this configuration for `budget` bytes per rank; `given` are the flags that the user has set.

    Raises a ResourceError if not even the model's state fits.
    """
    config = resolve(config)
    architecture = planned_architecture(config)
    costs = costs_per_rank(costs, architecture, ranks)
    # Tracing must not start in this process: it forks the workers.
    with two_processes() as pool:
        placement, longest = pool.submit(settle_placement, PlanRequest(config, costs, budget, "always"), ranks).result()
        requests = [PlanRequest(config, costs, budget, mode, placement) for mode in ("never", "always")]
        awaited = pool.map(answer, requests)
        validation_peak = pool.submit(peak_of_validation, requests[0]).result()  # runs in the first worker that is free
        answers = tuple(awaited)
    # With offloading, only the trace knows the part of the state that is on the GPU.
    state = state_bytes(config, architecture) if placement.is_on_card else longest.state
    return PlanReport(
        device=costs.name,
        precision="half precision" if config.memory.mixed_precision else "full precision",
        budget=budget,
        state=state,
        workspace=costs.workspace,
        context=costs.context,
        validation_peak=validation_peak,
        answers=answers,
        flags=_flags(config, answers, budget, given) + (" --shard always" if ranks.sharded else ""),
        world_size=ranks.world_size,
        sharded=ranks.sharded,
        state_of_rank=state + costs.among_ranks,
        traffic=traffic_bytes(architecture, ranks),
        placement=placement.describe(len(architecture.build_without_values().blocks)).capitalize(),
        host=longest.host,
        checkpoint=checkpoint_bytes(architecture, config.optimizer),
    )


def answer(request: PlanRequest) -> Answer:
    policy = request.policy
    buckets = []
    with request.planner() as planner:
        for seconds in sorted({min(seconds, request.architecture.longest_seconds) for seconds in BUCKETS}):
            buckets.append(planner.largest_batch(seconds, request.tokens(seconds), policy, MAX_UTTERANCES))
            request.tell(f"micro-batch of {buckets[-1].utterances} utterances of {seconds:g} s")
        longest = request.longest_utterance(planner)
    request.tell(f"the longest utterance, {longest:g} s")
    return Answer(request.mode, tuple(buckets), longest)


def plan_presets(
    config: TrainConfig,
    costs: DeviceCosts,
    presets: Mapping[Preset, ModelConfig] = PRESETS,
    budgets: tuple[float, ...] = TABLE_BUDGETS,
) -> str:
    """Return a table of presets by budgets in GiB: micro-batch of 10 s utterances, and longest utterance in seconds."""
    config = resolve(config)
    runs = [(dataclasses.replace(config.run, preset=name), shape) for name, shape in presets.items()]
    shaped = [dataclasses.replace(config, run=run, model=shape) for run, shape in runs]
    # Budget 0: _cells sets it for each column.
    requests = [PlanRequest(shape, costs, 0, mode) for shape in shaped for mode in ("never", "always")]
    with two_processes() as pool:
        cells = list(pool.map(_cells, requests, repeat(budgets)))
    lines = [
        (
            f"Traced for {costs.name}, {config.text.vocab_size} tokens: micro-batch of 10 s utterances / longest "
            "utterance that fits, in s;"
        ),
        "each pair without, then with recomputation of every block.",
        "",
        f"{'':12}" + "".join(f"{f'{gib:g} GiB':>26}" for gib in budgets),
    ]
    for name, never, always in zip(presets, cells[::2], cells[1::2], strict=True):
        lines.append(f"{name:12}" + "".join(f"{'  '.join(pair):>26}" for pair in zip(never, always, strict=True)))
    return "\n".join(lines)


def _cells(request: PlanRequest, budgets: tuple[float, ...]) -> list[str]:
    """Return the table cells of a request, one per budget in GiB."""
    policy = request.policy
    cells = []
    state = state_bytes(request.config, request.architecture)
    with request.planner() as planner:
        for gib in budgets:
            # The traces do not depend on the budget: one planner serves all budgets.
            planner.budget = int(gib * GIB)
            if state + planner.beside() > planner.budget:
                # The state alone does not fit: no trace is needed.
                cells.append("- / -")
                continue
            largest_batch = planner.largest_batch(10.0, request.tokens(10.0), policy, MAX_UTTERANCES).utterances
            longest = request.longest_utterance(planner)
            cells.append(f"{largest_batch}{'+' if largest_batch == MAX_UTTERANCES else ''} / {longest:g}")
            request.tell(f"{gib:g} GiB, {cells[-1]}")
    return cells


def _flags(config: TrainConfig, answers: tuple[Answer, ...], budget: int, given: Collection[str]) -> str:
    """Return trainer flags: the given ones, and those that keep to the budget with the longest duration that fits."""
    # Slow speed perturbation lengthens an utterance; --max_duration limits it as recorded.
    slowest = min(resolved(config.augment.speed_perturbation))
    longest = min(config.data.max_duration, answers[-1].longest_seconds * slowest)
    words = [] if {"preset", "init_from", "pretrained"} & set(given) else ["--preset", config.run.preset]
    for setting in settings_of(config):
        if setting.name in set(given) - DECIDED:
            values = setting.value if isinstance(setting.value, tuple) else [setting.value]
            # A switch has no value.
            words += [f"--{setting.name}", *(str(value) for value in values if value is not True)]
    words += ["--memory_budget", budget_text(budget)]
    words += ["--batch_size", "auto", "--effective_batch_size", str(config.global_batch_size)]
    words += ["--gradient_checkpointing", "auto", "--max_duration", f"{longest:g}"]
    return shlex.join(words)


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
