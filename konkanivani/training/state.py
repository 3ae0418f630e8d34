"""The only thing that changes while a run trains, beside weights, optimizer and scaler."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.data.batching import Cursor
from konkanivani.errors import CheckpointError


@dataclass
class TrainState:
    """Counters of a run; every field is a plain number, and all of them are in the checkpoint.

    `epoch` and `window` are the cursor; `epochs_finished` counts those validated; `best_score` is the lowest
    validation score so far; `splits` counts how often a step ran out of memory and was begun again in smaller pieces.
    """

    step: int = 0
    epoch: int = 0
    window: int = 0
    epochs_finished: int = 0
    best_score: float = float("inf")
    epochs_without_improvement: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    audio_seconds: float = 0.0
    splits: int = 0

    @property
    def cursor(self) -> Cursor:
        """Where in the data the next window lies."""
        return Cursor(self.epoch, self.window)

    @property
    def has_epoch_to_finish(self) -> bool:
        """Whether every window of an epoch is consumed and its validation is still to come."""
        return self.window == 0 and self.epoch > self.epochs_finished

    def advance(self, cursor: Cursor, audio_seconds: float, is_skipped: bool, splits: int) -> None:
        """Counts a consumed window; a skipped update holds the step, and with it the learning rate."""
        self.epoch, self.window = cursor.epoch, cursor.window
        self.audio_seconds += audio_seconds
        self.splits += splits
        if is_skipped:
            self.skipped_steps += 1
            self.consecutive_skips += 1
        else:
            self.step += 1
            self.consecutive_skips = 0

    def finish_epoch(self, score: float) -> bool:
        """Counts a validated epoch; whether its score is the best so far."""
        self.epochs_finished = self.epoch
        is_best = score < self.best_score
        self.best_score = min(score, self.best_score)
        self.epochs_without_improvement = 0 if is_best else self.epochs_without_improvement + 1
        return is_best

    def state_dict(self) -> dict[str, int | float]:
        """The counters by name."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes every counter from `state`; a CheckpointError where one is missing or of another kind."""
        state = {"splits": 0} | dict(state)  # older versions did not count them
        for field in dataclasses.fields(self):
            value = state.get(field.name)
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**63):
                raise CheckpointError(
                    f"The checkpoint's counter {field.name} is {value!r:.40}. Use another checkpoint."
                )
            setattr(self, field.name, value)
