"""The parts of a run, built once by the recipe and never changed."""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from konkanivani.base.config import RunConfig
from konkanivani.base.distributed import ALONE, Topology, gather
from konkanivani.base.errors import Interrupted
from konkanivani.checkpoint import Checkpoint, Stateful
from konkanivani.checkpointer import Checkpointer
from konkanivani.data.batching import deal, plan_evaluation
from konkanivani.data.dataset import EvaluationSpeech
from konkanivani.data.fingerprint import Fingerprint
from konkanivani.data.loading import WindowStream, load_batches
from konkanivani.data.rejections import Rejections
from konkanivani.data.text import Tokenizer
from konkanivani.data.workers import LoaderConfig
from konkanivani.decoding.decode import Decode
from konkanivani.logbook import Logbook
from konkanivani.memory.budget import BudgetWatch
from konkanivani.memory.plan import MemoryPlan
from konkanivani.sharding import is_sharded, whole_weights
from konkanivani.training.evaluation import Evaluation, HeardShare, hear, join_shares
from konkanivani.training.forward import ForwardPass
from konkanivani.training.interruption import Interruption
from konkanivani.training.progress import Progress
from konkanivani.training.run_lock import RunLock
from konkanivani.training.state import TrainState
from konkanivani.training.step import StepParts
from konkanivani.training.utilisation import Utilisation


@dataclass(frozen=True)
class EvaluationSet:
    """Utterances to evaluate on, laid into batches; their texts are normalised."""

    speech: EvaluationSpeech
    plan: list[np.ndarray]
    loader: LoaderConfig
    rejections: Rejections
    topology: Topology = ALONE

    def within(self, batch_seconds: float) -> "EvaluationSet":
        """The same set in batches of so much padded audio."""
        return dataclasses.replace(self, plan=plan_evaluation(self.speech.utterances.durations, batch_seconds))

    def evaluate(self, forward: ForwardPass, decode: Decode, check: Callable[[], None] = lambda: None) -> Evaluation:
        """The model's losses and error rates over the set. `check` is called before each batch, and may raise.

        Each rank hears its share of the batches, and has the result of them all.
        """
        started, interrupted, share = time.perf_counter(), None, None
        try:
            share = self._hear_share(forward, decode, check)
        except Interrupted as error:
            if self.topology.is_alone:
                raise
            interrupted = error
        shares = gather(self.topology, share)
        if None in shares:
            raise interrupted or Interrupted("Another rank was stopped by a signal.", signal.SIGTERM)
        for found in gather(self.topology, self.rejections.news()):
            self.rejections.add(found)
        return join_shares(shares, forward.loss, time.perf_counter() - started)

    def _hear_share(self, forward: ForwardPass, decode: Decode, check: Callable[[], None]) -> HeardShare:
        durations = self.speech.utterances.durations
        costs = np.array([len(batch) * durations[batch].max() for batch in self.plan])
        plan = [self.plan[number] for number in deal(costs, self.topology.world)[self.topology.rank]]
        loaded = load_batches(self.speech, plan, self.loader, self.rejections, check)
        with whole_weights(forward.model), closing(loaded) as batches:
            return hear(forward, batches, self.speech.tokenizer, decode)


@dataclass(frozen=True)
class Run:
    """Everything that the training loop works with; `state` is the only part of it that changes."""

    config: RunConfig
    config_text: str
    tokenizer: Tokenizer
    state: TrainState
    step: StepParts
    windows: WindowStream
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
        """The peak of memory of each rank so far; empty where one process trains alone."""
        peaks = gather(self.topology, self.step.forward.monitor.overall_peak_mib())
        return () if self.topology.is_alone else tuple(peaks)

    @property
    def is_sharded(self) -> bool:
        """Whether the state is dealt to the ranks, which then save it together."""
        return is_sharded(self.step.model)

    def checkpoint(self) -> Checkpoint:
        """The run's state as it is now. Where it is dealt to the ranks all of them call this, and the first has it."""
        return Checkpoint(
            config=self.config_text,
            tokenizer=self.tokenizer.model,
            vocab_size=self.tokenizer.size,
            step=self.state.step,
            plan_digest=self.plan_digest,
            states={name: part.state_dict() for name, part in self.stateful.items()}
            | {"corpus": self.corpus.state_dict()}
            | ({"plan": self.plan.state_dict()} if self.plan else {}),
        )

    def is_finished(self) -> bool:
        """Whether the epochs or steps asked for are done, or validation has stopped getting better."""
        limit, patience = self.config.max_steps, self.config.early_stop_epochs
        return (
            self.state.epoch >= self.config.epochs
            or (limit is not None and self.state.step >= limit)
            or (patience is not None and self.state.epochs_without_improvement >= patience)
        )
