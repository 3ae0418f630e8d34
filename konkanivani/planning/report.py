"""Reports of memory plans before training, as tables or as JSON, planned in worker processes."""

import json
import math
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from konkanivani.child_process import two_processes
from konkanivani.config import AUTO, PRESETS, ModelConfig, Preset, TrainConfig, TuningConfig
from konkanivani.console import GIB, MIB, budget_text, peak_text
from konkanivani.data.text import text_limits
from konkanivani.flags import resolve, resolved, words_of
from konkanivani.lengths import SECONDS, TOKENS
from konkanivani.memory.devices import DeviceCosts, PlanTarget
from konkanivani.memory.plan import BucketPlan, RecomputePolicy, fits_search
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.architecture import Architecture
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import PUBLISHED_SIZES
from konkanivani.planning.plan import ALWAYS, MAX_UTTERANCES, NEVER, Planner, resolve_placement
from konkanivani.planning.sizes import (
    ONE_RANK,
    Ranks,
    check_host,
    check_state,
    checkpoint_bytes,
    choose_ranks,
    costs_per_rank,
    fits,
    planned_architecture,
    state_bytes,
    traffic_bytes,
    with_graphs,
)
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import kept_traces
from konkanivani.rules import check_input_flags, settings_of, with_text_defaults

TABLE_BUDGETS = (2.0, 4.0, 8.0, 14.7, 24.0)
# Flags that the plan itself sets.
DECIDED = {"memory_budget", "batch_size", "effective_batch_size", "gradient_accumulation_steps"} | {
    *("gradient_checkpointing", "max_duration", "shard")
}
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

    @property
    def window(self) -> float:
        """Longest input of the model, in its unit: of audio, or the limit of texts; may be infinite."""
        architecture = self.architecture
        if architecture.framing.unit == TOKENS:
            return float(text_limits(self.config.pretrained).input_tokens)
        return architecture.longest_seconds

    @property
    def lengths(self) -> list[float]:
        """Lengths to plan micro-batches for, in ascending order."""
        if self.architecture.framing.unit == TOKENS:
            return sorted({math.ceil(self.window * part) for part in (0.125, 0.25, 0.5, 1.0)})
        return sorted({min(seconds, self.window) for seconds in BUCKETS})

    def longest_peak(self, placement: Placement) -> Peak:
        """Return the peaks of one of the longest utterances with this placement of the weights."""
        longest = BUCKETS[-1] if self.window == math.inf else self.window
        with replace(self, placement=placement).planner() as planner:
            return planner.phases(BatchShape(1, longest, self.tokens(longest)), self.policy)

    @contextmanager
    def planner(self) -> Iterator[Planner]:
        """Yield a planner of this configuration that reuses and stores traces."""
        setting = self.config.data.concurrent_micro_batches
        # auto runs two in parallel only if memory is left: plan for one.
        concurrent_micro_batches = 1 if setting == AUTO else setting
        if self.costs.is_cuda or not self.placement.is_on_card:
            concurrent_micro_batches = 1
        with kept_traces(self.config, self.architecture, self.costs, self.placement) as traces:
            yield Planner(traces, self.budget, self.token_rate, concurrent_micro_batches)

    @property
    def architecture(self) -> Architecture:
        """The architecture to plan for."""
        return planned_architecture(self.config)

    @property
    def token_rate(self) -> float:
        """Target tokens per unit of the input: of read Konkani, or of texts by their limits."""
        if self.architecture.framing.unit != TOKENS:
            return _tokens_per_second(self.config)
        limits = text_limits(self.config.pretrained)
        return limits.target_tokens / limits.input_tokens

    def tokens(self, length: float) -> int:
        """Return the most target tokens of an input of this length, within the decoder's limit."""
        return int(min(max(1, round(length * self.token_rate)), self.architecture.most_tokens))

    def longest_utterance(self, planner: Planner) -> float:
        """Return the longest utterance in seconds that trains alone; 0 if none fits.

        With Whisper's 30 s window, all utterances cost the same; texts are cut.
        """
        window = self.window
        if window == math.inf:
            return planner.longest_utterance(self.tokens, self.policy)
        fits = planner.peak(BatchShape(1, window, self.tokens(window)), self.policy) <= planner.budget
        return window if fits else 0.0

    def print_result(self, result: str) -> None:
        """Report an intermediate result on stderr; the answer itself goes to stdout."""
        policy = "keeping activations" if self.mode == "never" else "recomputing all"
        # A single write, since two processes share stderr.
        sys.stderr.write(f"  {_name(self.config)}, {policy}: {result}\n")

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
    longest = request.window
    if request.architecture.framing.unit == SECONDS:
        longest = min(config.data.max_validation_duration, longest)
    with request.planner() as planner:
        _, peak = planner.validation_seconds(longest, request.tokens(longest), config.data.validation_batch_seconds)
    return peak


