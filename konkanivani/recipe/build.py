"""Composition root: builds all parts of a run from its settings and the checkpoint that it starts from.

The training step comes first, under the memory plan of the run; then its data, storage and logs.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from konkanivani.config import TrainConfig
from konkanivani.console import MIB, Report, announced, budget_text, count, parse_budget, peak_text, say, silent
from konkanivani.data.batching import EpochPlanner, SizeLimit, largest_batch_bytes, same_size
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.shape_grid import choose_grid, measure_padding, micro_batch_sizes
from konkanivani.data.staging import CudaCopies, StagingBuffers
from konkanivani.decoding.decode import greedy_decode
from konkanivani.distributed import Topology, all_reduce_max, broadcast_from_rank0, choose_device, gather
from konkanivani.errors import UsageError
from konkanivani.flags import resolved
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import (
    BudgetWatch,
    announce_card,
    available_bytes,
    enforce_budget,
    resident_mib,
    set_mmap_threshold,
)
from konkanivani.memory.plan import MemoryPlan, plan_sentences
from konkanivani.memory.recovery import forget_sizes, read_sizes
from konkanivani.models.architecture import Architecture
from konkanivani.models.asr import frozen_count, parameter_count
from konkanivani.ops.passes import ALL_PASSES, ROOMY_PASSES
from konkanivani.planning.plan import generated_sizes, resolve_placement, resolve_plan, speech_sizes
from konkanivani.planning.sizes import Ranks, device_costs, needs_sharding
from konkanivani.recipe.resume import (
    count_steps,
    load_base,
    load_weights,
    schedule_rates,
    settle_stages,
    stateful_parts,
    take_checkpoint_folder,
    unsharded_model,
)
from konkanivani.recipe.run_data import RunData, build_speech, loader_config, more_tokens
from konkanivani.recipe.run_folders import listing_rejected, make_run_directory, open_logs
from konkanivani.recipe.startup import Start
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.graphs import GraphedGradient
from konkanivani.training.interruption import Interruption
from konkanivani.training.optimizer_state import FullState
from konkanivani.training.run import Run, RunStorage, TrainingData, TrainState
from konkanivani.training.step import StepParts
from konkanivani.training.validation import EvaluationSet


def build_planned_step(
    start: Start, device: torch.device, speech: RunData, planner: EpochPlanner, resident_before: float, report: Report
) -> tuple[StepParts, MemoryPlan | None]:
    """Return a freshly initialised step and the memory plan that it follows, or None if planning is off."""
    config = start.config
    topology = start.topology
    # All ranks use the memory of the rank with the least; ranks on one CPU share its memory. The minimum is computed as
    # the negative of a maximum.
    free = -all_reduce_max(
        topology, -(available_bytes(device) // (topology.local_world_size if device.type == "cpu" else 1))
    )
    architecture = start.architecture(speech.tokenizer.size)
    sharded = choose_sharding(config, architecture, device, free, topology)
    plan = None
    if config.is_planned:
        with announced("Making the memory plan: tracing batches of several lengths takes 10 to 20 s."):
            plan = plan_memory(start, speech, architecture, device, free, sharded)
    report("plan", _plan_sentence(config, plan, planner))
    placement = (
        plan.placement
        if plan
        else resolve_placement(config, architecture, device, Ranks(topology.world_size, sharded), lambda _: True)
    )
    total_steps = count_steps(config, planner)
    layout = StateLayout(topology, sharded, placement)
    passes = ROOMY_PASSES if plan and plan.has_spare_memory else ALL_PASSES
    step = build_step_parts(config, architecture, device, total_steps, layout=layout, passes=passes)
    if start.pretrained is not None:
        # The whole model is loaded on every rank, then sharded.
        load_base(start.pretrained, full_model := unsharded_model(start, step))
        if full_model is not step.model:
            FullState(step.model, topology).load_state_dict(full_model.state_dict())
    return (keep_to_plan(step, plan, resident_before) if plan else step), plan


def choose_sharding(
    config: TrainConfig, architecture: Architecture, device: torch.device, free: int, topology: Topology
) -> bool:
    """Return whether weights, gradients and optimizer state are sharded over the ranks, according to --shard."""
    is_asked = config.memory.shard == "always"
    tuning = config.tuning
    if topology.is_single_process or config.memory.shard == "never":
        return False
    budget = parse_budget(config.memory.memory_budget) if config.memory.memory_budget else free
    costs = device_costs(device)
    # Ranks may measure different free memory, but have to decide alike.
    sharded = is_asked or broadcast_from_rank0(topology, lambda: needs_sharding(config, architecture, costs, budget))
    if sharded and (tuning.freeze_steps or tuning.frozen_dtype == "half"):
        raise UsageError(
            "--freeze_steps and --frozen_dtype half do not support sharded weights: use --freeze_steps 0 and "
            "--frozen_dtype fp32, or --shard never."
        )
    return sharded


def plan_memory(
    start: Start, speech: RunData, architecture: Architecture, device: torch.device, free: int, sharded: bool
) -> MemoryPlan:
    """Return the run's memory plan: the checkpoint's, or a new one.

    The first rank plans for all with the memory of the rank that has least: planning needs a CPU core for seconds, for
    which the ranks of a machine would compete. All ranks then use the same micro-batches and recomputation.
    """
    validation = speech.validation
    return broadcast_from_rank0(
        start.topology,
        lambda: resolve_plan(
            start.config,
            architecture,
            device,
            free,
            Ranks(start.topology.world_size, sharded),
            train=speech_sizes(speech.train.utterances, min(speech.train.speeds), more_tokens(start.config)),
            validation=generated_sizes(validation.speech.utterances) if validation else None,
            stored=start.resumed.states.get("plan") if start.resumed else None,
        ),
    )


def keep_to_plan(step: StepParts, plan: MemoryPlan, resident_before: float) -> StepParts:
    """Return the step with the plan's recomputation and concurrency; enforce the budget if the device can."""
    device = step.forward.device
    if device.type == "cpu":
        # Without it, freed tensors leave holes in glibc's heap, and resident memory exceeds the plan.
        set_mmap_threshold()
    step.monitor.expect(plan.planned_peaks(before=resident_before if device.type == "cpu" else 0.0))
    enforce_budget(device, plan.budget, plan.context)
    step = step.recomputing(plan.recompute_policy())
    return replace(step, forward=replace(step.forward, concurrent_micro_batches=plan.concurrent_micro_batches))


