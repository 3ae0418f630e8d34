"""Streams of training and evaluation batches."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from konkanivani.data.batching import (
    Batch,
    Cursor,
    EpochPlanner,
    GlobalBatch,
    SizeLimit,
    collate,
    partition,
    split_into_micro_batches,
)
from konkanivani.data.dataset import EvalDataset, TrainDataset
from konkanivani.data.index import Utterance
from konkanivani.data.loader import Fetcher, LoadedItem, LoaderConfig, load_in_order
from konkanivani.data.manifest import Rejections
from konkanivani.data.text import reads_text
from konkanivani.distributed import ALONE, Topology, gather, gather_numbers
from konkanivani.errors import Interrupted
from konkanivani.lengths import SECONDS, TOKENS

NO_UTTERANCES = GlobalBatch((), tokens=0, utterances=0, audio_seconds=0.0, padding_share=0.0)


@dataclass(frozen=True)
class GlobalBatchStream:
    """Endless stream of global batches from any cursor, each with the cursor after it.

    Each rank reads its share of a global batch. The utterances of a global batch and the cursors do not depend on the
    world size.
    """

    speech: TrainDataset
    planner: EpochPlanner
    limits: tuple[SizeLimit, ...]
    loader: LoaderConfig
    rejections: Rejections
    topology: Topology = ALONE

    def from_cursor(
        self, cursor: Cursor, check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[GlobalBatch | None, Cursor], None, None]:
        """Yield global batches without end, each with the cursor after it; closing the generator ends the workers.

        A global batch without any readable utterance is None: the cursor after it may be the end of an epoch. `check`
        is called before each global batch and while waiting for one; its exceptions end the stream, and `Interrupted`
        ends the streams of all ranks.
        """
        special = self.speech.tokenizer.special
        combine = partial(split_into_micro_batches, limits=self.limits, special=special)
        fetcher = Fetcher(self.speech, combine, self.loader.workers)
        with closing(load_in_order(fetcher, self.planned(cursor), self.loader, check)) as loaded:
            for following in self.planner.cursors_after(cursor):
                yield self._next(loaded), following

    def _next(self, loaded: Iterator[LoadedItem[GlobalBatch]]) -> GlobalBatch | None:
        """Return the next global batch: this rank's micro-batches, counts of all ranks; None if nothing is readable."""
        if self.topology.is_single_process:
            result = next(loaded)
            self.rejections.add(result.rejections)
            return result.value
        # An interrupted rank still takes part in the collective; otherwise the other ranks would wait for it.
        try:
            result = next(loaded)
            interrupted: Interrupted | None = None
        except Interrupted as error:
            result = LoadedItem(None, ())
            interrupted = error
        portion = result.value or NO_UTTERANCES
        padded = sum(batch.waveforms.numel() for batch in portion.micro_batches)
        # As integers, for gather_numbers and for sums that do not depend on the world size.
        rate = (TOKENS if reads_text(self.speech.tokenizer) else SECONDS).rate
        samples = round(portion.audio_seconds * rate)
        exit_code = interrupted.exit_code if interrupted else 0
        own_numbers = [exit_code, len(result.rejections), portion.tokens, portion.utterances, samples, padded]
        codes, rejected, *counts = zip(*gather_numbers(self.topology, own_numbers), strict=True)
        if any(codes):  # a signal's exit code is 128 plus its number
            raise interrupted or Interrupted("Another rank was stopped by a signal.", max(codes) - 128)
        if any(rejected):  # objects are slower to gather than numbers, and rejections are rare
            for rejections in gather(self.topology, result.rejections):
                self.rejections.add(rejections)
        tokens, utterances, samples, padded = map(sum, counts)
        if not utterances:
            return None
        return GlobalBatch(portion.micro_batches, tokens, utterances, samples / rate, 1 - samples / padded)

    def planned(self, cursor: Cursor) -> Iterator[list[tuple[int, int]]]:
        """Yield the dataset keys of this rank's share of each global batch; the loader prefetches from it."""
        epoch = cursor.epoch
        consumed = cursor.consumed
        while True:
            plan = self.planner.plan_epoch(epoch)
            for number in range(consumed, len(plan)):
                global_batch = np.sort(plan[number])  # in the manifest's order, for sequential reads
                portion = partition(self.planner.durations[global_batch], self.topology.world_size)[self.topology.rank]
                yield [(epoch, int(index)) for index in global_batch[portion]]
            epoch = epoch + 1
            consumed = 0


def load_batches(
    speech: EvalDataset,
    plan: list[np.ndarray],
    loader: LoaderConfig,
    rejections: Rejections,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple[Batch, list[Utterance]], None, None]:
    """Yield the planned evaluation batches in order, each with its utterances; omit unreadable utterances.

    `check` is called as in `GlobalBatchStream.from_cursor`.
    """
    keys = ([int(number) for number in batch] for batch in plan)
    fetcher = Fetcher(speech, partial(collate, special=speech.tokenizer.special), loader.workers)
    with closing(load_in_order(fetcher, keys, loader, check)) as loaded:
        for result, numbers in zip(loaded, plan, strict=True):
            rejections.add(result.rejections)
            if result.value is not None:
                left_out = {rejection.row for rejection in result.rejections}
                utterances = [speech.utterances[int(number)] for number in numbers]
                yield result.value, [utterance for utterance in utterances if utterance.row not in left_out]