def _tokens_per_second(config: TrainConfig) -> int:
    is_ours = config.pretrained.pretrained is None
    return TOKENS_PER_SECOND[config.text.tokenizer_type] if is_ours else BYTE_PAIRS_PER_SECOND


def _name(config: TrainConfig) -> str:
    return config.pretrained.pretrained or config.run.init_from or config.run.preset


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
    unit: str = SECONDS.name
    has_memory_for_search: bool = True

    def as_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def as_table(self) -> str:
        """Return the report as a table for the user."""
        other_memory = f"workspaces {_mib(self.workspace)}" + (
            f", context {_mib(self.context)}" if self.context else ""
        )
        host = f", host memory {_mib(self.host)}" if self.host else ""
        lines = [
            f"Traced for {self.device} in {self.precision}; budget {_mib(self.budget)}.",
            f"State (weights, gradients, optimizer): {_mib(self.state)}. Other memory: {other_memory}.",
            *self._ranks(),
            f"{self.placement}{host}; a checkpoint needs {_mib(self.checkpoint)} of disk space.",
            "",
            f"{'':24}{'utterances of':>14}{'at once':>9}{self._input_noun:>9}{'activations':>13}{'peak':>11}",
        ]
        # As with all blocks on the host (`plan_budget`).
        is_same = replace(self.answers[0], gradient_checkpointing="always") == self.answers[-1]
        for answer in self.answers[-1:] if is_same else self.answers:
            title = "keeping activations" if answer.gradient_checkpointing == "never" else "recomputing all"
            for bucket in answer.buckets:
                lines.append(f"{title:24}{self._row(bucket)}")
                title = ""
            longest = f"{answer.longest_seconds:g} {self.unit}" if answer.longest_seconds else "none"
            lines.append(f"{'':24}longest utterance that fits: {longest}")
        validation = f"Validation: peak {_mib(self.validation_peak)}.{self._loss_only_sentence()}"
        return "\n".join([*lines, "", validation, "", f"Flags for the trainer: {self.flags}"])

    def _loss_only_sentence(self) -> str:
        """Return a sentence if validation generates no texts (`MemoryPlan.has_memory_for_search`)."""
        if self.has_memory_for_search:
            return ""
        return " That is more than the budget: only the loss is computed, without a search."

    @property
    def _input_noun(self) -> str:
        return "audio" if self.unit == SECONDS.name else "input"

    def _ranks(self) -> list[str]:
        """Return a line about sharding and traffic if there are several ranks."""
        if self.world_size == 1:
            return []
        layout = (
            "sharded: each rank holds at most"
            if self.sharded
            else "replicated: each rank, with an all-reduce bucket, holds"
        )
        return [
            (
                f"{self.world_size} ranks, state {layout} {_mib(self.state_of_rank)}; each sends {_mib(self.traffic)} "
                f"per {'micro-batch' if self.sharded else 'step'}. The table is for one rank."
            )
        ]

    def _row(self, bucket: BucketPlan) -> str:
        if not bucket.utterances:
            return f"{self._length(bucket.seconds):>14}{'none':>9}{'':22}{peak_text(bucket.peak):>11}"
        activations = bucket.peak - self.state_of_rank - self.workspace - self.context
        return (
            f"{self._length(bucket.seconds):>14}{bucket.utterances:9}"
            f"{self._length(bucket.utterances * bucket.seconds):>9}{_mib(activations):>13}{peak_text(bucket.peak):>11}"
        )

    def _length(self, length: float) -> str:
        return f"{length:.0f} s" if self.unit == SECONDS.name else f"{length:.0f}"