def learn_sizes(config: TrainConfig, step: StepParts) -> None:
    """Load the out-of-memory limits that any rank recorded before a restart, if they still apply."""
    folder = Path(config.run.checkpoint_dir)
    topology = step.topology
    # --replan and --fresh discard the limits once, but not at a restart by torchrun, which repeats the flags.
    if (config.memory.replan or config.run.fresh) and not topology.restarts:
        forget_sizes(folder)
    for sizes in gather(topology, read_sizes(folder, step.oom_history.conditions)):
        step.oom_history.learn(sizes)


def micro_batch_limits(config: TrainConfig, step: StepParts, plan: MemoryPlan | None) -> tuple[SizeLimit, ...]:
    """Return the number of utterances per micro-batch, by their length; print the memory plan if there is one."""
    if plan is None:
        return same_size(resolved(config.data.batch_size))
    unit = step.architecture.framing.unit
    print(plan_sentences(plan, blocks=len(step.model.blocks), unit=unit), flush=True)
    return tuple(SizeLimit(bucket.seconds, bucket.utterances) for bucket in plan.buckets)


def _plan_sentence(config: TrainConfig, plan: MemoryPlan | None, planner: EpochPlanner) -> str:
    cut = f"micro-batches of {config.data.batch_size}, no memory plan"
    if plan:
        cut = f"planned peak {peak_text(plan.peak)} of {budget_text(plan.budget)}"
    steps = count(planner.global_batches_per_epoch(), "step")
    return f"{steps} of {count(config.global_batch_size, 'utterance')} per epoch, {cut}"


def print_plan(config: TrainConfig, step: StepParts, speech: TrainDataset, planner: EpochPlanner) -> None:
    amount = step.architecture.framing.unit.total(float(planner.durations.sum()))
    cut = f"{config.data.batch_size} x {config.data.gradient_accumulation_steps}"
    cut = str(config.global_batch_size) if config.data.batch_size == "auto" else cut
    concurrent_micro_batches = step.forward.concurrent_micro_batches
    side_by_side = f", {concurrent_micro_batches} micro-batches in parallel" if concurrent_micro_batches > 1 else ""
    amp = {None: "", torch.float16: " in fp16", torch.bfloat16: " in bf16"}[step.forward.amp_dtype]
    is_tuned = step.architecture.tuning.is_used
    trained, frozen = (counted(step.model) / 1e6 for counted in (parameter_count, frozen_count))
    parameters = f"{trained:.1f} M parameters" + (f", {frozen:.1f} M frozen" if is_tuned else "")
    print(
        f"{step.architecture.description}, {parameters}, {step.architecture.vocab_size} tokens, on "
        f"{step.forward.device.type}{amp}; {count(len(speech.utterances), 'utterance')}, "
        f"{amount}; {cut} utterances per step{side_by_side}, "
        f"{count(planner.global_batches_per_epoch(), 'step')} per epoch, {step.total_steps} in total.",
        flush=True,
    )


def budget_watch(plan: MemoryPlan | None, device: torch.device, resident_before: float) -> BudgetWatch:
    """Return the watch over the budget of a CPU run with a plan; elsewhere one without a limit."""
    budget = plan.budget / MIB if plan and device.type == "cpu" else float("inf")
    return BudgetWatch(budget, resident_before)


# --------------------
# The run.


