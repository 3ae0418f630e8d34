"""The blocks of a Whisper model: every residual branch starts with a LayerNorm, nothing is dropped.

Masks are for utterances that are shorter than others of their batch, and None where there are none.

B batch, T frames or tokens, S encoder frames, D model width, H heads, E = D / H head width, F mel bins.
"""

import math

import torch
import torch.nn.functional as F

from konkanivani.model.cache import KeysAndValues
from konkanivani.model.kernels.products import Linear, fused_linear
from konkanivani.model.kernels.recompute import attend
from konkanivani.model.whisper.shape import STRIDE, WhisperShape


class Subsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T / 2, D) by two convolutions over three frames each, then their fixed positions.

    Frames where `padding` (B, 1, T) is True are silence to both convolutions, as what is behind the last frame is.
    """

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.first = torch.nn.Conv1d(shape.mel_bins, shape.d_model, 3, padding=1)
        self.second = torch.nn.Conv1d(shape.d_model, shape.d_model, 3, stride=STRIDE, padding=1)

    def forward(
        self, features: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = features.transpose(1, 2)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        x = F.gelu(self.first(x))
        if padding is not None:
            x = x.masked_fill_(padding, 0.0)  # nothing is kept of it for the backward pass
        return F.gelu(self.second(x)).transpose(1, 2) + positions


class Attention(torch.nn.Module):
    """Multi-head attention of x (B, T, D) over itself or encoded frames -> (B, T, D); keys have no bias.

    A `key_mask` (B, 1, 1, S) is True where a key may be seen.
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
        """norm(x) over norm(x); causal: a token sees none after it."""
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
        """norm(x) over given keys and values (B, H, S, E)."""
        query = self._heads_of(x, self.query, norm)
        return self._joined(attend(query, key, value, key_mask))

    def scores(self, x: torch.Tensor, norm: torch.nn.LayerNorm, key: torch.Tensor) -> torch.Tensor:
        """What a softmax over the keys (B, H, S, E) makes weights of: (B, H, T, S)."""
        query = self._heads_of(x, self.query, norm)
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def keys_and_values(self, encoded: torch.Tensor) -> KeysAndValues:
        """Those of encoded (B, S, D), each (B, H, S, E)."""
        return self._heads_of(encoded, self.key), self._heads_of(encoded, self.value)

    def step(self, x: torch.Tensor, norm: torch.nn.LayerNorm, kept: torch.Tensor, length: int) -> torch.Tensor:
        """The last token's (R, 1, D) alone, after `length` others, of which `kept` (2, R, H, U, E) holds keys, values.

        It is given this one's.
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
    """x (B, T, D) and, of its LayerNorm, D -> inner, GELU, inner -> D."""

    def __init__(self, d_model: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = Linear(d_model, inner)
        self.contract = Linear(inner, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.gelu)


class EncoderBlock(torch.nn.Module):
    """(B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention.over_itself(x, self.self_attention_norm, causal=False, key_mask=key_mask)
        return self.feedforward(x)


class DecoderBlock(torch.nn.Module):
    """(B, T, D) -> (B, T, D): causal self-attention, attention over encoded (B, S, D), feed-forward.

    `encoded_mask` (B, 1, 1, S) is True where a frame may be seen.
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
        """As `forward`, and the scores (B, H, T, S) by which its heads look at the encoded frames."""
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
        """The last tokens of K hypotheses an utterance (B, K, D) -> (B, K, D).

        `kept` (2, B, K, H, U, E) holds the keys and values of the `length` tokens before; hypotheses see the encoded
        frames of their utterance together, as the tokens of one sequence do.
        """
        rows = x.flatten(0, 1)[:, None]
        attended = self.self_attention.step(rows, self.self_attention_norm, kept.flatten(1, 2), length)
        return self._with_encoded(x + attended.view_as(x), cross_kv, encoded_mask)

    def _with_encoded(
        self, x: torch.Tensor, cross_kv: KeysAndValues, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.cross_attention.over(x, self.cross_attention_norm, *cross_kv, encoded_mask)
        return self.feedforward(x)
