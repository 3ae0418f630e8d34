"""Container of a run's parts, which the recipe builds once."""

from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import TrainConfig
from konkanivani.base.distributed import ALONE, Topology, gather
from konkanivani.base.flags import config_to_text
from konkanivani.data.fingerprint import Fingerprint
from konkanivani.data.loader.loading import GlobalBatchStream
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.decoding.decode import Decode
from konkanivani.memory.budget import BudgetWatch
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.plan import MemoryPlan
from konkanivani.training.checkpoint.checkpoint import Checkpoint, Stateful
from konkanivani.training.checkpoint.checkpointer import Checkpointer
from konkanivani.training.checkpoint.run_lock import RunLock
from konkanivani.training.interruption import Interruption
from konkanivani.training.logs.logbook import Logbook
from konkanivani.training.logs.progress import Progress
from konkanivani.training.logs.utilisation import Utilisation
from konkanivani.training.sharding import is_sharded
from konkanivani.training.state import TrainState
from konkanivani.training.step import StepParts
from konkanivani.training.validation import Evaluation, EvaluationSet


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
        stateful: parts of the run by their names in a checkpoint.
        plan_digest: digest of the order of the data.
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
    """Parts that the training loop works with; only `state` changes."""

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
