"""Recovery from out-of-memory errors: a step is repeated with smaller micro-batches, which later runs remember.

The repeated step has the same loss and gradient up to rounding, because losses are sums divided by counts of the global
batch (`Objective.total`). With dropout, halved micro-batches draw other masks of the same distribution.
"""

import dataclasses
import enum
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

from konkanivani.command_line import is_out_of_memory
from konkanivani.data.batching import Batch, largest_batch, split_batch
from konkanivani.errors import CheckpointError, ResourceError
from konkanivani.files import atomic_write
from konkanivani.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES

# --------------------
# Recovery from out-of-memory errors: repeat the work in smaller pieces.


Result = TypeVar("Result")
ONE_BY_ONE = "one by one"


class RestartAfterOom(ResourceError):
    """Out of memory where ranks cannot retry on their own: all ranks have to restart with smaller micro-batches."""


class Outcome(enum.IntEnum):
    """Outcome of one attempt; the largest value over all ranks applies to all."""

    DONE = 0
    SPLIT = 1  # out of memory: repeat in smaller pieces
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
        """Micro-batch with the most padded audio, which is taken for the one that did not fit."""
        return largest_batch(self.micro_batches)

    def smaller(self) -> "MicroBatchPlan | None":
        """Return the next smaller plan, or None if there is none.

        The order is: one micro-batch at a time, halved micro-batches, all blocks recomputed, small chunks.
        """
        if not self.micro_batches:  # a rank without utterances has only its gradients
            return None
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
        """Most utterances in one micro-batch, which need not be `largest`."""
        return max((batch.size for batch in self.micro_batches), default=0)  # a rank may have no utterances

    def in_small_chunks(self) -> "MicroBatchPlan":
        """Return the plan with chunks of SMALL_CHUNK_FRAMES."""
        return dataclasses.replace(self, chunk_frames=min(self.chunk_frames, SMALL_CHUNK_FRAMES))


