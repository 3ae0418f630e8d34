"""CTC and attention losses as sums, and the counts of a global batch to divide them by.

Both losses take hidden states and the output layer, so that a pass (kernels/chunks.py) can compute a long utterance's
logits in chunks.

B batch, T' encoder frames, D model width, U tokens, V vocabulary.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from konkanivani.lengths import CHUNK_FRAMES, Lengths

BLANK = 0
TARGET_PADDING = -1

Head = Callable[[torch.Tensor], torch.Tensor]
"""Output layer, (B, T', D) -> logits (B, T', V)."""


class Targets(Protocol):
    """Transcripts: tokens (B, U) with their lengths, and the decoder's targets (B, U + 1), padded with -1."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def token_lengths(self) -> Lengths: ...

    @property
    def targets(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class LossCounts:
    """Divisors of the losses of one global batch: its tokens, and its utterances (one end token each)."""

    tokens: float
    utterances: float


@dataclass(frozen=True)
class LossTerm:
    """Term of the objective; with `has_end`, each utterance's end token is a target too."""

    name: Literal["ctc", "attention"]
    weight: float
    has_end: bool

    def divisor(self, counts: LossCounts) -> float:
        """Return the number of targets, by which the summed loss is divided."""
        return counts.tokens + counts.utterances if self.has_end else counts.tokens


LossSums = tuple[torch.Tensor, ...]
"""Losses in nats, summed over a micro-batch's utterances and tokens: 0-dim tensors, one per term of the objective."""


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token: the weighted sum and its terms, None for a loss that the model is not trained with."""

    all: float
    ctc: float | None
    attention: float | None


@dataclass(frozen=True)
class Objective:
    """Training objective: weighted losses per token, w L_CTC + (1 - w) L_attention (Watanabe et al., 2017).

    The fraction `intermediate_ctc` of the CTC loss is computed on the encoder's middle block (Lee and Watanabe, 2021).
    """

    terms: tuple[LossTerm, ...]
    label_smoothing: float = 0.0
    intermediate_ctc: float = 0.0

    def total(self, sums: LossSums, counts: LossCounts) -> torch.Tensor:
        """Return a micro-batch's share of the global batch's loss."""
        # Divided by the global batch's counts, not the micro-batch's: gradients then add up to the global batch's.
        weighted = (term.weight * summed / term.divisor(counts) for term, summed in zip(self.terms, sums, strict=True))
        return functools.reduce(operator.add, weighted)

    def losses(self, sums: Sequence[float], counts: LossCounts) -> Losses:
        """Return the losses per token of a global batch or of an evaluation."""
        pairs = zip(self.terms, sums, strict=True)
        found = {term.name: summed / term.divisor(counts) for term, summed in pairs}
        total = sum(term.weight * found[term.name] for term in self.terms)
        return Losses(total, found.get("ctc"), found.get("attention"))


class HeadLosses:
    """Losses of the CTC head and of the decoder's output layer.

    `chunk_frames` is for the pass that computes longer sequences in chunks.
    """

    def ctc(
        self,
        encoded: torch.Tensor,
        head: Head,
        encoded_lengths: Lengths,
        tokens: torch.Tensor,
        token_lengths: Lengths,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        """Return the summed CTC loss of head(encoded (B, T', D)) against tokens (B, U); blank is 0."""
        logits = head(encoded)
        # In at least fp32 whatever the autocast: the forward variables span hundreds of nats (Graves et al., 2006).
        with torch.autocast(logits.device.type, enabled=False):
            log_probabilities = F.log_softmax(logits, dim=-1, dtype=at_least_float32(logits)).transpose(0, 1)
            # With lengths on the host the loss never waits for the GPU; PyTorch's annotations know only tensors.
            lengths = encoded_lengths, token_lengths
            return F.ctc_loss(log_probabilities, tokens, *lengths, BLANK, reduction="sum")  # type: ignore[arg-type]

    def attention(
        self,
        decoded: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        label_smoothing: float,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        """Return the summed, smoothed cross entropy of head(decoded (B, U + 1, D)) against targets (B, U + 1).

        Padding is -1. In at least fp32 whatever the autocast.
        """
        return cross_entropy_sum(decoded, head, targets, label_smoothing)


def cross_entropy_sum(decoded: torch.Tensor, head: Head, targets: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Return the summed, smoothed cross entropy of head(decoded (B, U, D)) against targets (B, U), padded with -1."""
    logits = head(decoded)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(
            # Cross entropy's log-softmax over V loses accuracy in half precision.
            logits.flatten(0, 1).to(at_least_float32(logits)),
            targets.flatten(),
            reduction="sum",
            label_smoothing=label_smoothing,
            ignore_index=TARGET_PADDING,
        )


def at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    """Return the tensor's dtype, or float32 if it is a half-precision dtype."""
    return torch.promote_types(tensor.dtype, torch.float32)
