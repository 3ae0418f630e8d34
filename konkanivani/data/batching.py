"""Epoch plan: utterances into micro-batches and global batches, as pure functions of seed and epoch.

B batch, S samples, U tokens.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from konkanivani.data.staging import ALIGNMENT, StagingBuffers
from konkanivani.data.text import SpecialTokens
from konkanivani.errors import DataError
from konkanivani.lengths import InputUnit, Lengths, unit_of
from konkanivani.randomness import derive_seed

# --------------------
# Examples, micro-batches and global batches: waveforms and tokens of utterances.


@dataclass(frozen=True)
class Example:
    """Utterance for training: waveform (S,), token ids, and the seed of SpecAugment (None: no SpecAugment).

    If the input is text, `waveform` holds its token ids.
    """

    utterance_id: str
    waveform: torch.Tensor
    tokens: list[int]
    augment_seed: int | None

    @property
    def seconds(self) -> float:
        """Return the duration of the waveform, or the number of the input text's tokens."""
        return len(self.waveform) / unit_of(self.waveform).rate


@dataclass(frozen=True)
class Batch:
    """Micro-batch of B utterances.

    Args:
        waveforms: (B, S) float32, padded with 0; token ids in int64 if the input is text.
        tokens: (B, U), padded with 0; the targets of CTC.
        decoder_tokens: (B, U + 1), the decoder's input with the start token first, padded with 0.
        targets: (B, U + 1), the decoder's targets with the end token last, padded with -1.
        augment_seeds: Seeds of SpecAugment, one per utterance; None for no SpecAugment.
        staging: Buffers through which the batch is copied to a GPU; None for a direct copy.
    """

    utterance_ids: tuple[str, ...]
    waveforms: torch.Tensor
    sample_lengths: Lengths
    tokens: torch.Tensor
    token_lengths: Lengths
    decoder_tokens: torch.Tensor
    targets: torch.Tensor
    augment_seeds: tuple[int, ...] | None
    staging: StagingBuffers | None = None

    @property
    def size(self) -> int:
        return len(self.utterance_ids)

    @property
    def longest_seconds(self) -> float:
        """Return the duration (of a text: the tokens) of the longest utterance, to which the others are padded."""
        return max(self.sample_lengths) / unit_of(self.waveforms).rate

    @property
    def length_text(self) -> str:
        """Return the length of the longest utterance for messages."""
        return unit_of(self.waveforms).text(self.longest_seconds)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on `device`; copies from pinned memory are asynchronous."""
        if self.staging is not None:
            sent = iter(self.staging.send(self.tensors()))
            return dataclasses.replace(self.with_each(lambda _: next(sent)), staging=None)
        return self.with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.waveforms, self.tokens, self.decoder_tokens, self.targets

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with `change` applied to its tensors, in the order of `tensors`."""
        return dataclasses.replace(
            self,
            waveforms=change(self.waveforms),
            tokens=change(self.tokens),
            decoder_tokens=change(self.decoder_tokens),
            targets=change(self.targets),
        )


@dataclass(frozen=True)
class GlobalBatch:
    """Utterances of one optimizer step, split into micro-batches.

    With several ranks, `micro_batches` are one rank's share, but the counts cover the whole global batch.
    `audio_seconds` are tokens if the inputs are text.
    """

    micro_batches: tuple[Batch, ...]
    tokens: int
    utterances: int
    audio_seconds: float
    padding_share: float

    @property
    def utterance_ids(self) -> tuple[str, ...]:
        """Return the ids of the utterances in the micro-batches."""
        return tuple(name for batch in self.micro_batches for name in batch.utterance_ids)

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> GlobalBatch:
        return dataclasses.replace(self, micro_batches=tuple(batch.with_each(change) for batch in self.micro_batches))

    def with_staging(self, staging: StagingBuffers) -> GlobalBatch:
        """Return the global batch with micro-batches that are copied to a GPU through these buffers."""
        batches = tuple(dataclasses.replace(batch, staging=staging) for batch in self.micro_batches)
        return dataclasses.replace(self, micro_batches=batches)


def check_tokens(speech: Example, vocab_size: int, special: SpecialTokens) -> None:
    """Raise a `DataError` if a token is CTC's blank (if the vocabulary has one) or not in the vocabulary."""
    # Checked on the host, because CUDA kernels would abort the process or compute a meaningless loss.
    lowest = 0 if special.blank is None else special.blank + 1
    wrong = [token for token in speech.tokens if not lowest <= token < vocab_size]
    if wrong:
        raise DataError(
            f"The transcript of {speech.utterance_id} has the token {wrong[0]}, but tokens are between "
            f"{lowest} and {vocab_size - 1}. Remove the utterance, or train a new tokenizer."
        )


