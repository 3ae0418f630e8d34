"""Counters of a run: the only state that changes during training besides weights, optimizer and scaler."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.base.errors import CheckpointError
from konkanivani.data.batching import Cursor
from konkanivani.training.logs.learning import EpochLearning

# Defaults of counters that are missing in the checkpoints of older versions.
NOT_COUNTED = {"splits": 0, "epoch_steps": 0, "epoch_clipped": 0, "epoch_loss": 0.0, "first_loss": 0.0}
STORED_NAMES = {"consumed": "window"}  # keys in checkpoints, which older versions read too
NOT_COUNTED |= {"initial_wer": math.inf, "initial_cer": math.inf}


@dataclass
class TrainState:
    """Counters of a run.

    Every field is a plain number, and all fields are stored in the checkpoint.

    Args:
        step: optimizer steps so far.
        epoch, consumed: the cursor; `consumed` is the number of the epoch's global batches so far.
        epochs_finished: epochs that have been validated.
        best_score: lowest validation score so far.
        splits: OOM retries of steps with smaller micro-batches.
        epoch_steps, epoch_clipped, epoch_loss: of the current epoch, the steps so far, the number with a clipped
            gradient, and their summed losses.
        first_loss: mean loss over the steps of the first epoch; 0 until it is finished.
        initial_wer, initial_cer: validation of the initial weights; inf if the run started from random weights.
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
        """Return whether all global batches of an epoch are consumed and its validation is pending."""
        return self.consumed == 0 and self.epoch > self.epochs_finished

    def advance(self, cursor: Cursor, audio_seconds: float, is_skipped: bool, splits: int) -> None:
        """Count one consumed global batch; a skipped update does not advance the step and its learning rate."""
        self.epoch = cursor.epoch
        self.consumed = cursor.consumed
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
        self.epoch_steps = 0
        self.epoch_clipped = 0
        self.epoch_loss = 0.0

    def add_up(self, loss: float, is_clipped: bool) -> None:
        """Add the loss and the clipping of the latest step to the epoch's counters."""
        self.epoch_steps += 1
        self.epoch_clipped += is_clipped
        self.epoch_loss += loss

    def learning(self, total_steps: int, cer: float = math.nan, blank_share: float | None = None) -> EpochLearning:
        """Return the statistics of the epoch just consumed, with the results of its validation."""
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
        """Count a validated epoch; return whether its score is the best so far."""
        self.epochs_finished = self.epoch
        # 0.0 means unset, so only the first epoch sets it.
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
        """Read every counter from `state`; raise a CheckpointError if one is missing or has another type."""
        state = NOT_COUNTED | dict(state)
        for field in dataclasses.fields(self):
            value = state.get(STORED_NAMES.get(field.name, field.name))
            # type() rather than isinstance, because a bool is an int.
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**63):
                raise CheckpointError(
                    f"The checkpoint has an invalid {field.name}: {value!r:.40}. Use another checkpoint."
                )
            setattr(self, field.name, value)