class OomHistory:
    """Sizes of micro-batches that ran out of memory, so that later ones of that size are split beforehand.

    A size is the longest utterance in whole seconds and the number of utterances; a batch that is at least as long and
    as large does not fit either. The number 0 stands for an utterance that did not fit although all blocks were
    recomputed: it needs small chunks. After a failure of concurrent micro-batches, all later ones run one at a time.

    `conditions` is a hash of the device, the architecture and all settings that affect memory (`memory_conditions` in
    training/build_step.py); sizes from a checkpoint with other conditions are ignored. A checkpoint stores this object
    as its part "splits".
    """

    def __init__(self, conditions: int) -> None:
        self.conditions = conditions
        self._fewest: dict[int, int] = {}  # whole seconds -> the fewest utterances that did not fit
        self._fits_one_by_one_only = False

    def is_too_large(self, batch: Batch) -> bool:
        """Return whether this micro-batch has at least the duration and size of one that ran out of memory."""
        return self._is_known(batch, batch.size)

    def needs_small_chunks(self, batch: Batch) -> bool:
        """Return whether an utterance of at most this duration ran out of memory with all blocks recomputed."""
        return self._is_known(batch, 0)

    def remember(self, plan: MicroBatchPlan) -> bool:
        """Record that a plan did not fit, by its concurrency or its largest micro-batch; return whether this is new."""
        if plan.concurrent_micro_batches > 1:
            self._fits_one_by_one_only = True
            return True
        batch = plan.largest
        # 0 utterances: not even one fits with all blocks recomputed.
        fewest = 0 if batch.size == 1 and plan.recomputes_all else batch.size
        is_news = not self._is_known(batch, fewest)
        if is_news:
            self._fewest[int(batch.longest_seconds)] = fewest
        return is_news

    def sizes(self) -> dict[int, int]:
        """Return the fewest utterances that did not fit, by whole seconds."""
        return dict(self._fewest)

    def learn(self, sizes: Mapping[int, int]) -> None:
        """Merge the sizes that did not fit on another rank: any rank may get such a batch next."""
        for seconds, fewest in sizes.items():
            self._fewest[seconds] = min(fewest, self._fewest.get(seconds, fewest))

    def fit_to_memory(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Return the plan with all micro-batches that are known to be too large split or recomputed."""
        pieces = tuple(piece for batch in plan.micro_batches for piece in self._split_recursively(batch))
        # Pieces that are still too large are single utterances: recomputation is the next reduction.
        recomputes_all = plan.recomputes_all or any(map(self.is_too_large, pieces))
        concurrent_micro_batches = 1 if self._fits_one_by_one_only else plan.concurrent_micro_batches
        fitting = dataclasses.replace(
            plan, micro_batches=pieces, recomputes_all=recomputes_all, concurrent_micro_batches=concurrent_micro_batches
        )
        return fitting.in_small_chunks() if any(map(self.needs_small_chunks, pieces)) else fitting

    def state_dict(self) -> dict[str, int]:
        """Return the conditions, the concurrency limit and the sizes as a flat dictionary for the checkpoint."""
        state = {"conditions": self.conditions, ONE_BY_ONE: int(self._fits_one_by_one_only)}
        return state | {str(seconds): fewest for seconds, fewest in self._fewest.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the sizes of a checkpoint if its conditions match; raises a CheckpointError if they are invalid."""
        sizes: dict[int, int] = {}
        for seconds, fewest in state.items():
            if seconds in ("conditions", ONE_BY_ONE):
                continue
            if not seconds.isdecimal() or type(fewest) is not int or fewest < 0:
                raise CheckpointError(
                    f"The checkpoint's OOM limit {seconds!r:.40}: {fewest!r:.40} is invalid. Use another checkpoint."
                )
            sizes[int(seconds)] = fewest
        # Sizes measured under other conditions do not apply.
        is_same = state.get("conditions") == self.conditions
        self._fewest = sizes if is_same else {}
        self._fits_one_by_one_only = is_same and state.get(ONE_BY_ONE) == 1

    def _is_known(self, batch: Batch, size: int) -> bool:
        longest = batch.longest_seconds
        return any(seconds <= longest and fewest <= size for seconds, fewest in self._fewest.items())

    def _split_recursively(self, batch: Batch) -> tuple[Batch, ...]:
        if batch.size == 1 or not self.is_too_large(batch):
            return (batch,)
        return tuple(piece for half in split_batch(batch) for piece in self._split_recursively(half))


class OomAttempt(Generic[Result]):
    """One attempt at a plan; its `with` block suppresses out-of-memory errors and sets `reason`."""

    def __init__(self, plan: MicroBatchPlan) -> None:
        self.plan = plan
        self.result: Result | None = None
        self.reason: str | None = None

    def __enter__(self) -> "OomAttempt[Result]":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        # CUDA and CPU allocators raise a RuntimeError, Python itself a MemoryError.
        if not (isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error)):
            return False
        # The traceback would keep the frames of the attempt alive, with their tensors and activation checkpointing's
        # hooks for saved tensors, which would affect the next attempt.
        error.__traceback__ = None
        self.reason = (str(error) or "the system refused to allocate more").splitlines()[0]
        return True

    def result_or_raise(self, oom_history: OomHistory) -> Result:
        """Return the result if other ranks wait inside the work, so that this rank cannot retry alone.

        After an out-of-memory error, record the size and raise RestartAfterOom; if the plan cannot be made smaller,
        raise a ResourceError that names the utterance.
        """
        if self.reason is None:
            if self.result is None:
                raise RuntimeError("The attempt has neither a result nor an error.")
            return self.result
        if self.plan.smaller() is None:
            raise _out_of_memory_error(self.plan, self.reason)
        oom_history.remember(self.plan)
        size = self.plan.largest.size
        longest = self.plan.largest.length_text
        raise RestartAfterOom(
            f"Out of memory at {size} x {longest} ({self.reason.rstrip('.')}) with weights sharded over "
            "the ranks, so no rank can retry alone. The limit is recorded: resume with --resume auto, which "
            "uses smaller micro-batches (torchrun --max_restarts does this automatically)."
        )


