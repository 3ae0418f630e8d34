"""State of a run: loaded from a checkpoint or a pretrained model at the start, and saved in its checkpoints."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import (
    PRETRAINED_STATE,
    Checkpoint,
    Stateful,
    check_finite,
    check_states,
    load_states,
    provenance_part,
)
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.config import OptimizerConfig, TrainConfig, TuningConfig
from konkanivani.console import say
from konkanivani.data.batching import EpochPlanner
from konkanivani.data.manifest import CorpusChange, Fingerprint, read_fingerprint
from konkanivani.data.text import Vocabulary
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import config_from_text, resolved
from konkanivani.inference.speech_model import Origin, Pretrained, digest_of
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.fine_tuning import LOW_RANK_TENSORS, reset_output_heads, transfer_weights
from konkanivani.recipe.run_folders import move_aside, move_newer_aside
from konkanivani.recipe.startup import Start
from konkanivani.training.build_step import build_forward
from konkanivani.training.optimizer_state import (
    FullState,
    OptimizerState,
    RateSchedule,
    TrainedPart,
    change_length,
    is_sharded,
    read_schedule,
    resolve_warmup,
)
from konkanivani.training.run import TrainState
from konkanivani.training.step import StepParts

RATE_FLAGS = ("learning_rate", "schedule", "warmup_steps")
MIN_SHARED = 0.5  # share of the smaller corpus's utterances: recordings may have been added and removed


def remembered_corpus(start: Start) -> Fingerprint | None:
    """Return the fingerprint of the checkpoint's corpus; None without a checkpoint, or if an old version wrote it."""
    state = start.resumed.states.get("corpus") if start.resumed else None
    return None if state is None else read_fingerprint(state)


def check_corpus(start: Start, corpus: Fingerprint) -> None:
    """Raise a CheckpointError if a resumed run has another corpus and --new_corpus is not given."""
    remembered = remembered_corpus(start)
    if remembered is None or remembered.shared(corpus) >= MIN_SHARED:
        return
    if start.config.run.new_corpus:
        say(f"Resuming with a different corpus: {corpus.sentence()}, after {remembered.sentence()}.")
        return
    raise CheckpointError(
        f"The run in {start.config.run.checkpoint_dir} was trained on {remembered.sentence()}, but the "
        f"training manifest now is {corpus.sentence()}. Start a new run with another --checkpoint_dir, or with "
        "--fresh instead of --resume (existing checkpoints are moved to a separate folder). To resume the old "
        "run on the new corpus, give --new_corpus."
    )


def unsharded_model(start: Start, step: StepParts) -> torch.nn.Module:
    """Return the step's model, or an unsharded copy of its architecture on the CPU if it is sharded."""
    if not is_sharded(step.model):
        return step.model
    return build_forward(start.config, step.architecture, torch.device("cpu")).model


def load_weights(
    start: Start,
    tokenizer: Vocabulary,
    planner: EpochPlanner,
    step: StepParts,
    state: TrainState,
    stateful: Mapping[str, Stateful],
    corpus: Fingerprint,
) -> None:
    """Load the checkpoint named by --resume or --init_from, if any, into the parts of the run."""
    if start.resumed:
        check_states(start.resumed, {*stateful, "plan", "corpus", "schedule"})
        # The out-of-memory limits ("splits") of the former memory plan do not apply to a new plan.
        forgotten = {"splits"} if start.config.memory.replan else set()
        load_states(start.resumed, {name: part for name, part in stateful.items() if name not in forgotten})
        remembered = remembered_corpus(start)
        change = None if remembered is None else remembered.change_to(corpus)
        _fit_cursor(state, start.resumed, planner, change)
    if start.initial:
        full_model = unsharded_model(start, step)
        # The rules of the flags reject --init_from with --pretrained.
        assert isinstance(full_model, KonkaniVaniASR)
        _transfer_weights(start.initial, start.config.tuning, stateful["model"], full_model, tokenizer)


def _fit_cursor(state: TrainState, checkpoint: Checkpoint, planner: EpochPlanner, change: CorpusChange | None) -> None:
    """Restart the epoch if its plan differs from the checkpoint's; print how the corpus has changed."""
    is_replanned = checkpoint.plan_digest != planner.digest()
    # At the start of an epoch, no utterance has been consumed that a new plan could repeat.
    is_restarted = is_replanned and state.consumed > 0
    if is_restarted:
        epoch = f"epoch {state.epoch + 1} is restarted"
        state.begin_epoch()
    else:
        epoch = f"epoch {state.epoch + 1} has a new plan" if is_replanned else "the order of the epoch is unchanged"
    if change is not None:
        planned = f"{epoch} with a new plan" if is_restarted else epoch
        say(f"The training corpus has changed since the checkpoint: {change.sentence()}; {planned}.")
    elif is_restarted:
        say(f"The training data or its order has changed since the checkpoint: {epoch}.")


