"""Going on when memory runs out: the same work again in smaller pieces, with the same result."""

import dataclasses
import enum
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

from konkanivani.base.command_line import is_out_of_memory
from konkanivani.base.errors import CheckpointError, ResourceError
from konkanivani.base.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES
from konkanivani.data.batch import Batch, largest_batch, split_batch

Result = TypeVar("Result")
ONE_BY_ONE = "one by one"


class RestartAfterOom(ResourceError):
    """Memory ran out where the ranks cannot split: they start again, in smaller pieces."""


class Outcome(enum.IntEnum):
    """What became of one attempt at some work; of several ranks' the largest counts for all."""

    DONE = 0
    SPLIT = 1  # it ran out of memory and is to be done again in smaller pieces
    STOPPED = 2


@dataclass(frozen=True)
class MicroBatchPlan:
    """Plan of one pass over some utterances: micro-batches, recomputation, chunk length and concurrency.

    Sequences longer than `chunk_frames` encoder frames or tokens are processed in chunks of that length.
    `concurrent_micro_batches` is the number of micro-batches that run in parallel.
    """

    micro_batches: tuple[Batch, ...]
    recomputes_all: bool
    chunk_frames: int = CHUNK_FRAMES
    concurrent_micro_batches: int = 1

    @property
    def largest(self) -> Batch:
        """The micro-batch of most padded audio."""
        return largest_batch(self.micro_batches)

    def smaller(self) -> "MicroBatchPlan | None":
        """The next smaller way: one at a time, each in halves, every block recomputed, small chunks, then None."""
        if self.concurrent_micro_batches > 1:
            return dataclasses.replace(self, concurrent_micro_batches=1)
        if self.largest_size > 1:
            halves = (split_batch(batch) if batch.size > 1 else (batch,) for batch in self.micro_batches)
            return dataclasses.replace(self, micro_batches=tuple(half for pair in halves for half in pair))
        if not self.recomputes_all:
            return dataclasses.replace(self, recomputes_all=True)
        return self.in_small_chunks() if self.chunk_frames > SMALL_CHUNK_FRAMES else None

    @property
    def largest_size(self) -> int:
        """The most utterances in one micro-batch."""
        return max(batch.size for batch in self.micro_batches)

    def in_small_chunks(self) -> "MicroBatchPlan":
        """The same in chunks of SMALL_CHUNK_FRAMES."""
        return dataclasses.replace(self, chunk_frames=min(self.chunk_frames, SMALL_CHUNK_FRAMES))


