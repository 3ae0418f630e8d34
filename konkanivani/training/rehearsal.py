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
from konkanivani.base.distributed import ALONE, from_first
from konkanivani.data.batch import Speech, Window, largest_batch
from konkanivani.data.batching import cut_window, largest_size
from konkanivani.data.dataset import TrainingSpeech
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
        tried = [_try_window(run, name, window) for name, window in costliest_windows(run)]
        if run.validation is not None:
            tried.append(_try_validation(run))
        before = from_first(run.topology, lambda: read_checkpoint(saved))
        load_states(before, {name: part for name, part in run.stateful.items() if name not in KEPT})
    finally:
        if run.topology.is_first:
            saved.unlink()
    return tuple(tried)


def costliest_windows(run: Run) -> list[tuple[str, Window]]:
    """The longest utterances, those with the most tokens, and those of the bucket with the highest planned peak.

    Each window holds its micro-batch twice: the second one finds the first one's gradients there, as most do.
    """
    speech = run.windows.speech
    slowest = dataclasses.replace(speech, speeds=(min(speech.speeds),))
    durations, tokens = speech.utterances.durations, speech.utterances.tokens.astype(np.int64)
    orders = [("the longest utterances", np.argsort(-durations, kind="stable"))]
    orders.append(("the most tokens", np.lexsort((-durations, -tokens))))
    if run.plan:
        costliest = max(run.plan.buckets, key=lambda bucket: bucket.peak)
        inside = np.flatnonzero(durations / min(speech.speeds) <= costliest.seconds)
        orders.append(("the highest planned peak", inside[np.argsort(-durations[inside], kind="stable")]))
    windows = [(name, _window_of(run, slowest, order)) for name, order in orders]
    return [pair for number, pair in enumerate(windows) if _ids(pair[1]) not in [_ids(w) for _, w in windows[:number]]]


def _ids(window: Window) -> list[tuple[str, ...]]:
    return [batch.utterance_ids for batch in window.micro_batches]


def _window_of(run: Run, speech: TrainingSpeech, order: np.ndarray) -> Window:
    """The first utterances of the order, as many as go at once, as two micro-batches."""
    readable = _readable(run, speech, order)
    first = next(readable)
    most = min(largest_size(first.seconds, run.windows.limits), run.windows.planner.window_size)
    speeches = [first, *islice(readable, most - 1)]
    piece = cut_window(speeches, run.windows.limits, run.tokenizer.special)
    return dataclasses.replace(
        piece,
        micro_batches=piece.micro_batches * 2,
        tokens=2 * piece.tokens,
        utterances=2 * piece.utterances,
        audio_seconds=2 * piece.audio_seconds,
    )


def _readable(run: Run, speech: TrainingSpeech, order: np.ndarray) -> Iterator[Speech]:
    """The order's utterances one by one; those that cannot be read are left out, as in training."""
    for number in order:
        found = speech[0, int(number)]
        if isinstance(found, Rejection):
            run.windows.rejections.add([found])
        else:
            yield found


def _try_window(run: Run, name: str, window: Window) -> Rehearsal:
    run.interruption.check()
    with run.interruption.breaking_off(run.interruption.stop_unsaved):  # all of it is undone
        report = train_step(run.step, window, max(run.state.step, run.step.architecture.tuning.freeze_steps or 0))
    largest = largest_batch(window.micro_batches)
    return Rehearsal(name, largest.size, largest.longest_seconds, report.splits)


def _try_validation(run: Run) -> Rehearsal:
    """The batch of most padded audio: the first, since the longest utterances come first."""
    speech, plan = run.validation.speech, run.validation.plan
    durations = speech.utterances.durations
    longest = max(plan, key=lambda batch: len(batch) * durations[batch[0]])
    one_batch = dataclasses.replace(run.validation, plan=[longest], topology=ALONE)  # each rank tries it
    with run.interruption.breaking_off(run.interruption.stop_unsaved):
        one_batch.evaluate(run.step.forward, run.decode, run.interruption.check)
    return Rehearsal("validation", len(longest), float(durations[longest[0]]), 0)
