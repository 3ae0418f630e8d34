"""Blocks of Whisper (Radford et al., 2022): pre-norm Transformer blocks without dropout.

Masks are for utterances shorter than the longest of their batch, and None if there are none.

B batch, T frames or tokens, S encoder frames, D model width, H heads, E = D / H head width, F mel bins.
"""

import math

import torch
import torch.nn.functional as F

from konkanivani.model.blocks import Block
from konkanivani.model.cache import KeysAndValues
from konkanivani.model.kernels.products import Linear, fused_linear
from konkanivani.model.kernels.recompute import attend
from konkanivani.model.whisper.shape import STRIDE, WhisperShape


class Subsampling(Block):
    """Subsampling by 2, features (B, T, F) -> (B, T / 2, D): two convolutions over three frames, fixed positions added.

    `padding` (B, 1, T) is True after an utterance's end.
    """

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(shape.mel_bins, shape.d_model, 3, padding=1)
        self.second = torch.nn.Conv1d(shape.d_model, shape.d_model, 3, stride=STRIDE, padding=1)

    def forward(
        self, features: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = features.transpose(1, 2)
        # Zero padding before both convolutions, as after the last frame, so that the batch changes nothing.
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        x = F.gelu(self.first(x))
        if padding is not None:
            x = x.masked_fill_(padding, 0.0)  # in place: no backward needs GELU's output, and no copy is kept
        return F.gelu(self.second(x)).transpose(1, 2) + positions


class Attention(torch.nn.Module):
    """Multi-head attention of x (B, T, D) over itself or over encoded frames -> (B, T, D); keys have no bias.

    `key_mask` (B, 1, 1, S) is True for keys that are attended to.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(d_model, d_model)
        self.key = Linear(d_model, d_model, bias=False)
        self.value = Linear(d_model, d_model)
        self.output = Linear(d_model, d_model)

    def over_itself(
        self, x: torch.Tensor, norm: torch.nn.LayerNorm, causal: bool, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend from norm(x) to norm(x); if causal, only to earlier tokens and the token itself."""
        # Three products, not one: keys have no bias, and Whisper's weights are stored separately.
        query, key, value = (self._heads_of(x, linear, norm) for linear in (self.query, self.key, self.value))
        return self._joined(attend(query, key, value, key_mask, causal))

    def over(
        self,
        x: torch.Tensor,
        norm: torch.nn.LayerNorm,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from norm(x) to given keys and values (B, H, S, E)."""
        query = self._heads_of(x, self.query, norm)
        return self._joined(attend(query, key, value, key_mask))

    def scores(self, x: torch.Tensor, norm: torch.nn.LayerNorm, key: torch.Tensor) -> torch.Tensor:
        """Return the scores (B, H, T, S) over keys (B, H, S, E), before the softmax."""
        query = self._heads_of(x, self.query, norm)
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def keys_and_values(self, encoded: torch.Tensor) -> KeysAndValues:
        """Return keys and values of encoded (B, S, D), each (B, H, S, E)."""
        return self._heads_of(encoded, self.key), self._heads_of(encoded, self.value)

    def step(self, x: torch.Tensor, norm: torch.nn.LayerNorm, kept: torch.Tensor, length: int) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones.

        `kept` (2, R, H, U, E) holds the earlier tokens' keys and values; the new token's are written to it.
        """
        for room, linear in zip(kept, (self.key, self.value), strict=True):
            room[:, :, length] = self._heads_of(x, linear, norm)[:, :, 0]
        key, value = kept[:, :, :, : length + 1]
        return self.over(x, norm, key, value)

    def _heads_of(self, x: torch.Tensor, linear: Linear, norm: torch.nn.LayerNorm | None = None) -> torch.Tensor:
        return fused_linear(x, linear, norm).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _joined(self, attended: torch.Tensor) -> torch.Tensor:
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Module):
    """Feed-forward module with its residual: x + contract(GELU(expand(norm(x)))), x (B, T, D)."""

    def __init__(self, d_model: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = Linear(d_model, inner)
        self.contract = Linear(inner, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.gelu)


class EncoderBlock(Block):
    """Encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention.over_itself(x, self.self_attention_norm, causal=False, key_mask=key_mask)
        return self.feedforward(x)


class DecoderBlock(Block):
    """Decoder block, (B, T, D) -> (B, T, D): causal self-attention, attention over encoded (B, S, D), feed-forward.

    `encoded_mask` (B, 1, 1, S) is True for frames that are attended to.
    """

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.cross_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.cross_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, encoded_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention.over_itself(x, self.self_attention_norm, causal=True)
        return self._with_encoded(x, self.cross_attention.keys_and_values(encoded), encoded_mask)

    def watched(self, x: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `forward` and the cross-attention scores (B, H, T, S), before the softmax."""
        x = x + self.self_attention.over_itself(x, self.self_attention_norm, causal=True)
        cross_kv = self.cross_attention.keys_and_values(encoded)
        scores = self.cross_attention.scores(x, self.cross_attention_norm, cross_kv[0])
        return self._with_encoded(x, cross_kv, None), scores

    def step(
        self,
        x: torch.Tensor,
        kept: torch.Tensor,
        length: int,
        cross_kv: KeysAndValues,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per utterance -> (B, K, D).

        `kept` (2, B, K, H, U, E) holds keys and values of the `length` tokens before.
        """
        # Hypotheses have their own past, so self-attention has B K rows of one token. All K attend to the same encoded
        # frames, as K tokens of one sequence would.
        rows = x.flatten(0, 1)[:, None]
        attended = self.self_attention.step(rows, self.self_attention_norm, kept.flatten(1, 2), length)
        return self._with_encoded(x + attended.view_as(x), cross_kv, encoded_mask)

    def _with_encoded(
        self, x: torch.Tensor, cross_kv: KeysAndValues, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.cross_attention.over(x, self.cross_attention_norm, *cross_kv, encoded_mask)
        return self.feedforward(x)
