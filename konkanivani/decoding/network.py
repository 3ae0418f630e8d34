"""Interface of the networks that can be decoded, and the hypotheses of a search.

B batch, N candidates.

B batch, K hypotheses per utterance, U tokens, T' encoder frames, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.lengths import Lengths
from konkanivani.models.decoder import DecoderCache

# --------------------
# Hypotheses of a search, and an order of them that does not depend on the batch.


# Log probabilities that differ by less than a step are a tie. Kernels round the same sum differently at other positions
# of a batch; without steps, the last bit would decide ties, and results could differ from decoding one by one.
STEPS_IN_A_NAT = 2**26
# Beyond this number of steps (16,384 nats) below the best all are equal, so that rank and index fit into an int64.
MAX_DISTANCE = 2**40


@dataclass(frozen=True)
class Hypothesis:
    """Token sequence and its log probability in nats, a lower bound if some of its alignments left the beam."""

    tokens: tuple[int, ...]
    log_probability: float


def first_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices (B, count) of the highest scores (B, N), highest first; ties in order of index."""
    highest = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    ranks = ((scores - highest) * STEPS_IN_A_NAT).round().clamp(min=-MAX_DISTANCE)
    ranks = ranks.masked_fill(scores == -math.inf, -MAX_DISTANCE - 1).long()
    # All keys differ, so the result does not depend on how a device's topk breaks ties.
    keys = ranks * scores.shape[1] - torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count, dim=1).indices


def sort_hypotheses(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort by log probability, highest first; ties by token ids, ascending."""
    highest = max((hypothesis.log_probability for hypothesis in hypotheses), default=0.0)

    def rank(hypothesis: Hypothesis) -> tuple[int, tuple[int, ...]]:
        return round((highest - hypothesis.log_probability) * STEPS_IN_A_NAT), hypothesis.tokens

    return sorted(hypotheses, key=rank)


# --------------------
# Interface of the networks that can be decoded: KonkaniVani's own model and Whisper.


class Heads(Protocol):
    """Heads of a model, which decide the searches that it can be decoded with."""

    @property
    def has_ctc(self) -> bool:
        """Whether there is a CTC head."""

    @property
    def has_decoder(self) -> bool:
        """Whether there is an attention decoder."""


class StepwiseDecoder(Protocol):
    """Attention decoder that appends one token at a time to the hypotheses in a cache."""

    @property
    def most_tokens(self) -> float:
        """Maximal number of tokens after the start token; infinite if there is no limit."""

    @property
    def output(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Output layer: decoded (..., D) to logits (..., V)."""

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> DecoderCache:
        """Return an empty cache for `beam` hypotheses of each utterance of encoded (B, T', D)."""

    def step(self, tokens: torch.Tensor, cache: DecoderCache) -> torch.Tensor:
        """Append the next tokens (B, K) to the hypotheses in `cache` and return decoded (B, K, D)."""


class Network(Protocol):
    """Network with a CTC head, an attention decoder, or both; None for the missing one."""

    @property
    def ctc_head(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Output layer of CTC: encoded (B, T', D) to logits (B, T', V)."""

    @property
    def decoder(self) -> StepwiseDecoder | None:
        """Attention decoder."""


def ctc_head_of(model: Network) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the CTC head; raise a ValueError if the model has none."""
    if model.ctc_head is None:
        raise ValueError("The model has no CTC head.")
    return model.ctc_head


def decoder_of(model: Network) -> StepwiseDecoder:
    """Return the attention decoder; raise a ValueError if the model has none."""
    if model.decoder is None:
        raise ValueError("The model has no attention decoder.")
    return model.decoder