def read_report(line: str) -> PlanReport:
    """Return the report that `PlanReport.as_json` has written."""
    values = json.loads(line)
    answers = [
        Answer(
            answer_values["gradient_checkpointing"],
            tuple(BucketPlan(**bucket) for bucket in answer_values["buckets"]),
            answer_values["longest_seconds"],
        )
        for answer_values in values["answers"]
    ]
    return PlanReport(**(values | {"answers": tuple(answers)}))


def plan_budget(
    config: TrainConfig, costs: DeviceCosts, budget: int, ranks: Ranks = ONE_RANK, explicit_flags: Collection[str] = ()
) -> PlanReport:
    """Plan this configuration for `budget` bytes per rank; `explicit_flags` are those that the user has set.

    Raises a ResourceError if not even the model's state fits.
    """
    architecture = planned_architecture(config)
    is_text = architecture.framing.unit == TOKENS
    check_input_flags(frozenset(explicit_flags), is_text)
    config = resolve(with_text_defaults(config, frozenset(explicit_flags)) if is_text else config)
    costs = with_graphs(costs_per_rank(costs, architecture, ranks), config)
    blocks = len(architecture.build_without_values().blocks)
    # Tracing must not start in this process: it forks the workers.
    with two_processes() as pool:
        first = PlanRequest(config, costs, budget, "always")
        ((placement, longest),) = pool.run([(settle_placement, first, ranks)])
        # Fetched blocks are recomputed in either mode: if all are fetched, both answers are the same.
        modes = ("always",) if placement.offloaded_blocks >= blocks else ("never", "always")
        requests = [PlanRequest(config, costs, budget, mode, placement) for mode in modes]
        tasks = [*((answer, request) for request in requests), (peak_of_validation, requests[0])]
        *found, validation_peak = pool.run(tasks)
    answers: tuple[Answer, ...] = tuple(found)
    if len(answers) == 1:
        answers = (replace(answers[0], gradient_checkpointing="never"), *answers)
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
        flags=_flags(config, answers, budget, explicit_flags) + (" --shard always" if ranks.sharded else ""),
        world_size=ranks.world_size,
        sharded=ranks.sharded,
        state_of_rank=state + costs.among_ranks,
        traffic=traffic_bytes(architecture, ranks),
        placement=placement.describe(blocks).capitalize(),
        host=longest.host,
        checkpoint=checkpoint_bytes(architecture, config.optimizer, config.memory.weight_dtype),
        unit=architecture.framing.unit.name,
        has_memory_for_search=fits_search(placement, validation_peak, budget),
    )


def plan_target(
    config: TrainConfig, target: PlanTarget, world_size: int = 1, explicit_flags: Collection[str] = ()
) -> PlanReport:
    """Plan this configuration for a device and its budget, in one process or in `world_size` ranks."""
    ranks = choose_ranks(config, target.costs, target.budget, world_size)
    return plan_budget(config, target.costs, target.budget, ranks, explicit_flags)


def answer(request: PlanRequest) -> Answer:
    policy = request.policy
    buckets = []
    with request.planner() as planner:
        unit = request.architecture.framing.unit.name
        for length in request.lengths:
            buckets.append(planner.largest_batch(length, request.tokens(length), policy, MAX_UTTERANCES))
            request.print_result(f"micro-batch of {buckets[-1].utterances} utterances of {length:g} {unit}")
        longest = request.longest_utterance(planner)
    request.print_result(f"the longest utterance, {longest:g} {unit}")
    return Answer(request.mode, tuple(buckets), longest)


def plan_presets(
    config: TrainConfig,
    costs: DeviceCosts,
    presets: Mapping[Preset, ModelConfig] = PRESETS,
    budgets: tuple[float, ...] = TABLE_BUDGETS,
) -> str:
    """Return a table of presets by budgets in GiB: micro-batch of 10 s utterances, and longest utterance in seconds."""
    config = resolve(config)
    runs = [(replace(config.run, preset=name), shape) for name, shape in presets.items()]
    shaped = [replace(config, run=run, model=shape) for run, shape in runs]
    # Budget 0: _cells sets it for each column.
    requests = [PlanRequest(shape, costs, 0, mode) for shape in shaped for mode in ("never", "always")]
    with two_processes() as pool:
        cells = list(pool.run((_cells, request, budgets) for request in requests))
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
            request.print_result(f"{gib:g} GiB, {cells[-1]}")
    return cells


