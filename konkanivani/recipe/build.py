"""Composition root: builds all parts of a run from its settings and the checkpoint that it starts from."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import TrainConfig
from konkanivani.base.console import Report, announced, count, duration_words, silent
from konkanivani.base.device import choose_device
from konkanivani.base.distributed import Topology, all_reduce_max, broadcast_from_rank0, gather
from konkanivani.base.errors import UsageError
from konkanivani.base.flags import config_to_text
from konkanivani.base.units import MIB, budget_text, parse_budget, peak_text
from konkanivani.data.batching import EpochPlanner, SizeLimit, same_size
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.loader.loading import GlobalBatchStream
from konkanivani.data.loader.workers import LoaderConfig
from konkanivani.decoding.decode import greedy_decode
from konkanivani.inference.provenance import provenance_part
from konkanivani.memory.budget import BudgetWatch, available_bytes, enforce_budget
from konkanivani.memory.gpu import announce_card
from konkanivani.memory.monitor import resident_mib, set_mmap_threshold
from konkanivani.memory.oom_history import forget_sizes, read_sizes
from konkanivani.memory.plan import MemoryPlan, plan_sentences
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import frozen_count, parameter_count
from konkanivani.recipe.beginning import count_steps, load_weights, settle_stages, whole_model
from konkanivani.recipe.build_step import StateLayout, build_step_parts
from konkanivani.recipe.continuation import schedule_rates, stored_state
from konkanivani.recipe.origin import load_base, make_origin
from konkanivani.recipe.planning.plan import resolve_placement, resolve_plan
from konkanivani.recipe.planning.ranks import Ranks, needs_sharding
from konkanivani.recipe.planning.state import device_costs
from konkanivani.recipe.run_folders import listing_rejected, make_run_directory, move_aside, move_newer_aside
from konkanivani.recipe.speech import RunData, build_speech, loader_config, more_tokens, speech_sizes
from konkanivani.recipe.start import Start
from konkanivani.training.checkpoint.checkpoint import PRETRAINED_STATE, Stateful
from konkanivani.training.checkpoint.checkpointer import Checkpointer
from konkanivani.training.checkpoint.trained_part import TrainedPart
from konkanivani.training.interruption import Interruption
from konkanivani.training.logs.logbook import Logbook
from konkanivani.training.logs.progress import Progress
from konkanivani.training.logs.records import Resumed
from konkanivani.training.logs.utilisation import Utilisation
from konkanivani.training.optimizer import OptimizerState
from konkanivani.training.run import Run
from konkanivani.training.sharding import FullState, is_sharded
from konkanivani.training.state import TrainState
from konkanivani.training.step import StepParts
from konkanivani.training.validation import EvaluationSet


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
    _learn_sizes(config, step)
    _tell_plan(config, step, speech.train, planner)
    limits = _micro_batch_limits(config, step, plan)
    # From here on, files of an earlier run are moved: all checks have passed.
    checkpointer = take_checkpoint_folder(start, run_directory)
    return Run(
        config=config.run,
        settings=config,
        tokenizer=speech.tokenizer,
        state=state,
        step=step,
        global_batches=_global_batches(start, speech, planner, limits, loader_config(config, device)),
        plan=plan,
        watch=BudgetWatch(plan.budget / MIB if plan and device.type == "cpu" else float("inf"), resident_before),
        validation=_validation_within(plan, speech.validation),
        decode=greedy_decode(step.architecture, speech.tokenizer),
        stateful=stateful,
        plan_digest=planner.digest(),
        checkpointer=checkpointer,
        locks=start.locks,
        corpus=speech.corpus,
        logbook=_open_logbook(run_directory, config, state),
        interruption=Interruption(start.topology, checkpointer.discard_unfinished),
        progress=Progress(state.step, step.total_steps),
        utilisation=Utilisation(step.architecture, device, step.forward.amp_dtype or torch.float32),
        topology=start.topology,
    )


def _open_logbook(run_directory: Path | None, config: TrainConfig, state: TrainState) -> Logbook:
    logbook = Logbook(run_directory, resumed=Resumed(state.step, state.skipped_steps, state.epochs_finished))
    logbook.log_settings(config_to_text(config))
    return logbook


def _global_batches(
    start: Start, speech: RunData, planner: EpochPlanner, limits: tuple[SizeLimit, ...], loader: LoaderConfig
) -> GlobalBatchStream:
    return GlobalBatchStream(speech.train, planner, limits, loader, speech.rejections, start.topology)


def _validation_within(plan: MemoryPlan | None, validation: EvaluationSet | None) -> EvaluationSet | None:
    """Return the validation with batches that fit the memory plan."""
    if plan is None or validation is None:
        return validation
    return validation.within(plan.validation_seconds)


def _micro_batch_limits(config: TrainConfig, step: StepParts, plan: MemoryPlan | None) -> tuple[SizeLimit, ...]:
    """Return the number of utterances per micro-batch, by their length; print the memory plan if there is one."""
    if plan is None:
        return same_size(resolved(config.data.batch_size))
    print(plan_sentences(plan, blocks=len(step.model.blocks)), flush=True)
    return tuple(SizeLimit(bucket.seconds, bucket.utterances) for bucket in plan.buckets)


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
    step = build_step_parts(config, architecture, device, total_steps, layout=layout)
    if start.pretrained is not None:
        # The whole model is loaded on every rank, then sharded.
        load_base(start.pretrained, whole := whole_model(start, step))
        if whole is not step.model:
            FullState(step.model, topology).load_state_dict(whole.state_dict())
    return (keep_to_plan(step, plan, resident_before) if plan else step), plan


def stateful_parts(start: Start, step: StepParts, state: TrainState) -> Mapping[str, Stateful]:
    """Return the stateful parts of a run by their names in checkpoints, with the provenance of its initial weights."""
    optimizer = OptimizerState(step.model, step.optimizer)
    sharded = is_sharded(step.model)
    model: Stateful = TrainedPart(step.model) if step.architecture.has_base else step.model
    origin = make_origin(start.pretrained, start.resumed, step.architecture, step.model)
    origins: dict[str, Stateful] = {PRETRAINED_STATE: origin} if origin else {}
    return {
        **origins,
        **provenance_part(start.resumed or start.initial),
        "model": FullState(model, step.topology) if sharded else model,
        "optimizer": FullState(optimizer, step.topology) if sharded else optimizer,
        "scaler": step.scaler,
        "progress": state,
        "splits": step.oom_history,
    }


def take_checkpoint_folder(start: Start, run_directory: Path | None) -> Checkpointer:
    """Return the checkpointer; on the first rank, move aside files of an earlier run or of later steps."""
    run = start.config.run
    resumed_step = start.resumed.step if start.resumed else None
    checkpointer = Checkpointer(run.checkpoint_dir, run.keep_checkpoints, resumed_step)
    if run_directory is not None:  # first: a partial file of a killed run is no checkpoint to keep
        checkpointer.discard_unfinished()
    if run_directory is not None and start.resumed:
        assert start.resumed_path is not None  # it is set together with `resumed`
        move_newer_aside(checkpointer, run_directory, start.resumed_path, start.resumed)
        saved = stored_state(start.resumed)
        checkpointer.restore_best(saved.epochs_finished - saved.epochs_without_improvement)
    elif run_directory is not None:
        move_aside(checkpointer, run_directory)
    return checkpointer


def _learn_sizes(config: TrainConfig, step: StepParts) -> None:
    """Load the out-of-memory limits that any rank recorded before a restart, if they still apply."""
    folder = Path(config.run.checkpoint_dir)
    topology = step.topology
    # --replan and --fresh discard the limits once, but not at a restart by torchrun, which repeats the flags.
    if (config.memory.replan or config.run.fresh) and not topology.restarts:
        forget_sizes(folder)
    for sizes in gather(topology, read_sizes(folder, step.oom_history.conditions)):
        step.oom_history.learn(sizes)


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
            validation=speech_sizes(validation.speech.utterances, slowest=1.0) if validation else None,
            stored=start.resumed.states.get("plan") if start.resumed else None,
        ),
    )


def keep_to_plan(step: StepParts, plan: MemoryPlan, resident_before: float) -> StepParts:
    """Return the step with the plan's recomputation and concurrency; enforce the budget if the device can."""
    device = step.forward.device
    if device.type == "cpu":
        # Without it, freed tensors leave holes in glibc's heap, and resident memory exceeds the plan.
        set_mmap_threshold()
    step.forward.monitor.expect(plan.planned_peaks(before=resident_before if device.type == "cpu" else 0.0))
    enforce_budget(device, plan.budget, plan.context)
    step = step.recomputing(plan.recompute_policy())
    return replace(step, forward=replace(step.forward, concurrent_micro_batches=plan.concurrent_micro_batches))


def _plan_sentence(config: TrainConfig, plan: MemoryPlan | None, planner: EpochPlanner) -> str:
    cut = f"micro-batches of {config.data.batch_size}, no memory plan"
    if plan:
        cut = f"planned peak {peak_text(plan.peak)} of {budget_text(plan.budget)}"
    steps = count(planner.global_batches_per_epoch(), "step")
    return f"{steps} of {count(config.global_batch_size, 'utterance')} per epoch, {cut}"


def _tell_plan(config: TrainConfig, step: StepParts, speech: TrainDataset, planner: EpochPlanner) -> None:
    hours = planner.durations.sum() / 3600
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
        f"{duration_words(hours)}; {cut} utterances per step{side_by_side}, "
        f"{count(planner.global_batches_per_epoch(), 'step')} per epoch, {step.total_steps} in total.",
        flush=True,
    )
