"""Going on when memory runs out: the same work again in smaller pieces, with the same result."""

import dataclasses
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from tqdm import tqdm

from konkanivani.command_line import is_out_of_memory
from konkanivani.data.batch import Batch, split_batch
from konkanivani.errors import CheckpointError, ResourceError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cut:
    """How the work on some utterances is run: in which micro-batches, and whether every block is recomputed."""

    micro_batches: tuple[Batch, ...]
    recomputes_all: bool

    @property
    def largest(self) -> Batch:
        """The micro-batch of most padded audio."""
        return max(self.micro_batches, key=lambda batch: (batch.size * batch.longest_seconds, batch.longest_seconds))

    def smaller(self) -> "Cut | None":
        """The next smaller way: every micro-batch in halves, then all blocks recomputed, then None."""
        if self.largest_size > 1:
            halves = (split_batch(batch) if batch.size > 1 else (batch,) for batch in self.micro_batches)
            return dataclasses.replace(self, micro_batches=tuple(half for pair in halves for half in pair))
        return None if self.recomputes_all else dataclasses.replace(self, recomputes_all=True)

    @property
    def largest_size(self) -> int:
        """The most utterances in one micro-batch."""
        return max(batch.size for batch in self.micro_batches)


class RememberedSplits:
    """The sizes of micro-batches that did not fit, so that the next ones of such a size are cut beforehand.

    A size is the whole seconds of the longest utterance and the number of utterances; what is as long and as many does
    not fit either. `conditions` is a number that stands for the device and all else that the memory taken depends on
    (but the model, which no resumed run changes): under other conditions a checkpoint's sizes mean nothing.
    """

    def __init__(self, conditions: int) -> None:
        self.conditions = conditions
        self._fewest: dict[int, int] = {}  # whole seconds -> the fewest utterances that did not fit

    def is_too_large(self, batch: Batch) -> bool:
        """Whether a micro-batch that was no longer and held no more did not fit."""
        return any(
            seconds <= batch.longest_seconds and fewest <= batch.size for seconds, fewest in self._fewest.items()
        )

    def remember(self, batch: Batch) -> bool:
        """Books a micro-batch that did not fit; whether that is news."""
        is_news = not self.is_too_large(batch)
        if is_news:
            self._fewest[int(batch.longest_seconds)] = batch.size
        return is_news

    def cut_to_fit(self, cut: Cut) -> Cut:
        """The cut with everything known to be too large in smaller pieces."""
        pieces = tuple(piece for batch in cut.micro_batches for piece in self._pieces(batch))
        return Cut(pieces, cut.recomputes_all or any(self.is_too_large(piece) for piece in pieces))

    def state_dict(self) -> dict[str, int]:
        """The fewest utterances that did not fit by whole seconds, and the conditions."""
        return {"conditions": self.conditions} | {str(seconds): fewest for seconds, fewest in self._fewest.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes the sizes of a checkpoint saved under the same conditions; a CheckpointError where they are none."""
        sizes = {name: fewest for name, fewest in state.items() if name != "conditions"}
        for seconds, fewest in sizes.items():
            if not seconds.isdecimal() or type(fewest) is not int:
                raise CheckpointError(
                    f"The checkpoint's split {seconds!r:.40}: {fewest!r:.40} is no size. Use another checkpoint."
                )
        is_same = state.get("conditions") == self.conditions
        self._fewest = {int(seconds): fewest for seconds, fewest in sizes.items()} if is_same else {}

    def _pieces(self, batch: Batch) -> tuple[Batch, ...]:
        if batch.size == 1 or not self.is_too_large(batch):
            return (batch,)
        return tuple(piece for half in split_batch(batch) for piece in self._pieces(half))


def run_or_split(
    attempt: Callable[[Cut], Result], cut: Cut, splits: RememberedSplits, undo: Callable[[], None]
) -> tuple[Result, int]:
    """What `attempt` returns for `cut`, or for the first smaller one that fits in memory; and how often it was retried.

    `undo` takes back what a failed attempt has left, and must not allocate to speak of. A ResourceError names the
    utterance that does not fit even alone; every other error passes through.
    """
    cut, retries = splits.cut_to_fit(cut), 0
    while True:
        result, reason = _result_or_reason(attempt, cut)
        if reason is None:
            return result, retries
        undo()
        release_memory()
        smaller = cut.smaller()
        if smaller is None:
            raise _does_not_fit(cut.largest, reason)
        if splits.remember(cut.largest):
            _tell(cut, smaller)
        cut, retries = smaller, retries + 1


def _result_or_reason(attempt: Callable[[Cut], Result], cut: Cut) -> tuple[Result | None, str | None]:
    """The attempt's result, or how memory ran out.

    The error must not leave this function: its traceback holds the frames of the attempt, and they hold its tensors.
    """
    try:
        return attempt(cut), None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None, (str(error) or "the system gave no more").splitlines()[0]


def release_memory() -> None:
    """Collects what only cycles hold, and returns cached GPU memory to the driver: its pieces may be too small."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _tell(cut: Cut, smaller: Cut) -> None:
    size, seconds = cut.largest.size, cut.largest.longest_seconds
    way = f"at most {smaller.largest_size} at once" if size > 1 else "every block recomputed"
    tqdm.write(f"Out of memory at {size} x {seconds:.1f} s: the same again with {way}; the result does not change.")


def _does_not_fit(batch: Batch, reason: str) -> ResourceError:
    utterance = f"{', '.join(batch.utterance_ids)} of {batch.longest_seconds:.1f} s"
    return ResourceError(
        f"Out of memory with one utterance at a time: {utterance} does not fit ({reason.rstrip('.')}). "
        "Give a lower --max_duration (--max_validation_duration for a set that is validated or tested on), "
        "a smaller --preset or --mixed_precision, or end what else holds memory."
    )
