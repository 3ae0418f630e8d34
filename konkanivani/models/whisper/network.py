"""Dimensions and blocks of Whisper (Radford et al., 2022).

Masks are for utterances shorter than the longest of their batch, and None if there are none.

B batch, T frames or tokens, S encoder frames, D model width, H heads, E = D / H head width, F mel bins.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.lengths import SAMPLE_RATE, Count
from konkanivani.models.decoder import KeysAndValues

# --------------------
# Dimensions of a Whisper model, and the conversion of samples to frames.


HOP_SAMPLES = 160  # samples per feature frame: 10 ms
STRIDE = 2  # feature frames per encoder frame


@dataclass(frozen=True)
class WhisperShape:
    """Dimensions of the network (Radford et al., 2022); encoder and decoder have the same heads and inner width.

    `source_positions` is the number of encoder frames of a window (1500 in 30 s), `target_positions` the maximal number
    of decoder tokens.
    """

    d_model: int
    attention_heads: int
    encoder_layers: int
    decoder_layers: int
    feedforward_dim: int
    mel_bins: int
    vocab_size: int
    source_positions: int = 1500
    target_positions: int = 448

    @property
    def window_frames(self) -> int:
        """Feature frames of a window."""
        return STRIDE * self.source_positions

    @property
    def window_samples(self) -> int:
        """Samples of a window, to which every utterance is padded."""
        return HOP_SAMPLES * self.window_frames

    @property
    def window_seconds(self) -> float:
        """Duration of a window in seconds."""
        return self.window_samples / SAMPLE_RATE


@dataclass(frozen=True)
class SpeechFraming:
    """Frame counts of the speech alone, the last frame counted in full."""

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 300 for 3 s."""
        return -(-samples // HOP_SAMPLES)

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 150 for 3 s."""
        return -(-self.feature_length(samples) // STRIDE)

    @property
    def encoder_hop(self) -> int:
        """Samples per encoder frame: 20 ms."""
        return STRIDE * HOP_SAMPLES

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the time in seconds of the middle of an encoder frame's context."""
        return frame * self.encoder_hop / SAMPLE_RATE


@dataclass(frozen=True)
class WindowFraming(SpeechFraming):
    """Frame counts of a window, however short the speech in it."""

    shape: WhisperShape

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames: 3000 for a window of 30 s."""
        # `0 * samples` keeps the type and shape of an array of lengths.
        return 0 * samples + self.shape.window_frames

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames: 1500 for a window of 30 s."""
        return 0 * samples + self.shape.source_positions


# --------------------
# Blocks of Whisper (Radford et al., 2022): pre-norm Transformer blocks without dropout, as OpenAI's model reads.


class Subsampling(torch.nn.Module):
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
        self.query = torch.nn.Linear(d_model, d_model)
        self.key = torch.nn.Linear(d_model, d_model, bias=False)
        self.value = torch.nn.Linear(d_model, d_model)
        self.output = torch.nn.Linear(d_model, d_model)

    def forward(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend from x to encoded frames or, without these, to x; if causal, only to earlier tokens and itself."""
        key, value = self.keys_and_values(x if encoded is None else encoded)
        return self.attend(self.query(x), key, value, key_mask, is_causal)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Attend from projected queries (B, T, D) over given keys and values (B, H, S, E): (B, T, D)."""
        attended = self.attend_heads(self.split_heads(query), key, value, key_mask, is_causal)
        return self.output(attended.transpose(1, 2).flatten(2))

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attend from queries (B, H, T, E) over keys and values (B, H, S, E): (B, H, T, E)."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, is_causal=is_causal)

    def scores(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the scores (B, H, T, S) over keys (B, H, S, E), before the softmax."""
        query = self.split_heads(self.query(x))
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def keys_and_values(self, encoded: torch.Tensor) -> KeysAndValues:
        """Return keys and values of encoded (B, S, D), each (B, H, S, E)."""
        return self.split_heads(self.key(encoded)), self.split_heads(self.value(encoded))

    def step(self, x: torch.Tensor, past: torch.Tensor, length: int) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones.

        `past` (2, R, H, U, E) holds the earlier tokens' keys and values; the new token's are written to it.
        """
        key, value = self.keys_and_values(x)
        past[0, :, :, length] = key[:, :, 0]
        past[1, :, :, length] = value[:, :, 0]
        keys, values = past[:, :, :, : length + 1]
        return self.attend(self.query(x), keys, values)

    def split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Return projected (B, T, D) as (B, H, T, E)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(torch.nn.Module):
    """Feed-forward module, (B, T, D) -> (B, T, D), with its norm; GELU is exact."""

    def __init__(self, d_model: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = torch.nn.Linear(d_model, inner)
        self.contract = torch.nn.Linear(inner, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(self.norm(x))))


class EncoderBlock(torch.nn.Module):
    """Encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(shape.d_model)
        self.self_attention = Attention(shape.d_model, shape.attention_heads)
        self.feedforward = FeedForward(shape.d_model, shape.feedforward_dim)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attention(self.self_attention_norm(x), key_mask=key_mask)
        x = x + self.feedforward(x)
        return x


class DecoderBlock(torch.nn.Module):
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
        x = x + self.self_attention(self.self_attention_norm(x), is_causal=True)
        x = x + self.cross_attention(self.cross_attention_norm(x), encoded, encoded_mask)
        x = x + self.feedforward(x)
        return x

    def with_scores(self, x: torch.Tensor, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `forward` and the cross-attention scores (B, H, T, S), before the softmax."""
        x = x + self.self_attention(self.self_attention_norm(x), is_causal=True)
        normed = self.cross_attention_norm(x)
        key, value = self.cross_attention.keys_and_values(encoded)
        scores = self.cross_attention.scores(normed, key)
        x = x + self.cross_attention.attend(self.cross_attention.query(normed), key, value)
        return x + self.feedforward(x), scores

    def step(
        self,
        x: torch.Tensor,
        past: torch.Tensor,
        length: int,
        cross_kv: KeysAndValues,
        encoded_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per utterance -> (B, K, D).

        `past` (2, B, K, H, U, E) holds keys and values of the `length` tokens before.
        """
        # Hypotheses have their own past, so self-attention has B K rows of one token. All K attend to the same encoded
        # frames, as K tokens of one sequence would.
        rows = self.self_attention_norm(x).flatten(0, 1)[:, None]
        x = x + self.self_attention.step(rows, past.flatten(1, 2), length).view_as(x)
        query = self.cross_attention.query(self.cross_attention_norm(x))
        x = x + self.cross_attention.attend(query, *cross_kv, encoded_mask)
        return x + self.feedforward(x)
