"""Parts of a run that the training loop works with, and its state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from konkanivani.checkpoints.checkpoint import Checkpoint, ScoreKind, Stateful
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.checkpoints.run_lock import RunLock
from konkanivani.config import TrainConfig
from konkanivani.data.batching import Cursor
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.manifest import Fingerprint
from konkanivani.data.text import Vocabulary
from konkanivani.decoding.decode import Decode
from konkanivani.distributed import ALONE, Topology, gather
from konkanivani.errors import CheckpointError
from konkanivani.flags import config_to_text, resolved
from konkanivani.memory.monitor import BudgetWatch, MemoryMonitor
from konkanivani.memory.plan import MemoryPlan
from konkanivani.training.interruption import Interruption
from konkanivani.training.logbook import Logbook
from konkanivani.training.optimizer_state import is_sharded
from konkanivani.training.progress import EpochLearning, Progress, Utilisation
from konkanivani.training.step import StepParts
from konkanivani.training.validation import Evaluation, EvaluationSet

# --------------------
# Counters of a run.


# Defaults of counters that are missing in the checkpoints of older versions.
NOT_COUNTED = {"splits": 0, "epoch_steps": 0, "epoch_clipped": 0, "epoch_loss": 0.0, "first_loss": 0.0}
STORED_NAMES = {"consumed": "window"}  # keys in checkpoints, which older versions read too
NOT_COUNTED |= {"initial_wer": math.inf, "initial_cer": math.inf, "score_kind": 0}


@dataclass
class TrainState:
    """Counters of a run.

    Every field is a plain number, and all fields are stored in the checkpoint.

    Args:
        step: optimizer steps so far.
        epoch, consumed: the cursor; `consumed` is the number of the epoch's global batches so far.
        epochs_finished: epochs that have been validated.
        best_score, score_kind: lowest validation score so far, and its `ScoreKind`.
        splits: OOM retries, of any kind (`MicroBatchPlan.smaller`).
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
    score_kind: int = ScoreKind.UNKNOWN.value

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
        self.move_to(cursor)
        self.audio_seconds += audio_seconds
        self.splits += splits
        if is_skipped:
            self.skipped_steps += 1
            self.consecutive_skips += 1
        else:
            self.step += 1
            self.consecutive_skips = 0

    def move_to(self, cursor: Cursor) -> None:
        """Set the position of the next global batch."""
        self.epoch = cursor.epoch
        self.consumed = cursor.consumed

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

    def finish_epoch(self, score: float, kind: ScoreKind) -> bool:
        """Count a validated epoch; return whether its score is the best so far of this kind."""
        self.epochs_finished = self.epoch
        # 0.0 means unset, so only the first epoch sets it.
        self.first_loss = self.first_loss or self.epoch_loss / max(1, self.epoch_steps)
        self.begin_epoch()
        if self.score_kind not in (ScoreKind.UNKNOWN, kind) or math.isnan(self.best_score):
            # Resumed with another validation, such as on a GPU that has no memory for a search. Version 0.1 stored NaN.
            self.best_score = math.inf
            self.epochs_without_improvement = 0
        self.score_kind = kind.value
        is_best = score < self.best_score
        if is_best:  # not min(), which returns its first argument if one is NaN
            self.best_score = score
        self.epochs_without_improvement = 0 if is_best else self.epochs_without_improvement + 1
        return is_best

    def state_dict(self) -> dict[str, int | float]:
        """Return the counters under the keys that checkpoints use."""
        return {STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Read every counter from `state`; raise a CheckpointError if one is missing or has another type."""
        state = NOT_COUNTED | dict(state)
        for field in fields(self):
            value = state.get(STORED_NAMES.get(field.name, field.name))
            # type() rather than isinstance, because a bool is an int.
            if type(value) is not field.type or (type(value) is int and not 0 <= value < 2**63):
                raise CheckpointError(
                    f"The checkpoint has an invalid {field.name}: {value!r:.40}. Use another checkpoint."
                )
            setattr(self, field.name, value)


# --------------------
# Container of a run's parts, which the recipe builds once.


@dataclass(frozen=True)
class TrainingData:
    """Data of a run: the global batches of its epochs, its validation set, and how both were made."""

    tokenizer: Vocabulary
    corpus: Fingerprint
    global_batches: GlobalBatchStream
    validation: EvaluationSet | None


@dataclass(frozen=True)
class RunStorage:
    """Content and place of a run's checkpoints.

    Args:
        stateful: parts of the run by their names in a checkpoint (`stateful_parts` in recipe/resume.py): model,
            optimizer, scaler (the GradScaler), progress (the TrainState) and splits (the OomHistory), which
            `load_weights` in recipe/resume.py restores. `Run.checkpoint` adds the corpus, the learning rates and the
            memory plan, which `resolve_plan` in planning/plan.py reads. History and plan are stored because the
            division into micro-batches changes rounding and, on a CPU, dropout masks. No generator is stored: all
            random numbers are functions of seed and step, or seed, epoch and utterance (randomness.py).
        plan_digest: digest of the order of the data (the epoch plan, not the memory plan).
        locks: locks of the run's folders.
    """

    checkpointer: Checkpointer
    stateful: Mapping[str, Stateful]
    plan_digest: int
    locks: tuple[RunLock, ...]


@dataclass(frozen=True)
class RunLogs:
    """Log files, progress bar and device utilisation of a run, and the watch over its memory budget."""

    logbook: Logbook
    progress: Progress
    utilisation: Utilisation
    watch: BudgetWatch


@dataclass(frozen=True)
class Run:
    """Parts that the training loop works with.

    No field is assigned again; training changes the counters in `state`, and weights, optimizer, scaler and OOM history
    in `step`.
    """

    config: TrainConfig
    state: TrainState
    step: StepParts
    data: TrainingData
    plan: MemoryPlan | None
    decode: Decode
    storage: RunStorage
    logs: RunLogs
    interruption: Interruption
    topology: Topology = ALONE

    @property
    def monitor(self) -> MemoryMonitor:
        """Monitor of memory and time per phase."""
        return self.step.monitor

    def evaluate(self, utterances: EvaluationSet) -> Evaluation:
        """Return losses and error rates over a set; an interruption raises Interrupted."""
        evaluation = utterances.evaluate(self.step.forward, self.decode, self.interruption.check)
        self.monitor.end_phase("validation")
        return evaluation

    def rank_peaks_mib(self) -> tuple[float, ...]:
        """Return each rank's peak memory so far, in MiB; empty in a single-process run."""
        # A collective: all ranks call it, also if only the first one logs the result.
        peaks = gather(self.topology, self.monitor.overall_peak_mib())
        return () if self.topology.is_single_process else tuple(peaks)

    @property
    def is_sharded(self) -> bool:
        """Return whether the state is sharded over the ranks, which then save it together."""
        return is_sharded(self.step.model)

    def checkpoint(self) -> Checkpoint:
        """Return the current state of the run as a checkpoint.

        If the state is sharded, this is a collective: all ranks call it, and the first one receives the whole tensors.
        """
        return Checkpoint(
            config=config_to_text(self.config),
            tokenizer=self.data.tokenizer.model,
            vocab_size=self.data.tokenizer.size,
            step=self.state.step,
            plan_digest=self.storage.plan_digest,
            # The state_dicts may be collectives; `stateful` has the same order on all ranks.
            states={name: dict(part.state_dict()) for name, part in self.storage.stateful.items()}
            | {"corpus": dict(self.data.corpus.state_dict()), "schedule": dict(self.step.rates.state_dict())}
            | ({"plan": self.plan.state_dict()} if self.plan else {}),
        )

    def is_finished(self, last_step: int | None = None) -> bool:
        """Return whether the maximum of epochs or steps is reached, or validation has stopped improving.

        With `last_step`, return whether that step is reached, whatever the configuration.
        """
        if last_step is not None:
            return self.state.step >= last_step
        limit = self.config.run.max_steps
        patience = self.config.run.early_stop_epochs
        return (
            self.state.epoch >= resolved(self.config.run.epochs)
            or (limit is not None and self.state.step >= limit)
            or (patience is not None and self.state.epochs_without_improvement >= patience)
        )
