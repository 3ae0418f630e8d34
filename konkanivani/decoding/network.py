"""Interface of the networks that can be decoded: KonkaniVani's own model and Whisper.

B batch, K hypotheses per utterance, U tokens, T' encoder frames, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from konkanivani.base.lengths import Lengths
from konkanivani.model.decoder import DecoderCache


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