def _flags(config: TrainConfig, answers: tuple[Answer, ...], budget: int, explicit_flags: Collection[str]) -> str:
    """Return trainer flags: the given ones, and those that keep to the budget with the longest duration that fits."""
    # Slow speed perturbation lengthens an utterance; --max_duration limits it as recorded.
    slowest = min(resolved(config.augment.speed_perturbation))
    longest = min(config.data.max_duration, answers[-1].longest_seconds * slowest)
    words = [] if {"preset", "init_from", "pretrained"} & set(explicit_flags) else ["--preset", config.run.preset]
    for setting in settings_of(config):
        if setting.name in set(explicit_flags) - DECIDED:
            words += words_of(setting)
    words += ["--memory_budget", budget_text(budget)]
    words += ["--batch_size", "auto", "--effective_batch_size", str(config.global_batch_size)]
    words += ["--gradient_checkpointing", "auto"]
    if planned_architecture(config).framing.unit == SECONDS:
        words += ["--max_duration", f"{longest:g}"]
    return shlex.join(words)


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"


# --------------------
# GPU memory of fine-tuning each published Whisper size, by weight placement; planned without loading weights.


TRAINED = {
    "everything": TuningConfig(),
    "--freeze encoder": TuningConfig(freeze="encoder"),
    "--lora_rank 32": TuningConfig(lora_rank=32, lora_targets=("query", "value")),
}
PLACES = {"card": ON_CARD, "half": Placement(half_precision=True), "host": Placement(offloaded_blocks=99)}
WINDOW = BatchShape(1, 30.0, 444)  # one 30 s utterance with the longest label: text tokens after start and prompt


@dataclass(frozen=True)
class Cell:
    """Peak memory of the process in bytes: on the GPU in training and in validation, and on the host."""

    train: int
    valid: int
    host: int

    def words(self, most: int) -> str:
        """Format the peaks in MiB, with a star if both fit into `most` bytes."""
        fits = "*" if max(self.train, self.valid) <= most else " "
        return f"{self.train >> 20:,} / {self.valid >> 20:,}{fits}"


def plan_cell(size: str, trained: str, place: str, config: TrainConfig, costs: DeviceCosts) -> Cell:
    """Plan one utterance of 30 s with the longest label, every block recomputed."""
    architecture = WhisperArchitecture(PUBLISHED_SIZES[size], TRAINED[trained])
    with kept_traces(config, architecture, costs, PLACES[place]) as traces:
        # A budget of 1 PiB: the planner reports the peak without shrinking the batch.
        planner = Planner(traces, 2**50, WINDOW.tokens / WINDOW.seconds)
        step = planner.phases(WINDOW, ALWAYS)
        _, valid = planner.validation_seconds(WINDOW.seconds, WINDOW.tokens, WINDOW.seconds)
    return Cell(step.bytes + costs.beside, valid, step.host)


def plan_whisper(config: TrainConfig, costs: DeviceCosts, budget: int, sizes: Iterable[str] = PUBLISHED_SIZES) -> str:
    """Return the table as text: one line per model size and trained part."""
    memory = replace(config.memory, mixed_precision=True, gradient_checkpointing=AUTO)
    loss = replace(config.loss, ctc_weight=0.0, label_smoothing=0.0)
    config = resolve(replace(config, memory=memory, loss=loss))
    rows = [(size, trained) for size in sizes for trained in TRAINED]
    with two_processes() as pool:
        tasks = [(plan_cell, *row, place, config, costs) for row in rows for place in PLACES]
        cells = iter(list(pool.run(tasks)))
    lines = [
        f"Peak MiB on {costs.name} (budget {budget >> 20:,}) in training / validation: one utterance of 30 s with its",
        "longest label, half precision, all blocks recomputed, AdamW. *: it fits. Last column: host memory.",
        "",
        f"{'':10}{'trained':18}" + "".join(f"{f'--weights {place}':>19}" for place in PLACES) + f"{'host':>10}",
    ]
    for size, trained in rows:
        row_cells = [next(cells) for _ in PLACES]
        words = "".join(f"{cell.words(budget):>19}" for cell in row_cells)
        lines.append(f"{size:10}{trained:18}{words}{row_cells[-1].host >> 20:>10,}")
    return "\n".join(lines)
