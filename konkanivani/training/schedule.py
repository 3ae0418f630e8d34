"""The learning rate of every step of a run whose length may change when it is resumed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.base.config import OptimizerConfig, TuningConfig
from konkanivani.base.errors import CheckpointError
from konkanivani.training.optimizer import begun_share, learning_rate, resolve_warmup


@dataclass(frozen=True)
class RateSchedule:
    """The length of a run in optimizer steps, and the length that its learning rates are computed for.

    Both are equal until a run is resumed with another length (`--continue_schedule`). Every field is a plain number and
    is saved in the checkpoint, so that a run that is stopped again after such a change keeps its rates.

    Args:
        run_steps: steps of the whole run.
        planned_steps: steps for which warm-up and decay are computed.
        head_only_planned_steps: the same for the warm-up of the layers that --freeze_steps leaves frozen at first.
        uncapped_steps: steps of the whole run without --max_steps.
        steps_per_epoch: steps of one epoch of the corpus as it is now.
        ramp_first: first step (0-based) of a linear ramp from `ramp_rate` to the schedule, `ramp_steps` long.
    """

    run_steps: int
    planned_steps: int
    head_only_planned_steps: int
    uncapped_steps: int
    steps_per_epoch: int
    ramp_first: int = 0
    ramp_steps: int = 0
    ramp_rate: float = 0.0

    @classmethod
    def of_length(cls, steps: int, uncapped_steps: int | None = None, steps_per_epoch: int = 1) -> "RateSchedule":
        """Return the schedule of a run of so many steps that begins at its first one."""
        return cls(steps, steps, steps, steps if uncapped_steps is None else uncapped_steps, steps_per_epoch)

    def rate(self, config: OptimizerConfig, step: int) -> float:
        """Return the learning rate of optimizer step `step` (0-based)."""
        done = step - self.ramp_first + 1
        if not 1 <= done <= self.ramp_steps:
            return learning_rate(config, step, self.planned_steps)
        target = learning_rate(config, self.ramp_first + self.ramp_steps - 1, self.planned_steps)
        return self.ramp_rate + (target - self.ramp_rate) * done / self.ramp_steps

    def begun_share(self, config: OptimizerConfig, tuning: TuningConfig, step: int) -> float:
        """Return the warm-up factor of the layers that --freeze_steps leaves frozen at first."""
        return begun_share(config, tuning, step, self.head_only_planned_steps)

    def state_dict(self) -> dict[str, int | float]:
        """Return every number by its name."""
        return dataclasses.asdict(self)


def read_schedule(state: Mapping[str, object]) -> RateSchedule:
    """Return the schedule of a checkpoint's state; raise a CheckpointError if it is not one."""
    kinds = {field.name: field.type for field in dataclasses.fields(RateSchedule)}
    for name, kind in kinds.items():
        value = state.get(name)
        if type(value) is not kind or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise CheckpointError(
                f"The checkpoint's schedule of the learning rate has {name} {value!r:.40}. Use another checkpoint."
            )
    return RateSchedule(**{name: state[name] for name in kinds})


def change_length(
    old: RateSchedule, old_config: OptimizerConfig, config: OptimizerConfig, run_steps: int, step: int
) -> RateSchedule:
    """Return the schedule of a run that has made `step` steps and now has `run_steps`, as --continue_schedule says.

    keep: the old schedule to its end, then its final rate (inverse_sqrt has no end). stretch: as if the new length had
    been known from the beginning. warm: the same after a linear ramp from the latest rate, as long as the warm-up.
    """
    if config.continue_schedule == "keep":
        return dataclasses.replace(old, run_steps=run_steps)
    if config.continue_schedule == "stretch":
        fresh = RateSchedule.of_length(run_steps)
        return dataclasses.replace(fresh, uncapped_steps=old.uncapped_steps, steps_per_epoch=old.steps_per_epoch)
    return dataclasses.replace(
        old,
        run_steps=run_steps,
        planned_steps=run_steps,
        ramp_first=step,
        ramp_steps=min(resolve_warmup(config, run_steps), run_steps - step),
        ramp_rate=old.rate(old_config, step - 1),
    )
