"""The CTC and the attention loss as sums, with the counts that a whole window divides them by.

Both take hidden states and the head that makes logits of them, since the logits of a long utterance are never there all
at once.

B batch, T' encoder frames, D model width, U tokens, V vocabulary.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import CHUNK_FRAMES, Lengths
from konkanivani.model.kernels.ctc import BLANK, Head, long_ctc_losses
from konkanivani.model.kernels.recompute import run_recomputed

TARGET_PADDING = -1


class Targets(Protocol):
    """What was said: tokens (B, U) with their lengths, and the decoder's targets (B, U + 1), padded with -1."""

    tokens: torch.Tensor
    token_lengths: Lengths
    targets: torch.Tensor


@dataclass(frozen=True)
class LossCounts:
    """What the losses of one window are divided by: its tokens, and its utterances (one end token each)."""

    tokens: float
    utterances: float


@dataclass(frozen=True)
class LossTerm:
    """One of the losses that are minimised together; `has_end`: it asks for an end token of each utterance too."""

    name: Literal["ctc", "attention"]
    weight: float
    has_end: bool

    def divisor(self, counts: LossCounts) -> float:
        """What makes a loss a token of its sum."""
        return counts.tokens + counts.utterances if self.has_end else counts.tokens


LossSums = tuple[torch.Tensor, ...]
"""Losses in nats, summed over a micro-batch's utterances and tokens: 0-dim tensors, one a term of the objective."""


@dataclass(frozen=True)
class Losses:
    """Losses in nats a token: the weighted sum, and its terms; None for one that the model is not trained by."""

    all: float
    ctc: float | None
    attention: float | None


@dataclass(frozen=True)
class Objective:
    """What is minimised: losses a token, weighted (CTC and attention: Watanabe et al., 2017).

    A portion `intermediate_ctc` of the CTC loss is asked of the encoder's middle block (Lee and Watanabe, 2021).
    """

    terms: tuple[LossTerm, ...]
    label_smoothing: float = 0.0
    intermediate_ctc: float = 0.0

    def total(self, sums: LossSums, counts: LossCounts) -> torch.Tensor:
        """The loss of a micro-batch, its portion of the window's."""
        weighted = (term.weight * summed / term.divisor(counts) for term, summed in zip(self.terms, sums, strict=True))
        return functools.reduce(operator.add, weighted)

    def losses(self, sums: Sequence[float], counts: LossCounts) -> Losses:
        """The losses of a whole window, or of all that was evaluated."""
        pairs = zip(self.terms, sums, strict=True)
        found = {term.name: summed / term.divisor(counts) for term, summed in pairs}
        total = sum(term.weight * found[term.name] for term in self.terms)
        return Losses(total, found.get("ctc"), found.get("attention"))


def ctc_loss_sum(
    encoded: torch.Tensor,
    head: Head,
    encoded_lengths: Lengths,
    tokens: torch.Tensor,
    token_lengths: Lengths,
    chunk_frames: int = CHUNK_FRAMES,
) -> torch.Tensor:
    """The summed CTC loss of head(encoded (B, T', D)) against tokens (B, U); blank is 0.

    At least in fp32 whatever the autocast: the forward variables span hundreds of nats (Graves et al., 2006). Beyond
    `chunk_frames` frames in memory that grows linearly, with the same result.
    """
    if encoded.shape[1] > chunk_frames:
        losses = long_ctc_losses(encoded, head, encoded_lengths, tokens, token_lengths)
        return losses.sum().to(_at_least_float32(encoded))
    logits = head(encoded)
    with torch.autocast(logits.device.type, enabled=False):
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=_at_least_float32(logits)).transpose(0, 1)
        return F.ctc_loss(log_probabilities, tokens, encoded_lengths, token_lengths, BLANK, reduction="sum")


def attention_loss_sum(
    decoded: torch.Tensor, head: Head, targets: torch.Tensor, label_smoothing: float, chunk_frames: int = CHUNK_FRAMES
) -> torch.Tensor:
    """The summed, smoothed cross entropy of head(decoded (B, U + 1, D)) against targets (B, U + 1); padding is -1.

    At least in fp32 whatever the autocast. Beyond `chunk_frames` tokens chunk by chunk, with the same result.
    """
    if decoded.shape[1] <= chunk_frames:
        return _cross_entropy_sum(decoded, head, targets, label_smoothing)
    chunks = zip(decoded.split(chunk_frames, dim=1), targets.split(chunk_frames, dim=1), strict=True)
    sums = [run_recomputed(_cross_entropy_sum, chunk, head, aims, label_smoothing) for chunk, aims in chunks]
    return torch.stack(sums).sum()


def _cross_entropy_sum(
    decoded: torch.Tensor, head: Head, targets: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    logits = head(decoded)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(
            logits.flatten(0, 1).to(_at_least_float32(logits)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
            ignore_index=TARGET_PADDING,
        )


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