def _transfer_weights(
    initial: Checkpoint, tuning: TuningConfig, stateful: Stateful, full_model: KonkaniVaniASR, tokenizer: Vocabulary
) -> None:
    """Copy the checkpoint weights that fit into `full_model`, and load them into `stateful` if that is sharded."""
    config = config_from_text(initial.config)
    # Low-rank products are merged into the weights, since the new run may have no adapters.
    stored = {name: value for name, value in initial.states["model"].items() if isinstance(value, torch.Tensor)}
    _, weights = architecture_of(config, initial.vocab_size).plain(stored)
    transfer = transfer_weights(
        full_model, weights, config.model, initial.tokenizer == tokenizer.model and not tuning.new_tokenizer
    )
    # If no encoder block fits, the shapes are too different for a useful transfer.
    if not any(name.startswith("encoder.blocks") for name in transfer.copied + transfer.cut):
        raise UsageError(
            "No block of the --init_from checkpoint fits the model shape given: it may be smaller, never "
            "larger. Omit --preset and the model shape flags to use the checkpoint's shape, or omit "
            "--init_from."
        )
    if tuning.new_tokenizer:
        reset_output_heads(full_model)
    # A value beyond 65504 becomes inf in float16.
    if tuning.frozen_dtype == "half":
        check_finite(f"the checkpoint of step {initial.step}, rounded to half precision,", full_model.state_dict())
    # A sharded model distributes the whole state to its ranks.
    if stateful is not full_model:
        stateful.load_state_dict(full_model.state_dict())
    print(f"Weights from the checkpoint of step {initial.step}:\n{transfer.summary()}", flush=True)


def load_base(pretrained: Pretrained, model: torch.nn.Module) -> None:
    """Load pretrained weights into a model of the same architecture; low-rank factors keep their initial values."""
    own = model.state_dict()
    missing = {name for name in own if not name.endswith(LOW_RANK_TENSORS)}
    # One weight at a time, so that the folder's weights are never in host memory all at once.
    for name, weight in pretrained.each_weight():
        own[name].copy_(weight)
        missing.remove(name)
    if missing:
        raise RuntimeError(f"the folder's weights do not match its architecture: {missing} are missing")


def make_origin(
    pretrained: Pretrained | None, resumed: Checkpoint | None, architecture: Architecture, model: torch.nn.Module
) -> Origin | None:
    """Return the provenance record for checkpoints, or None if the model is not pretrained.

    A collective call: the digest gathers sharded weights, so that all ranks have to call it.
    """
    if pretrained is None:
        stored = resumed.states.get(PRETRAINED_STATE) if resumed else None
        if stored is None:
            return None
        return Origin({name: value for name, value in stored.items() if name != "frozen"}, str(stored["frozen"]))
    # Checkpoints omit frozen weights; their digest shows on resume whether the folder still holds the same ones.
    named = model.named_parameters() if architecture.has_base else ()
    frozen = {name: weight for name, weight in named if not weight.requires_grad}
    return Origin(pretrained.description(), digest_of(frozen), pretrained.path)


def stored_state(checkpoint: Checkpoint) -> TrainState:
    """Return the counters with which the checkpoint was saved, before another corpus has moved the cursor."""
    state = TrainState()
    state.load_state_dict(checkpoint.states["progress"])
    return state


def count_steps(config: TrainConfig, planner: EpochPlanner) -> int:
    """Return the number of optimizer steps of the whole run."""
    return limit_steps(config, resolved(config.run.epochs) * planner.global_batches_per_epoch())


def limit_steps(config: TrainConfig, steps: int) -> int:
    """Return `steps`, or --max_steps if that is less."""
    return min(steps, config.run.max_steps or sys.maxsize)


def settle_stages(config: TrainConfig, planner: EpochPlanner) -> TrainConfig:
    """Return the configuration with `freeze_steps` set; by default, a new head trains alone during the warm-up."""
    if config.tuning.freeze_steps is not None:
        return config
    steps = resolve_warmup(config.optimizer, count_steps(config, planner)) if config.tuning.new_tokenizer else 0
    return replace(config, tuning=replace(config.tuning, freeze_steps=steps))


