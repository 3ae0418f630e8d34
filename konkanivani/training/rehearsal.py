"""The costliest batches of a run tried for real before its first epoch, and undone.

What a plan can't know (a driver's own habits, another program, audio longer than its manifest says) shows in the first
minute instead of in the third hour. Everything that a step changes is read back from a file, bit for bit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from konkanivani.base.console import count
from konkanivani.base.distributed import ALONE, broadcast_from_rank0
from konkanivani.data.batch import Example, GlobalBatch, largest_batch
from konkanivani.data.batching import largest_size, split_into_micro_batches
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.rejections import Rejection
from konkanivani.training.checkpoint.checkpoint import load_states, read_checkpoint, write_checkpoint
from konkanivani.training.run import Run
from konkanivani.training.step import train_step

SAVED = "rehearsal.partial"
# The counters are not touched by a rehearsal, and sizes that did not fit are worth remembering.
KEPT = ("progress", "splits")


@dataclass(frozen=True)
class Rehearsal:
    """What was tried, so many utterances at once of so many seconds, and how often it ran out of memory."""

    name: str
    utterances: int
    seconds: float
    splits: int

    def sentence(self) -> str:
        """The trial for a person."""
        again = f", retried {count(self.splits, 'time')} with smaller micro-batches" if self.splits else ""
        return f"{self.name}: {self.utterances} x {self.seconds:.1f} s{again}"


def rehearse(run: Run) -> tuple[Rehearsal, ...]:
    """Trains on the costliest windows and validates the costliest batch, then puts everything back as it was.

    A ResourceError names an utterance that does not fit even alone, a DataError one that cannot be read.
    """
    saved = run.checkpointer.directory / SAVED
    before = run.checkpoint()
    if run.topology.is_first:
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(saved, before)
    del before
    try:
        tried = [_try_global_batch(run, name, global_batch) for name, global_batch in costliest_global_batches(run)]
        if run.validation is not None:
            tried.append(_try_validation(run))
        before = broadcast_from_rank0(run.topology, lambda: read_checkpoint(saved))
        load_states(before, {name: part for name, part in run.stateful.items() if name not in KEPT})
    finally:
        if run.topology.is_first:
            saved.unlink()
    return tuple(tried)


def costliest_global_batches(run: Run) -> list[tuple[str, GlobalBatch]]:
    """The longest utterances, those with the most tokens, and those of the bucket with the highest planned peak.

    Each window holds its micro-batch twice: the second one finds the first one's gradients there, as most do.
    """
    speech = run.global_batches.speech
    slowest = dataclasses.replace(speech, speeds=(min(speech.speeds),))
    durations, tokens = speech.utterances.durations, speech.utterances.tokens.astype(np.int64)
    orders = [("the longest utterances", np.argsort(-durations, kind="stable"))]
    orders.append(("the most tokens", np.lexsort((-durations, -tokens))))
    if run.plan:
        costliest = max(run.plan.buckets, key=lambda bucket: bucket.peak)
        inside = np.flatnonzero(durations / min(speech.speeds) <= costliest.seconds)
        orders.append(("the highest planned peak", inside[np.argsort(-durations[inside], kind="stable")]))
    global_batches = [(name, _global_batch_of(run, slowest, order)) for name, order in orders]
    return [
        pair
        for number, pair in enumerate(global_batches)
        if _ids(pair[1]) not in [_ids(w) for _, w in global_batches[:number]]
    ]


def _ids(global_batch: GlobalBatch) -> list[tuple[str, ...]]:
    return [batch.utterance_ids for batch in global_batch.micro_batches]


def _global_batch_of(run: Run, speech: TrainDataset, order: np.ndarray) -> GlobalBatch:
    """The first utterances of the order, as many as go at once, as two micro-batches."""
    readable = _readable(run, speech, order)
    first = next(readable)
    most = min(largest_size(first.seconds, run.global_batches.limits), run.global_batches.planner.global_batch_size)
    speeches = [first, *islice(readable, most - 1)]
    piece = split_into_micro_batches(speeches, run.global_batches.limits, run.tokenizer.special)
    return dataclasses.replace(
        piece,
        micro_batches=piece.micro_batches * 2,
        tokens=2 * piece.tokens,
        utterances=2 * piece.utterances,
        audio_seconds=2 * piece.audio_seconds,
    )


def _readable(run: Run, speech: TrainDataset, order: np.ndarray) -> Iterator[Example]:
    """The order's utterances one by one; those that cannot be read are left out, as in training."""
    for number in order:
        found = speech[0, int(number)]
        if isinstance(found, Rejection):
            run.global_batches.rejections.add([found])
        else:
            yield found


def _try_global_batch(run: Run, name: str, global_batch: GlobalBatch) -> Rehearsal:
    run.interruption.check()
    with run.interruption.interruptible(run.interruption.stop_unsaved):  # all of it is undone
        report = train_step(run.step, global_batch, max(run.state.step, run.step.architecture.tuning.freeze_steps or 0))
    largest = largest_batch(global_batch.micro_batches)
    return Rehearsal(name, largest.size, largest.longest_seconds, report.splits)


def _try_validation(run: Run) -> Rehearsal:
    """The batch of most padded audio: the first, since the longest utterances come first."""
    speech, plan = run.validation.speech, run.validation.plan
    durations = speech.utterances.durations
    longest = max(plan, key=lambda batch: len(batch) * durations[batch[0]])
    one_batch = dataclasses.replace(run.validation, plan=[longest], topology=ALONE)  # each rank tries it
    with run.interruption.interruptible(run.interruption.stop_unsaved):
        one_batch.evaluate(run.step.forward, run.decode, run.interruption.check)
    return Rehearsal("validation", len(longest), float(durations[longest[0]]), 0)