def build_run(start: Start, report: Report = silent) -> Run:
    """Build all parts of the run and load the checkpoint's state; `report` is called after each stage.

    Paths and disk space have been checked by `resolve_start`; data is checked here first, then the memory plan is made.
    """
    resident_before = resident_mib()
    device = choose_device(start.config.run.device)
    announce_card(device)
    run_directory = make_run_directory(start.config.run) if start.topology.is_first else None
    # A dry run keeps no list of rejected utterances; a new run renames the list of an earlier one.
    with listing_rejected(None if start.config.run.dry_run else run_directory, bool(start.resumed)) as rejected:
        speech = build_speech(start, device, rejected)
        report("data", speech.sentence())
        planner = speech.epoch_planner()
        start = replace(start, config=(config := settle_stages(speech.config, planner)))
        step, plan = build_planned_step(start, device, speech, planner, resident_before, report)
        state = TrainState()
        stateful = stateful_parts(start, step, state)
        load_weights(start, speech.tokenizer, planner, step, state, stateful, speech.corpus)
        # The schedule of a resumed run depends on the state just loaded.
        step = replace(step, rates=schedule_rates(start, config, planner, state))
    learn_sizes(config, step)
    print_plan(config, step, speech.train, planner)
    limits = micro_batch_limits(config, step, plan)
    learn_shapes(config, step, speech.train, planner, limits)
    # From here on, files of an earlier run are moved: all checks have passed.
    checkpointer = take_checkpoint_folder(start, run_directory)
    data = TrainingData(
        tokenizer=speech.tokenizer,
        corpus=speech.corpus,
        global_batches=_global_batches(start, speech, planner, limits, staged_loader(config, step, speech, limits)),
        validation=validation_within(plan, speech.validation),
    )
    logs = open_logs(config, step, state, run_directory, budget_watch(plan, device, resident_before))
    return Run(
        config=config,
        state=state,
        step=step,
        data=data,
        plan=plan,
        decode=greedy_decode(step.architecture, speech.tokenizer),
        storage=RunStorage(checkpointer, stateful, planner.digest(), start.locks),
        logs=logs,
        interruption=Interruption(start.topology, checkpointer.discard_unfinished),
        topology=start.topology,
    )


def _global_batches(
    start: Start, speech: RunData, planner: EpochPlanner, limits: tuple[SizeLimit, ...], loader: LoaderConfig
) -> GlobalBatchStream:
    return GlobalBatchStream(speech.train, planner, limits, loader, speech.rejections, start.topology)


def staged_loader(config: TrainConfig, step: StepParts, speech: RunData, limits: tuple[SizeLimit, ...]) -> LoaderConfig:
    """Return the data loader settings for training; on a GPU, batches are copied through buffers of the largest's size.

    Validation repeats the same sizes in each epoch, for which PyTorch's cache of page-locked memory suffices.
    """
    device = step.forward.device
    loader = loader_config(config, device)
    if device.type != "cuda":
        return loader
    utterances = speech.train.utterances
    longest = float(utterances.durations.max()) / min(speech.train.speeds)
    most_tokens = int(utterances.tokens.max()) + more_tokens(config)
    limits = tuple(replace(limit, utterances=min(limit.utterances, config.global_batch_size)) for limit in limits)
    size = largest_batch_bytes(limits, longest, most_tokens, step.architecture.framing.unit)
    return replace(loader, staging=StagingBuffers(size, CudaCopies(device)))


def validation_within(plan: MemoryPlan | None, validation: EvaluationSet | None) -> EvaluationSet | None:
    """Return the validation with batches that fit the memory plan, without a search if the decoder does not fit."""
    if plan is None or validation is None:
        return validation
    if not plan.has_memory_for_search:
        needed = peak_text(plan.validation)
        budget = peak_text(plan.budget - plan.context)
        say(
            f"Validation computes only the loss: to generate texts, it would need {needed} of {budget}. For error "
            "rates, use konkanivani evaluate --device cpu."
        )
    return replace(validation.within(plan.validation_seconds), has_search=plan.has_memory_for_search)


def learn_shapes(
    config: TrainConfig, step: StepParts, speech: TrainDataset, planner: EpochPlanner, limits: tuple[SizeLimit, ...]
) -> None:
    """Choose the shapes to capture, from the utterances; with --cuda_graphs, print why nothing is captured."""
    if config.memory.cuda_graphs == "off":
        return
    gradient = step.compute_gradient
    if not isinstance(gradient, GraphedGradient):
        print(
            "CUDA graphs: not used; they need a GPU, one process, speech, and weights on the GPU in full precision.",
            flush=True,
        )
        return
    framing = step.architecture.framing
    has_fixed_length = framing.feature_length(1) == framing.feature_length(SAMPLE_RATE)
    tokens = speech.utterances.tokens.astype(np.int64) + more_tokens(config)
    sizes = micro_batch_sizes(planner, tokens, limits, speech.speeds, has_fixed_length)
    longest = int(np.ceil(planner.durations.max() / min(speech.speeds) * SAMPLE_RATE))
    gradient.grid = choose_grid(sizes, longest)
    padding = measure_padding(gradient.grid, sizes)
    print(
        f"CUDA graphs (not yet run on a GPU by the project): {count(len(gradient.grid.shapes), 'shape')}, "
        f"{padding.added_frames:.1%} more frames; {padding.uncaptured:.1%} of the frames in other shapes, without "
        "graphs. Front end, SpecAugment and CTC run between the graphs.",
        flush=True,
    )