def schedule_rates(start: Start, config: TrainConfig, planner: EpochPlanner, state: TrainState) -> RateSchedule:
    """Return the learning rates of the run, whose state is loaded; print how they differ from the checkpoint's.

    The length of a resumed run is the stored length, minus the steps that remained at the checkpoint, plus those that
    remain with the present flags and corpus: a difference, because batches that cannot be read make no step.
    """
    if start.resumed is None:
        return _new_schedule(config, planner)
    stored = config_from_text(start.resumed.config)
    old = _stored_schedule(start, start.resumed, stored, planner)
    # The stored length minus the steps that remained then is the finished part, whatever batches were skipped.
    uncapped = (
        old.uncapped_steps
        - _remaining_steps(stored, old.steps_per_epoch, state.epoch, stored_state(start.resumed).consumed)
        + _remaining_steps(config, planner.global_batches_per_epoch(), state.epoch, state.consumed)
    )
    counted = replace(old, uncapped_steps=max(1, uncapped), steps_per_epoch=planner.global_batches_per_epoch())
    run_steps = limit_steps(config, counted.uncapped_steps)
    is_over = run_steps <= state.step or state.epoch >= resolved(config.run.epochs)
    if is_over:
        return counted
    # No step has been made yet: start a schedule of the new length.
    if state.step == 0:
        return RateSchedule.of_length(run_steps, counted.uncapped_steps, counted.steps_per_epoch)
    # A new --continue_schedule also matters if the schedule was planned for another length.
    is_other = config.optimizer.continue_schedule != stored.optimizer.continue_schedule
    if run_steps != old.run_steps or (is_other and old.planned_steps != run_steps):
        schedule = change_length(counted, stored.optimizer, config.optimizer, run_steps, state.step)
    else:
        schedule = counted
    _print_rate_change(stored, old, config, schedule, state.step)
    return schedule


def _new_schedule(config: TrainConfig, planner: EpochPlanner) -> RateSchedule:
    per_epoch = planner.global_batches_per_epoch()
    return RateSchedule.of_length(count_steps(config, planner), resolved(config.run.epochs) * per_epoch, per_epoch)


def _remaining_steps(config: TrainConfig, steps_per_epoch: int, epoch: int, consumed: int) -> int:
    """Return the steps from this position to the end of the last epoch."""
    return max(0, (resolved(config.run.epochs) - epoch) * steps_per_epoch - consumed)


def _stored_schedule(start: Start, checkpoint: Checkpoint, stored: TrainConfig, planner: EpochPlanner) -> RateSchedule:
    """Return the checkpoint's schedule; if an older version wrote it, the one that its settings imply."""
    state = checkpoint.states.get("schedule")
    if state is not None:
        return read_schedule(state)
    per_epoch = _steps_per_epoch_before(start, checkpoint, stored, planner)
    steps = resolved(stored.run.epochs) * per_epoch
    return RateSchedule.of_length(limit_steps(stored, steps), steps, per_epoch)


def _steps_per_epoch_before(start: Start, checkpoint: Checkpoint, stored: TrainConfig, planner: EpochPlanner) -> int:
    """Return the steps of an epoch of an older version's checkpoint, counted from its steps or from its corpus."""
    saved = stored_state(checkpoint)
    corpus = remembered_corpus(start)
    if checkpoint.plan_digest == planner.digest():
        return planner.global_batches_per_epoch()
    if saved.epoch:
        # Global batches consumed in the finished epochs, skipped ones included.
        consumed = saved.step + saved.skipped_steps - saved.consumed
        return max(1, round(consumed / saved.epoch))
    if corpus is None:
        return planner.global_batches_per_epoch()
    utterances = max(1, round(corpus.utterances * stored.data.train_subset / 100))
    return -(-utterances // stored.global_batch_size)


def _print_rate_change(
    stored: TrainConfig, old: RateSchedule, config: TrainConfig, new: RateSchedule, step: int
) -> None:
    """Print the learning rate before and after the resume and the reasons for the change, if any."""
    reasons = []
    for name in RATE_FLAGS:
        before = getattr(stored.optimizer, name)
        after = getattr(config.optimizer, name)
        if before != after:
            reasons.append(f"--{name} was {before}, now {after}")
    # A new length alone, with unchanged rates, is no reason for a message.
    if replace(old, uncapped_steps=new.uncapped_steps, steps_per_epoch=new.steps_per_epoch) != new:
        planned = f"schedule planned for {old.planned_steps} steps, now {new.run_steps}"
        reasons.append(f"{planned} (--continue_schedule {config.optimizer.continue_schedule})")
    if not reasons:
        return
    before = old.rate(stored.optimizer, step - 1)
    after = new.rate(config.optimizer, step)
    frozen = _frozen_layer_rates(stored, old, config, new, step)
    say(f"Learning rate: {before:.2e} at step {step}, {after:.2e} next{frozen}: {'; '.join(reasons)}.")


def _frozen_layer_rates(
    stored: TrainConfig, old: RateSchedule, config: TrainConfig, new: RateSchedule, step: int
) -> str:
    """Return the rates of the layers that --freeze_steps leaves frozen at first, while they differ from the head's."""

    def rate_of(schedule: RateSchedule, optimizer: OptimizerConfig, at: int) -> tuple[float, float]:
        share = schedule.delayed_warmup_factor(optimizer, config.tuning, at)
        return share, share * schedule.rate(optimizer, at)

    (share_before, before), (share_after, after) = (
        rate_of(old, stored.optimizer, step - 1),
        rate_of(new, config.optimizer, step),
    )
    if share_before == share_after == 1:
        return ""
    return f" (layers below the head: {before:.2e}, then {after:.2e})"


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
