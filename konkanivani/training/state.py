"""The only thing that changes while a run trains, beside weights, optimizer and scaler."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.base.errors import CheckpointError
from konkanivani.data.batching import Cursor
from konkanivani.training.logs.learning import EpochLearning

# What older versions did not count.
NOT_COUNTED = {"splits": 0, "epoch_steps": 0, "epoch_clipped": 0, "epoch_loss": 0.0, "first_loss": 0.0}
STORED_NAMES = {"consumed": "window"}  # keys in checkpoints, which older versions read too
NOT_COUNTED |= {"initial_wer": math.inf, "initial_cer": math.inf}


@dataclass
class TrainState:
    """Counters of a run; every field is a plain number, and all of them are in the checkpoint.

    `epoch` and `consumed` are the cursor, `consumed` the epoch's global batches so far; `epochs_finished` counts those
    validated; `best_score` is the lowest validation score so far; `splits` counts how often a step ran out of memory
    and was begun again in smaller pieces. Of the epoch so far: its steps, how many of their gradients were clipped,
    their summed losses; `first_loss` is the mean loss of the first epoch's steps, 0 until it is finished. `initial_wer`
    and `initial_cer` are validation's of the weights that the run began with, inf where it began with none.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0
    epochs_finished: int = 0
    best_score: float = float("inf")
    epochs_without_improvement: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    audio_seconds: float = 0.0
    splits: int = 0
    epoch_steps: int = 0
    epoch_clipped: int = 0
    epoch_loss: float = 0.0
    first_loss: float = 0.0
    initial_wer: float = math.inf
    initial_cer: float = math.inf

    @property
    def cursor(self) -> Cursor:
        """Position of the next global batch in the data."""
        return Cursor(self.epoch, self.consumed)

    @property
    def has_epoch_to_finish(self) -> bool:
        """Whether an epoch's global batches are all consumed and its validation is still to come."""
        return self.consumed == 0 and self.epoch > self.epochs_finished

    def advance(self, cursor: Cursor, audio_seconds: float, is_skipped: bool, splits: int) -> None:
        """Count one consumed global batch; a skipped update does not advance the step and its learning rate."""
        self.epoch, self.consumed = cursor.epoch, cursor.consumed
        self.audio_seconds += audio_seconds
        self.splits += splits
        if is_skipped:
            self.skipped_steps += 1
            self.consecutive_skips += 1
        else:
            self.step += 1
            self.consecutive_skips = 0

    def begin_epoch(self) -> None:
        """Move the cursor to the epoch's first global batch and reset the epoch's counters."""
        self.consumed = 0
        self.epoch_steps, self.epoch_clipped, self.epoch_loss = 0, 0, 0.0

    def add_up(self, loss: float, is_clipped: bool) -> None:
        """Counts what the update of the epoch's latest step was made of."""
        self.epoch_steps += 1
        self.epoch_clipped += is_clipped
        self.epoch_loss += loss

    def learning(self, total_steps: int, cer: float = math.nan, blank_share: float | None = None) -> EpochLearning:
        """What the epoch whose windows are all consumed has shown, with its validation's CER and share of blanks."""
        steps = max(1, self.epoch_steps)
        return EpochLearning(
            first_step=self.step - self.epoch_steps,
            last_step=self.step,
            total_steps=total_steps,
            loss=self.epoch_loss / steps,
            first_loss=self.first_loss,
            clipped_share=self.epoch_clipped / steps,
            cer=cer,
            blank_share=blank_share,
        )

    def finish_epoch(self, score: float) -> bool:
        """Counts a validated epoch; whether its score is the best so far."""
        self.epochs_finished = self.epoch
        self.first_loss = self.first_loss or self.epoch_loss / max(1, self.epoch_steps)
        self.begin_epoch()
        is_best = score < self.best_score
        self.best_score = min(score, self.best_score)
        self.epochs_without_improvement = 0 if is_best else self.epochs_without_improvement + 1
        return is_best

    def state_dict(self) -> dict[str, int | float]:
        """Return the counters under the keys that checkpoints use."""
        return {STORED_NAMES.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes every counter from `state`; a CheckpointError where one is missing or of another kind."""
        state = NOT_COUNTED | dict(state)
        for field in dataclasses.fields(self):
            value = state.get(STORED_NAMES.get(field.name, field.name))
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**63):
                raise CheckpointError(
                    f"The checkpoint has an invalid {field.name}: {value!r:.40}. Use another checkpoint."
                )
            setattr(self, field.name, value)
