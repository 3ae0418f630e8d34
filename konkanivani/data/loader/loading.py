"""Windows and batches of utterances from any cursor onward."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from konkanivani.base.distributed import ALONE, Topology, gather, gather_numbers
from konkanivani.base.errors import Interrupted
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.data.batch import Batch, GlobalBatch
from konkanivani.data.batching import Cursor, EpochPlanner, SizeLimit, partition
from konkanivani.data.dataset import EvalDataset, TrainDataset
from konkanivani.data.loader.workers import Fetcher, Loaded, LoaderConfig, load_in_order
from konkanivani.data.rejections import Rejections
from konkanivani.data.utterance import Utterance

NO_UTTERANCES = GlobalBatch((), tokens=0, utterances=0, audio_seconds=0.0, padding_share=0.0)


@dataclass(frozen=True)
class GlobalBatchStream:
    """The training data from any cursor onward, epoch after epoch, each window with the cursor behind it.

    Every rank of the topology reads its portion of each window; windows and cursor do not depend on the world size.
    """

    speech: TrainDataset
    planner: EpochPlanner
    limits: tuple[SizeLimit, ...]
    loader: LoaderConfig
    rejections: Rejections
    topology: Topology = ALONE

    def from_cursor(
        self, cursor: Cursor, check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[GlobalBatch, Cursor]]:
        """Endless. Closing the generator ends the workers. A window of which nothing can be read is passed over.

        `check` is called before each window and while one is waited for; what it raises ends the waiting, and where
        it is that the run is interrupted, that of all ranks.
        """
        fetcher = Fetcher(self.speech, self.limits, self.loader.workers)
        with closing(load_in_order(fetcher, self.planned(cursor), self.loader, check)) as loaded:
            for behind in self.planner.cursors_behind(cursor):
                global_batch = self._next(loaded)
                if global_batch is not None:
                    yield global_batch, behind

    def _next(self, loaded: Iterator[Loaded]) -> GlobalBatch | None:
        """The next window, or this rank's portion of it, the ranks' counts joined; None where nothing can be read."""
        if self.topology.is_single_process:
            found = next(loaded)
            self.rejections.add(found.rejections)
            return found.value
        try:
            found, interrupted = next(loaded), None
        except Interrupted as error:
            found, interrupted = Loaded(None, ()), error
        portion = found.value or NO_UTTERANCES
        padded = sum(batch.waveforms.numel() for batch in portion.micro_batches)
        samples, exit_code = round(portion.audio_seconds * SAMPLE_RATE), interrupted.exit_code if interrupted else 0
        mine = [exit_code, len(found.rejections), portion.tokens, portion.utterances, samples, padded]
        codes, rejected, *counts = zip(*gather_numbers(self.topology, mine), strict=True)
        if any(codes):
            raise interrupted or Interrupted("Another rank was stopped by a signal.", max(codes) - 128)
        if any(rejected):
            for theirs in gather(self.topology, found.rejections):
                self.rejections.add(theirs)
        tokens, utterances, samples, padded = map(sum, counts)
        if not utterances:
            return None
        return GlobalBatch(portion.micro_batches, tokens, utterances, samples / SAMPLE_RATE, 1 - samples / padded)

    def planned(self, cursor: Cursor) -> Iterator[list[tuple[int, int]]]:
        """The keys of this rank's share of each window from the cursor on; the loader runs ahead of the loop."""
        epoch, consumed = cursor.epoch, cursor.consumed
        while True:
            plan = self.planner.plan_epoch(epoch)
            for number in range(consumed, len(plan)):
                global_batch = np.sort(plan[number])  # as they lie in their files
                portion = partition(self.planner.durations[global_batch], self.topology.world_size)[self.topology.rank]
                yield [(epoch, int(index)) for index in global_batch[portion]]
            epoch, consumed = epoch + 1, 0


def load_batches(
    speech: EvalDataset,
    plan: list[np.ndarray],
    loader: LoaderConfig,
    rejections: Rejections,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Batch, list[Utterance]]]:
    """The planned evaluation batches in order, each with its utterances; those that cannot be read are left out.

    `check` as for a GlobalBatchStream.
    """
    keys = ([int(number) for number in batch] for batch in plan)
    with closing(load_in_order(Fetcher(speech, None, loader.workers), keys, loader, check)) as loaded:
        for found, numbers in zip(loaded, plan, strict=True):
            rejections.add(found.rejections)
            if found.value is not None:
                left_out = {rejection.row for rejection in found.rejections}
                utterances = [speech.utterances[int(number)] for number in numbers]
                yield found.value, [utterance for utterance in utterances if utterance.row not in left_out]