def collate(speeches: list[Example], special: SpecialTokens) -> Batch:
    """Pad examples to a batch; `special` are the tokenizer's special tokens."""
    tokens = [torch.tensor(speech.tokens, dtype=torch.long) for speech in speeches]
    edge = torch.tensor([special.start]), torch.tensor([special.end])
    pad = torch.nn.utils.rnn.pad_sequence
    seeds = [speech.augment_seed for speech in speeches if speech.augment_seed is not None]
    return Batch(
        utterance_ids=tuple(speech.utterance_id for speech in speeches),
        waveforms=pad([speech.waveform for speech in speeches], batch_first=True),
        sample_lengths=tuple(len(speech.waveform) for speech in speeches),
        tokens=pad(tokens, batch_first=True),
        token_lengths=tuple(len(row) for row in tokens),
        decoder_tokens=pad([torch.cat([edge[0], row]) for row in tokens], batch_first=True),
        # -1 is ignored by the loss; 0 would be a token.
        targets=pad([torch.cat([row, edge[1]]) for row in tokens], batch_first=True, padding_value=-1),
        augment_seeds=tuple(seeds) if len(seeds) == len(speeches) else None,
    )


def largest_batch(batches: tuple[Batch, ...]) -> Batch:
    """Return the batch with the most padded audio; among equals, the one with the longest utterance."""
    return max(batches, key=lambda batch: (batch.size * batch.longest_seconds, batch.longest_seconds))


def order_for_concurrency(batches: tuple[Batch, ...], concurrent_micro_batches: int) -> tuple[Batch, ...]:
    """Order batches so that running `concurrent_micro_batches` of them in parallel takes the least time.

    The longest come first, so that the last ones, during which others are idle, are short.
    """
    if concurrent_micro_batches < 2:
        return batches
    ordered = sorted(batches, key=lambda batch: -sum(batch.sample_lengths))
    # The first ones ascend: gradients are added in order, and a short batch would wait for a longer one before it.
    return (*ordered[:concurrent_micro_batches][::-1], *ordered[concurrent_micro_batches:])


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch into its first and second half, each cut to its longest utterance; an odd row goes to the first.

    The order is kept; batches are sorted by length, so each half has utterances of similar length. The tensors are
    views and take no memory. Raise a `ValueError` for a batch of one utterance.
    """
    if batch.size < 2:
        raise ValueError("a batch of one utterance cannot be split")
    middle = (batch.size + 1) // 2
    return _rows(batch, slice(0, middle)), _rows(batch, slice(middle, batch.size))


def _rows(batch: Batch, rows: slice) -> Batch:
    samples = max(batch.sample_lengths[rows])
    tokens = max(batch.token_lengths[rows])
    return Batch(
        utterance_ids=batch.utterance_ids[rows],
        waveforms=batch.waveforms[rows, :samples],
        sample_lengths=batch.sample_lengths[rows],
        tokens=batch.tokens[rows, :tokens],
        token_lengths=batch.token_lengths[rows],
        decoder_tokens=batch.decoder_tokens[rows, : tokens + 1],
        targets=batch.targets[rows, : tokens + 1],
        augment_seeds=None if batch.augment_seeds is None else batch.augment_seeds[rows],
        staging=batch.staging,
    )


# --------------------
# Plan of an epoch: assignment of utterances to optimizer steps, and of a step's utterances to micro-batches.


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
        index = int(self.global_batch_order[number]) if is_full else number
        return self.order[index * self.global_batch_size : (index + 1) * self.global_batch_size]

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
        batch_count = len(order) // self.global_batch_size
        global_batches = (
            np.arange(batch_count) if self.shortest_first and epoch == 0 else generator.permutation(batch_count)
        )
        return EpochPlan(order, global_batches.astype(np.int32), self.global_batch_size)

    def global_batches_per_epoch(self) -> int:
        return -(-len(self.durations) // self.global_batch_size)

    def cursors_after(self, cursor: Cursor) -> Iterator[Cursor]:
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


def largest_batch_bytes(limits: tuple[SizeLimit, ...], longest: float, most_tokens: int, unit: InputUnit) -> int:
    """Return a bound of the bytes of a micro-batch within these limits, of inputs of up to `longest` units."""
    number_bytes = unit.dtype.itemsize
    # Tokens, decoder tokens and targets, in int64.
    of_tokens = 8 * 3 * (most_tokens + 1)
    sizes = [
        limit.utterances * (math.ceil(min(limit.seconds, longest) * unit.rate + 1) * number_bytes + of_tokens)
        for limit in limits
    ]
    return max(sizes) + 4 * ALIGNMENT


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
    rate = unit_of(speeches[0].waveform).rate
    padded = sum(batch.waveforms.numel() for batch in micro_batches)
    return GlobalBatch(
        micro_batches=micro_batches,
        tokens=sum(len(speech.tokens) for speech in speeches),
        utterances=len(speeches),
        audio_seconds=samples / rate,
        padding_share=1 - samples / padded,
    )


def choose_subset(count: int, percent: float, seed: int) -> np.ndarray:
    """Return sorted indices of a random `percent` of `count` utterances (at least one), determined by the seed."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(derive_seed(seed, "subset")))
    return np.sort(chosen[: max(1, round(count * percent / 100))].numpy())
