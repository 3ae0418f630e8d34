"""Training step of a run under its memory plan."""

from dataclasses import replace
from pathlib import Path

import torch

from konkanivani.config import TrainConfig
from konkanivani.console import MIB, Report, announced, budget_text, count, parse_budget, peak_text
from konkanivani.data.batching import EpochPlanner, SizeLimit, same_size
from konkanivani.data.dataset import TrainDataset
from konkanivani.distributed import Topology, all_reduce_max, broadcast_from_rank0, gather
from konkanivani.errors import UsageError
from konkanivani.flags import resolved
from konkanivani.memory.monitor import BudgetWatch, available_bytes, enforce_budget, set_mmap_threshold
from konkanivani.memory.plan import MemoryPlan, plan_sentences
from konkanivani.memory.recovery import forget_sizes, read_sizes
from konkanivani.models.architecture import Architecture
from konkanivani.models.asr import frozen_count, parameter_count
from konkanivani.ops.passes import ALL_PASSES, ROOMY_PASSES
from konkanivani.planning.plan import generated_sizes, resolve_placement, resolve_plan, speech_sizes
from konkanivani.planning.sizes import Ranks, device_costs, needs_sharding
from konkanivani.recipe.resume import count_steps, load_base, unsharded_model
from konkanivani.recipe.run_data import RunData, more_tokens
from konkanivani.recipe.startup import Start
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.optimizer_state import FullState
from konkanivani.training.step import StepParts


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
