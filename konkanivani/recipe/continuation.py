"""The learning rates of a resumed run, and which of them its flags, its length or its corpus change."""

from dataclasses import replace

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import OptimizerConfig, TrainConfig
from konkanivani.base.console import say
from konkanivani.base.flags import config_from_text
from konkanivani.data.batching import EpochPlanner
from konkanivani.recipe.beginning import count_steps, limit_steps
from konkanivani.recipe.corpus import remembered_corpus
from konkanivani.recipe.start import Start
from konkanivani.training.checkpoint.checkpoint import Checkpoint
from konkanivani.training.optimizer import RateSchedule, change_length, read_schedule
from konkanivani.training.state import TrainState

RATE_FLAGS = ("learning_rate", "schedule", "warmup_steps")


def schedule_rates(start: Start, config: TrainConfig, planner: EpochPlanner, state: TrainState) -> RateSchedule:
    """Return the learning rates of the run, whose state is loaded; print how they differ from the checkpoint's.

    The length of a resumed run is the number of finished steps plus the steps that remain with the present flags and
    corpus. It is computed as a difference to the stored length, because batches that cannot be read make no step.
    """
    if start.resumed is None:
        return _begin(config, planner)
    stored = config_from_text(start.resumed.config)
    old = _stored_schedule(start, start.resumed, stored, planner)
    # The stored length minus the steps that remained then is the finished part, whatever batches were skipped.
    uncapped = (
        old.uncapped_steps
        - _steps_to_come(stored, old.steps_per_epoch, state.epoch, stored_state(start.resumed).consumed)
        + _steps_to_come(config, planner.global_batches_per_epoch(), state.epoch, state.consumed)
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
    _tell_change(stored, old, config, schedule, state.step)
    return schedule


def _begin(config: TrainConfig, planner: EpochPlanner) -> RateSchedule:
    per_epoch = planner.global_batches_per_epoch()
    return RateSchedule.of_length(count_steps(config, planner), resolved(config.run.epochs) * per_epoch, per_epoch)


def _steps_to_come(config: TrainConfig, steps_per_epoch: int, epoch: int, consumed: int) -> int:
    """Return the steps from this position to the end of the last epoch."""
    return max(0, (resolved(config.run.epochs) - epoch) * steps_per_epoch - consumed)


def stored_state(checkpoint: Checkpoint) -> TrainState:
    """Return the counters with which the checkpoint was saved, before another corpus has moved the cursor."""
    state = TrainState()
    state.load_state_dict(checkpoint.states["progress"])
    return state


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


def _tell_change(stored: TrainConfig, old: RateSchedule, config: TrainConfig, new: RateSchedule, step: int) -> None:
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
    frozen = _frozen_first(stored, old, config, new, step)
    say(f"Learning rate: {before:.2e} at step {step}, {after:.2e} next{frozen}: {'; '.join(reasons)}.")


def _frozen_first(stored: TrainConfig, old: RateSchedule, config: TrainConfig, new: RateSchedule, step: int) -> str:
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