class OomRetry(Generic[Result]):
    """Iterator over attempts at the same work in smaller and smaller pieces, until it fits in memory.

        for attempt in attempts:
            with attempt:
                attempt.result = work(attempt.plan)

    Afterwards `result` is the successful attempt's and `retries` the number of failures. An utterance that does not fit
    even alone raises a ResourceError that names it; other errors pass through.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        oom_history: OomHistory,
        undo: Callable[[], None] = lambda: None,
        all_reduce_max: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    ) -> None:
        """Prepare attempts at `plan`, reduced to the limits in `oom_history`.

        Args:
            undo: reverts the effects of a failed attempt; must not allocate significant memory.
            all_reduce_max: returns the worst outcome over all ranks. A rank that is done keeps its result, waits for
                the others and counts their retries. If a rank was interrupted (no result), all ranks undo their work.
        """
        self._first = oom_history.fit_to_memory(plan)
        self._oom_history = oom_history
        self._undo = undo
        self._all_reduce_max = all_reduce_max
        self.result: Result | None = None
        self.retries = 0

    def __iter__(self) -> Iterator[OomAttempt[Result]]:
        plan: MicroBatchPlan | None = self._first
        while plan is not None:
            attempt: OomAttempt[Result] = OomAttempt(plan)
            yield attempt
            plan = self._next(attempt)

    def _next(self, attempt: OomAttempt[Result]) -> MicroBatchPlan | None:
        """Return the next plan after an attempt; None if all ranks are done or stopped."""
        own_outcome = Outcome.STOPPED if attempt.result is None else Outcome.DONE
        smaller = None
        if attempt.reason is not None:
            # Before the all-reduce: a rank without a smaller plan raises its error, which ends the other ranks, too.
            self._undo()
            release_memory()
            own_outcome = Outcome.SPLIT
            smaller = attempt.plan.smaller()
            if smaller is None:
                raise _out_of_memory_error(attempt.plan, attempt.reason)
        # A rank that is done stays in this loop: it takes part in the all-reduce after each retry of the others.
        while (of_all := self._all_reduce_max(own_outcome)) is Outcome.SPLIT:
            self.retries += 1
            if smaller is not None:
                if self._oom_history.remember(attempt.plan):
                    _report_retry(attempt.plan, smaller)
                return smaller
        if of_all is Outcome.DONE:
            self.result = attempt.result
        elif own_outcome is Outcome.DONE:
            self._undo()
        return None


def release_memory() -> None:
    """Collect reference cycles and return cached GPU memory to the driver: the cached blocks may be too small."""
    # First: tensors in reference cycles still occupy their cached blocks.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _report_retry(plan: MicroBatchPlan, smaller: MicroBatchPlan) -> None:
    size = plan.largest.size
    longest = plan.largest.length_text
    if smaller.concurrent_micro_batches < plan.concurrent_micro_batches:
        measure = "one micro-batch at a time"
    elif smaller.largest_size < plan.largest_size:
        measure = f"micro-batches of at most {smaller.largest_size}"
    elif smaller.recomputes_all and not plan.recomputes_all:
        measure = "all blocks recomputed"
    else:
        measure = f"subsampling, logits and CTC in chunks of {smaller.chunk_frames} frames"
    tqdm.write(
        f"Out of memory at {size} x {longest}: retrying with {measure}; the gradient is the same, up to dropout."
    )


def _out_of_memory_error(plan: MicroBatchPlan, reason: str) -> ResourceError:
    if not plan.micro_batches:
        return ResourceError(
            f"Out of memory on a rank without utterances ({reason.rstrip('.')}). Use a smaller --preset or "
            "--mixed_precision, or stop other programs that use memory."
        )
    utterance = f"{', '.join(plan.largest.utterance_ids)} of {plan.largest.length_text}"
    return ResourceError(
        f"Out of memory with a micro-batch of one: {utterance} does not fit ({reason.rstrip('.')}). Use a "
        "lower --max_duration (--max_validation_duration for validation and test sets), a smaller --preset or "
        "--mixed_precision, or stop other programs that use memory."
    )


# --------------------
# Sizes of micro-batches that ran out of memory, stored in the checkpoint folder.
#
# With sharded weights, all ranks exit if one of them runs out of memory; the newest checkpoint then predates the
# failure and does not contain it. The restarted run reads these files and uses smaller micro-batches. Each rank writes
# its own file, because ranks may be on different machines; `recipe/train.py` writes it, `recipe/planned_step.py` reads
# all of them.


def write_sizes(directory: Path, rank: int, oom_history: OomHistory) -> None:
    """Write a rank's out-of-memory history; raises a ResourceError if the folder is not writable."""
    with atomic_write(_path(directory, rank)) as partial:
        # Within atomic_write, which turns an OSError into a ResourceError.
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(oom_history.state_dict()), encoding="utf-8")


def read_sizes(directory: Path, conditions: int) -> dict[int, int]:
    """Return the limits of all ranks under these conditions: whole seconds to the fewest utterances that failed."""
    merged = OomHistory(conditions)
    for path in sorted(directory.glob(_path(directory, "*").name)):
        history = OomHistory(conditions)
        try:
            history.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            merged.learn(history.sizes())
        except (OSError, ValueError, AttributeError, CheckpointError, ResourceError):
            # A damaged file is ignored: without its limits, the run fails and records them again.
            continue
    return merged.sizes()


def forget_sizes(directory: Path) -> None:
    """Delete the histories of all ranks."""
    for path in directory.glob(_path(directory, "*").name):
        path.unlink(missing_ok=True)


def _path(directory: Path, rank: int | str) -> Path:
    return directory / f"did_not_fit_{rank}.json"
