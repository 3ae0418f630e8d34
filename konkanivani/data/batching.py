"""Plan of an epoch: assignment of utterances to optimizer steps, and of a step's utterances to micro-batches."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.randomness import derive_seed
from konkanivani.data.batch import Example, GlobalBatch, collate
from konkanivani.data.text import SpecialTokens

MAX_BUCKETS = 50
PLAN_VERSION = 2  # increment when the same settings give another plan


@dataclass(frozen=True, order=True)
class Cursor:
    """Position in the training data: `consumed` global batches of epoch `epoch` (from 0) have been used."""

    epoch: int
    consumed: int


@dataclass(frozen=True)
class EpochPlan:
    """Global batches of one epoch as arrays of utterance indices.

    `order` concatenates the batches before shuffling; `global_batch_order` is the order of the complete ones.
    """

    order: np.ndarray
    global_batch_order: np.ndarray
    global_batch_size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.global_batch_size)

    def __getitem__(self, number: int) -> np.ndarray:
        number = range(len(self))[number]
        is_full = number < len(self.global_batch_order)  # only the last global batch may be smaller
        place = int(self.global_batch_order[number]) if is_full else number
        return self.order[place * self.global_batch_size : (place + 1) * self.global_batch_size]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class EpochPlanner:
    """Planner of epochs; `durations` (N,) are the utterances' durations in seconds.

    With `shortest_first`, the first epoch's global batches are ordered from short to long utterances (SortaGrad;
    Amodei et al., 2015).
    """

    durations: np.ndarray
    global_batch_size: int
    seed: int
    shortest_first: bool = False

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the epoch's global batches: each utterance once, utterances of similar length together.

        The plan is a function of (seed, epoch). Utterances are sorted into buckets by duration, shuffled within each
        bucket and concatenated. Then the global batches are shuffled, unless `shortest_first` orders this epoch; an
        incomplete one stays last.
        """
        generator = np.random.default_rng(derive_seed(self.seed, "plan", epoch))
        # Buckets of about equal size, each at least four global batches.
        count = int(np.clip(len(self.durations) // (4 * self.global_batch_size), 1, MAX_BUCKETS))
        ordered = np.sort(self.durations.astype(np.float32))  # half the memory; the edges need not be exact
        edges = ordered[len(ordered) * np.arange(1, count) // count]
        # In parts, because searchsorted returns int64, eight times the size of the bucket numbers.
        parts = np.array_split(self.durations, 16)
        buckets = np.concatenate([np.searchsorted(edges, part, side="right").astype(np.uint8) for part in parts])
        order = np.argsort(buckets, kind="stable").astype(np.int32)
        ends = np.cumsum(np.bincount(buckets, minlength=MAX_BUCKETS))
        for first, end in zip([0, *ends], ends, strict=False):
            generator.shuffle(order[first:end])
        whole = len(order) // self.global_batch_size
        global_batches = np.arange(whole) if self.shortest_first and epoch == 0 else generator.permutation(whole)
        return EpochPlan(order, global_batches.astype(np.int32), self.global_batch_size)

    def global_batches_per_epoch(self) -> int:
        return -(-len(self.durations) // self.global_batch_size)

    def cursors_behind(self, cursor: Cursor) -> Iterator[Cursor]:
        """Yield the cursor after each global batch from `cursor` on, without end."""
        epoch = cursor.epoch
        number = cursor.consumed
        while True:
            epoch, number = (epoch, number + 1) if number + 1 < self.global_batches_per_epoch() else (epoch + 1, 0)
            yield Cursor(epoch, number)

    def digest(self) -> int:
        """Return a checksum that changes if any plan changes."""
        recipe: list[int | str] = [PLAN_VERSION, self.global_batch_size, self.seed]
        if self.shortest_first:  # only if set: other plans keep their digest
            recipe.append("shortest first")
        return zlib.crc32(repr(tuple(recipe)).encode(), zlib.crc32(np.ascontiguousarray(self.durations).data))


def partition(costs: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Divide items with these costs (N,) among ranks; return each rank's item numbers in ascending order.

    The costliest item goes to the least loaded rank first, so that the largest load is at most 4/3 of the optimum
    (Graham, 1969). A rank may receive no items.
    """
    # Deterministic (stable sort, first minimum): each rank computes the shares of all ranks without communication.
    loads = np.zeros(ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for number in np.argsort(-np.asarray(costs, dtype=np.float64), kind="stable"):
        rank = int(loads.argmin())
        loads[rank] += costs[number]
        hands[rank].append(int(number))
    return [np.array(sorted(hand), dtype=np.int64) for hand in hands]


def plan_evaluation(durations: np.ndarray, batch_seconds: float) -> list[np.ndarray]:
    """Return batches of utterance indices, longest first: at most `batch_seconds` of padded audio, or one utterance."""
    batches: list[list[int]] = []
    for index in np.argsort(-durations, kind="stable"):
        if batches and durations[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_seconds:
            batches[-1].append(int(index))
        else:
            batches.append([int(index)])
    return [np.array(batch) for batch in batches]


@dataclass(frozen=True)
class SizeLimit:
    """Largest micro-batch, in utterances, for utterances of up to `seconds`."""

    seconds: float
    utterances: int


def same_size(utterances: int) -> tuple[SizeLimit, ...]:
    """Return limits that allow micro-batches of `utterances` at any length."""
    return (SizeLimit(float("inf"), utterances),)


def largest_size(seconds: float, limits: tuple[SizeLimit, ...]) -> int:
    """Return the largest micro-batch for utterances of up to `seconds`; 1 if they exceed all limits."""
    return next((limit.utterances for limit in limits if seconds <= limit.seconds), 1)


def cut_sizes(seconds: Sequence[float], limits: tuple[SizeLimit, ...]) -> list[int]:
    """Return the micro-batch sizes of a global batch, shortest utterances first; `seconds` and `limits` must ascend."""
    sizes: list[int] = []
    for longest in seconds:
        # The added utterance is the longest so far: its limit applies to the whole micro-batch.
        if sizes and sizes[-1] < largest_size(longest, limits):
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def padded_seconds(seconds: np.ndarray, limits: tuple[SizeLimit, ...]) -> float:
    """Return the seconds of audio and padding of a global batch (N,) that is split by these limits."""
    ordered = np.sort(seconds)
    sizes = np.array(cut_sizes(ordered.tolist(), limits))
    return float((ordered[np.cumsum(sizes) - 1] * sizes).sum())


def split_into_micro_batches(
    speeches: list[Example], limits: tuple[SizeLimit, ...], special: SpecialTokens
) -> GlobalBatch:
    """Split a global batch into micro-batches of similar length, each as large as its longest utterance allows.

    `limits` must ascend in seconds. The shortest utterances come first; the last micro-batch may be smaller.
    """
    # Ties are broken by the id, so that the result does not depend on the order of the input.
    rest = iter(sorted(speeches, key=lambda speech: (len(speech.waveform), speech.utterance_id)))
    sizes = cut_sizes(sorted(speech.seconds for speech in speeches), limits)
    micro_batches = tuple(collate(list(islice(rest, size)), special) for size in sizes)
    samples = sum(len(speech.waveform) for speech in speeches)
    padded = sum(batch.waveforms.numel() for batch in micro_batches)
    return GlobalBatch(
        micro_batches=micro_batches,
        tokens=sum(len(speech.tokens) for speech in speeches),
        utterances=len(speeches),
        audio_seconds=samples / SAMPLE_RATE,
        padding_share=1 - samples / padded,
    )


def choose_subset(count: int, percent: float, seed: int) -> np.ndarray:
    """Return sorted indices of a random `percent` of `count` utterances (at least one), determined by the seed."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, "subset")))
    return np.sort(chosen[: max(1, round(count * percent / 100))].numpy())
