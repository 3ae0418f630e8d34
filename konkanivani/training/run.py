"""Container of a run's parts, which the recipe builds once."""

from collections.abc import Mapping
from dataclasses import dataclass

from konkanivani.base.auto_defaults import resolved
from konkanivani.base.config import RunConfig, TrainConfig
from konkanivani.base.distributed import ALONE, Topology, gather
from konkanivani.base.flags import config_to_text
from konkanivani.data.fingerprint import Fingerprint
from konkanivani.data.loader.loading import GlobalBatchStream
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.decoding.decode import Decode
from konkanivani.memory.budget import BudgetWatch
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
from konkanivani.training.validation import EvaluationSet


@dataclass(frozen=True)
class Run:
    """Parts that the training loop works with; only `state` changes.

    Args:
        config: part of `settings` that decides when the run ends and how often it saves.
        settings: flags that are stored in the checkpoint.
    """

    config: RunConfig
    settings: TrainConfig
    tokenizer: Vocabulary
    state: TrainState
    step: StepParts
    global_batches: GlobalBatchStream
    plan: MemoryPlan | None
    watch: BudgetWatch
    validation: EvaluationSet | None
    decode: Decode
    stateful: Mapping[str, Stateful]
    plan_digest: int
    checkpointer: Checkpointer
    locks: tuple[RunLock, ...]
    corpus: Fingerprint
    logbook: Logbook
    interruption: Interruption
    progress: Progress
    utilisation: Utilisation
    topology: Topology = ALONE

    def rank_peaks_mib(self) -> tuple[float, ...]:
        """Return each rank's peak memory so far, in MiB; empty in a single-process run."""
        # A collective: all ranks call it, also if only the first one logs the result.
        peaks = gather(self.topology, self.step.forward.monitor.overall_peak_mib())
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
            config=config_to_text(self.settings),
            tokenizer=self.tokenizer.model,
            vocab_size=self.tokenizer.size,
            step=self.state.step,
            plan_digest=self.plan_digest,
            # The state_dicts may be collectives; `stateful` has the same order on all ranks.
            states={name: dict(part.state_dict()) for name, part in self.stateful.items()}
            | {"corpus": dict(self.corpus.state_dict()), "schedule": dict(self.step.rates.state_dict())}
            | ({"plan": self.plan.state_dict()} if self.plan else {}),
        )

    def is_finished(self) -> bool:
        """Return whether the maximum of epochs or steps is reached, or validation has stopped improving."""
        limit = self.config.max_steps
        patience = self.config.early_stop_epochs
        return (
            self.state.epoch >= resolved(self.config.epochs)
            or (limit is not None and self.state.step >= limit)
            or (patience is not None and self.state.epochs_without_improvement >= patience)
        )