class OomHistory:
    """The sizes of micro-batches that did not fit, so that the next ones of such a size are cut beforehand.

    A size is the whole seconds of the longest utterance and the number of utterances; what is as long and as many does
    not fit either. No utterances at all stand for one that did not fit although every block was recomputed: it needs
    small chunks. Once micro-batches did not fit side by side, none are run so again. `conditions` is a number that
    stands for the device and all else that the memory taken depends on (but the model, which no resumed run changes):
    under other conditions a checkpoint's sizes mean nothing.
    """

    def __init__(self, conditions: int) -> None:
        self.conditions = conditions
        self._fewest: dict[int, int] = {}  # whole seconds -> the fewest utterances that did not fit
        self._fits_one_by_one_only = False

    def is_too_large(self, batch: Batch) -> bool:
        """Whether a micro-batch that was no longer and held no more did not fit."""
        return self._is_known(batch, batch.size)

    def needs_small_chunks(self, batch: Batch) -> bool:
        """Whether an utterance that was no longer did not fit although every block was recomputed."""
        return self._is_known(batch, 0)

    def remember(self, plan: MicroBatchPlan) -> bool:
        """Books that a cut did not fit: side by side, or else its largest micro-batch; whether that is news."""
        if plan.concurrent_micro_batches > 1:
            self._fits_one_by_one_only = True
            return True
        batch = plan.largest
        fewest = 0 if batch.size == 1 and plan.recomputes_all else batch.size
        is_news = not self._is_known(batch, fewest)
        if is_news:
            self._fewest[int(batch.longest_seconds)] = fewest
        return is_news

    def sizes(self) -> dict[int, int]:
        """The fewest utterances that did not fit, by whole seconds."""
        return dict(self._fewest)

    def learn(self, sizes: Mapping[int, int]) -> None:
        """Takes over what did not fit on another rank: any may get as much next."""
        for seconds, fewest in sizes.items():
            self._fewest[seconds] = min(fewest, self._fewest.get(seconds, fewest))

    def fit_to_memory(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """The cut with everything known to be too large in smaller pieces."""
        pieces = tuple(piece for batch in plan.micro_batches for piece in self._pieces(batch))
        recomputes_all = plan.recomputes_all or any(map(self.is_too_large, pieces))
        concurrent_micro_batches = 1 if self._fits_one_by_one_only else plan.concurrent_micro_batches
        fitting = dataclasses.replace(
            plan, micro_batches=pieces, recomputes_all=recomputes_all, concurrent_micro_batches=concurrent_micro_batches
        )
        return fitting.in_small_chunks() if any(map(self.needs_small_chunks, pieces)) else fitting

    def state_dict(self) -> dict[str, int]:
        """The fewest utterances that did not fit by whole seconds, whether side by side did not, and the conditions."""
        state = {"conditions": self.conditions, ONE_BY_ONE: int(self._fits_one_by_one_only)}
        return state | {str(seconds): fewest for seconds, fewest in self._fewest.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes the sizes of a checkpoint saved under the same conditions; a CheckpointError where they are none."""
        sizes = {name: fewest for name, fewest in state.items() if name not in ("conditions", ONE_BY_ONE)}
        for seconds, fewest in sizes.items():
            if not seconds.isdecimal() or type(fewest) is not int or fewest < 0:
                raise CheckpointError(
                    f"The checkpoint's OOM limit {seconds!r:.40}: {fewest!r:.40} is invalid. Use another checkpoint."
                )
        is_same = state.get("conditions") == self.conditions
        self._fewest = {int(seconds): fewest for seconds, fewest in sizes.items()} if is_same else {}
        self._fits_one_by_one_only = is_same and state.get(ONE_BY_ONE) == 1

    def _is_known(self, batch: Batch, size: int) -> bool:
        longest = batch.longest_seconds
        return any(seconds <= longest and fewest <= size for seconds, fewest in self._fewest.items())

    def _pieces(self, batch: Batch) -> tuple[Batch, ...]:
        if batch.size == 1 or not self.is_too_large(batch):
            return (batch,)
        return tuple(piece for half in split_batch(batch) for piece in self._pieces(half))


class OomAttempt(Generic[Result]):
    """One try at a cut: in its `with` block running out of memory is no error, and `reason` says how it came.

    The error is kept without its traceback: that would hold the frames of the attempt, and they its tensors,
    and activation checkpointing's hooks on what is saved for the backward pass, which would go on into the next one.
    """

    def __init__(self, plan: MicroBatchPlan) -> None:
        self.plan = plan
        self.result: Result | None = None
        self.reason: str | None = None

    def __enter__(self) -> "OomAttempt[Result]":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not (isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error)):
            return False
        error.__traceback__ = None
        self.reason = (str(error) or "the system refused to allocate more").splitlines()[0]
        return True

    def result_or_raise(self, oom_history: OomHistory) -> Result:
        """The result, where other ranks wait inside of the work and nothing can be done again.

        After an out-of-memory error, record the size and raise RestartAfterOom; if the plan cannot be made smaller,
        raise a ResourceError that names the utterance.
        """
        if self.reason is None:
            return self.result
        if self.plan.smaller() is None:
            raise _does_not_fit(self.plan.largest, self.reason)
        oom_history.remember(self.plan)
        size, seconds = self.plan.largest.size, self.plan.largest.longest_seconds
        raise RestartAfterOom(
            f"Out of memory at {size} x {seconds:.1f} s ({self.reason.rstrip('.')}) with weights sharded over "
            "the ranks, so no rank can retry alone. The limit is recorded: resume with --resume auto, which "
            "uses smaller micro-batches (torchrun --max_restarts does this automatically)."
        )


class OomRetry(Generic[Result]):
    """The same work in smaller and smaller pieces, until it fits in memory.

        for attempt in attempts:
            with attempt:
                attempt.result = work(attempt.plan)

    Then `result` is that of the attempt that fitted, after so many `retries`. A ResourceError names the utterance that
    does not fit even alone; every other error passes through.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        oom_history: OomHistory,
        undo: Callable[[], None] = lambda: None,
        all_reduce_max: Callable[[Outcome], Outcome] = lambda mine: mine,
    ) -> None:
        """`undo` takes back what a failed attempt has left, and must not allocate to speak of.

        `all_reduce_max` returns the worst outcome over all ranks: a rank that is done keeps its result and waits until
        all are done, and counts their retries with its own. If one rank was interrupted (no result), all undo their
        work.
        """
        self._first = oom_history.fit_to_memory(plan)
        self._oom_history = oom_history
        self._undo = undo
        self._all_reduce_max = all_reduce_max
        self.result: Result | None = None
        self.retries = 0

    def __iter__(self) -> Iterator[OomAttempt[Result]]:
        plan = self._first
        while plan is not None:
            attempt: OomAttempt[Result] = OomAttempt(plan)
            yield attempt
            plan = self._next(attempt)

    def _next(self, attempt: OomAttempt[Result]) -> MicroBatchPlan | None:
        """The cut to try after an attempt, None where all ranks have come to an end."""
        mine, smaller = Outcome.STOPPED if attempt.result is None else Outcome.DONE, None
        if attempt.reason is not None:
            # Before the others are told: one for whom nothing smaller is left ends with its cause, and they with it.
            self._undo()
            release_memory()
            mine, smaller = Outcome.SPLIT, attempt.plan.smaller()
            if smaller is None:
                raise _does_not_fit(attempt.plan.largest, attempt.reason)
        while (of_all := self._all_reduce_max(mine)) is Outcome.SPLIT:
            self.retries += 1
            if smaller is not None:
                if self._oom_history.remember(attempt.plan):
                    _tell(attempt.plan, smaller)
                return smaller
        if of_all is Outcome.DONE:
            self.result = attempt.result
        elif mine is Outcome.DONE:
            self._undo()
        return None


def release_memory() -> None:
    """Collects what only cycles hold, and returns cached GPU memory to the driver: its pieces may be too small."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _tell(plan: MicroBatchPlan, smaller: MicroBatchPlan) -> None:
    size, seconds = plan.largest.size, plan.largest.longest_seconds
    if plan.concurrent_micro_batches > 1:
        way = "one micro-batch at a time"
    elif size > 1:
        way = f"micro-batches of at most {smaller.largest_size}"
    elif not plan.recomputes_all:
        way = "all blocks recomputed"
    else:
        way = f"subsampling, logits and CTC in chunks of {smaller.chunk_frames} frames"
    tqdm.write(f"Out of memory at {size} x {seconds:.1f} s: retrying with {way}; the result does not change.")


def _does_not_fit(batch: Batch, reason: str) -> ResourceError:
    utterance = f"{', '.join(batch.utterance_ids)} of {batch.longest_seconds:.1f} s"
    return ResourceError(
        f"Out of memory with a micro-batch of one: {utterance} does not fit ({reason.rstrip('.')}). Use a "
        "lower --max_duration (--max_validation_duration for validation and test sets), a smaller --preset or "
        "--mixed_precision, or stop other programs that use memory."
    )
