"""Examples, micro-batches and global batches: waveforms and tokens of utterances.

B batch, S samples, U tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.base.errors import DataError
from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.data.text import SpecialTokens


@dataclass(frozen=True)
class Example:
    """Utterance for training: waveform (S,), token ids, and the seed of SpecAugment (None: no SpecAugment)."""

    utterance_id: str
    waveform: torch.Tensor
    tokens: list[int]
    augment_seed: int | None

    @property
    def seconds(self) -> float:
        """Return the duration of the waveform."""
        return len(self.waveform) / SAMPLE_RATE


@dataclass(frozen=True)
class Batch:
    """Micro-batch of B utterances.

    Args:
        waveforms: (B, S) float32, padded with 0.
        tokens: (B, U), padded with 0; the targets of CTC.
        decoder_tokens: (B, U + 1), the decoder's input with the start token first, padded with 0.
        targets: (B, U + 1), the decoder's targets with the end token last, padded with -1.
        augment_seeds: Seeds of SpecAugment, one per utterance; None for no SpecAugment.
    """

    utterance_ids: tuple[str, ...]
    waveforms: torch.Tensor
    sample_lengths: Lengths
    tokens: torch.Tensor
    token_lengths: Lengths
    decoder_tokens: torch.Tensor
    targets: torch.Tensor
    augment_seeds: tuple[int, ...] | None

    @property
    def size(self) -> int:
        return len(self.utterance_ids)

    @property
    def longest_seconds(self) -> float:
        """Return the duration of the longest utterance, to which the others are padded."""
        return max(self.sample_lengths) / SAMPLE_RATE

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on `device`; copies from pinned memory are asynchronous."""
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
    )
