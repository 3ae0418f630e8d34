"""Trial of a run's most expensive batches before its first epoch.

Effects that a memory plan cannot know (driver behaviour, other programs, audio longer than its manifest states) appear
in the first minute instead of the third hour. All state that a step changes is restored from a file, bit for bit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from konkanivani.checkpoints.checkpoint import load_states, read_checkpoint, write_checkpoint
from konkanivani.console import count
from konkanivani.data.batching import Example, GlobalBatch, largest_batch, largest_size, split_into_micro_batches
from konkanivani.data.dataset import TrainDataset
from konkanivani.data.manifest import Rejection
from konkanivani.distributed import ALONE, broadcast_from_rank0
from konkanivani.training.run import Run
from konkanivani.training.step import train_step
from konkanivani.training.validation import EvaluationSet

SAVED = "rehearsal.partial"
# Keys of the parts of a checkpoint that are not restored: a rehearsal does not change the counters (TrainState), and
# the sizes that ran out of memory in it (OomHistory) hold for the actual run too.
KEPT = ("progress", "splits")


@dataclass(frozen=True)
class Rehearsal:
    """One trial: its largest micro-batch (utterances, length of the longest) and its number of OOM retries."""

    name: str
    utterances: int
    length: str
    splits: int

    def sentence(self) -> str:
        """Return a description for the user."""
        again = f", retried {count(self.splits, 'time')} with smaller micro-batches" if self.splits else ""
        return f"{self.name}: {self.utterances} x {self.length}{again}"


def rehearse(run: Run) -> tuple[Rehearsal, ...]:
    """Train on the most expensive global batches, validate the most expensive batch, then restore all state.

    Raises:
        ResourceError: an utterance does not fit in memory even alone.
        DataError: an utterance cannot be read.
    """
    saved = run.storage.checkpointer.directory / SAVED
    before = run.checkpoint()
    if run.topology.is_first:
        saved.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(saved, before)
    # Sharded state was gathered to the CPU of the first rank, and must not occupy memory during the trials.
    del before
    try:
        tried = [_try_global_batch(run, name, global_batch) for name, global_batch in costliest_global_batches(run)]
        if run.data.validation is not None:
            tried.append(_try_validation(run, run.data.validation))
        # From the file, because unsharded state consists of the tensors that the trials have modified in place.
        before = broadcast_from_rank0(run.topology, lambda: read_checkpoint(saved))
        load_states(before, {name: part for name, part in run.storage.stateful.items() if name not in KEPT})
    finally:
        if run.topology.is_first:
            saved.unlink()
    return tuple(tried)


def costliest_global_batches(run: Run) -> list[tuple[str, GlobalBatch]]:
    """Return the most expensive global batches, each with its name.

    They contain the longest utterances, the ones with the most tokens, and the longest of the bucket with the highest
    planned peak. Each has its micro-batch twice, because the second pass runs while gradients exist, like most passes.
    """
    speech = run.data.global_batches.speech
    # The lowest speed of speed perturbation makes the longest audio.
    slowest = dataclasses.replace(speech, speeds=(min(speech.speeds),))
    durations = speech.utterances.durations
    tokens = speech.utterances.tokens.astype(np.int64)
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
    """Return the first utterances of the order, up to one full micro-batch, as two identical micro-batches."""
    stream = run.data.global_batches
    readable = _readable_examples(run, speech, order)
    first = next(readable)
    most = min(largest_size(first.seconds, stream.limits), stream.planner.global_batch_size)
    speeches = [first, *islice(readable, most - 1)]
    piece = split_into_micro_batches(speeches, stream.limits, run.data.tokenizer.special)
    return dataclasses.replace(
        piece,
        micro_batches=piece.micro_batches * 2,
        tokens=2 * piece.tokens,
        utterances=2 * piece.utterances,
        audio_seconds=2 * piece.audio_seconds,
    )


def _readable_examples(run: Run, speech: TrainDataset, order: np.ndarray) -> Iterator[Example]:
    """Yield the utterances of the order; unreadable ones are rejected, as in training."""
    for number in order:
        example = speech[0, int(number)]
        if isinstance(example, Rejection):
            run.data.global_batches.rejections.add([example])
        else:
            yield example


def _try_global_batch(run: Run, name: str, global_batch: GlobalBatch) -> Rehearsal:
    run.interruption.check()
    with run.interruption.interruptible(run.interruption.stop_unsaved):  # all of it is undone
        # After --freeze_steps all layers are trained, which takes the most memory.
        report = train_step(run.step, global_batch, max(run.state.step, run.step.architecture.tuning.freeze_steps or 0))
    assert report is not None  # only `is_interrupted`, which is not given here, makes it None
    largest = largest_batch(global_batch.micro_batches)
    return Rehearsal(name, largest.size, largest.length_text, report.splits)


def _try_validation(run: Run, validation: EvaluationSet) -> Rehearsal:
    """Validate the batch with the most padded audio."""
    durations = validation.speech.utterances.durations
    # The first utterance of a batch is its longest.
    longest = max(validation.plan, key=lambda batch: len(batch) * durations[batch[0]])
    one_batch = dataclasses.replace(validation, plan=[longest], topology=ALONE)  # each rank tries it
    with run.interruption.interruptible(run.interruption.stop_unsaved):
        run.evaluate(one_batch)
    unit = run.step.architecture.framing.unit
    return Rehearsal("validation", len(longest), unit.text(float(durations[longest[0]])), 0)
