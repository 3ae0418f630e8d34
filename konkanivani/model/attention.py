"""Multi-head attention (Vaswani et al., 2017) with rotary positions, on torch's scaled_dot_product_attention.

B batch, T query frames, S key frames, D model width, H heads, E = D / H head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import CHUNK_FRAMES, Lengths, padding_mask
from konkanivani.model.kernels.products import Linear, fused_linear
from konkanivani.model.kernels.rotary import VarlenAttention

Positions = tuple[torch.Tensor, ...]
"""Position tables of attention: rotary cosines and sines of each position, or one table of relative distances."""


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of the T frames or tokens of x (B, T, D): positions and padding, the same for all blocks of a stack.

    `padding` (B, T) is True after an utterance's end, None if no utterance is padded. If `lengths` is given, B = 1 and
    the T frames are packed: spans of these lengths, which add up to T, one per utterance. `chunk_frames` bounds the
    memory of attention that holds a score for each pair of frames.
    """

    positions: Positions
    padding: torch.Tensor | None = None
    lengths: Lengths | None = None
    chunk_frames: int = CHUNK_FRAMES

    @property
    def key_mask(self) -> torch.Tensor | None:
        """(B, 1, 1, T), True for keys that are attended to; None if all are."""
        return None if self.padding is None else ~self.padding[:, None, None, :]


def key_mask_of(keys: torch.Tensor, lengths: Lengths) -> torch.Tensor | None:
    """Return the key mask (B, 1, 1, S) of keys (B, S, D), True for keys that are attended to; None if all are."""
    if min(lengths) == keys.shape[1]:
        return None
    return ~padding_mask(lengths, keys.shape[1], keys.device)[:, None, None, :]


class RotaryPositions(torch.nn.Module):
    """Rotary position embedding (Su et al., 2021): cosines and sines (T, E / 2), base 10000.

    Computed on demand: the tables take a thousandth of a block's time, and stored ones would limit the length.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In half precision neighbouring positions of a long utterance would have the same angle.
        dtype = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=dtype) / self.head_dim
        # theta_i = 10000^(-2 i / E) (Su et al., 2021, section 3.2.2).
        angles = torch.arange(length, device=like.device, dtype=dtype)[:, None] * (10_000.0**-exponents)[None, :]
        return angles.cos(), angles.sin()

    def of_spans(self, lengths: Lengths, like: torch.Tensor) -> Positions:
        """Return the tables of packed spans of these lengths; positions restart at 0 in each span."""
        tables = self(max(lengths), like)
        return tuple(torch.cat([table[:length] for length in lengths]) for table in tables)


def rotated(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return projected (B, T, 3, H, E) with queries and keys rotated by their positions' angles, as a new tensor."""
    queries_and_keys, values = projected.split((2, 1), dim=2)
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    # Component i is paired with i + E / 2, not with its neighbour: the same up to a permutation of the weights.
    first, second = queries_and_keys.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return torch.cat([turned, values], dim=2)


def project_heads(x: torch.Tensor, linear: Linear, norm: torch.nn.LayerNorm, heads: int) -> torch.Tensor:
    """Return queries, keys and values (B, T, 3, H, E) of norm(x) for x (B, T, D)."""
    return fused_linear(x, linear, norm).unflatten(-1, (3, heads, -1))


class SelfAttention(torch.nn.Module):
    """Self-attention with rotary positions, (B, T, D) -> (B, T, D); padding is masked, spans do not see each other."""

    def __init__(self, d_model: int, heads: int, causal: bool, biases: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query_key_value = Linear(d_model, 3 * d_model, bias=biases)
        self.output = Linear(d_model, d_model, bias=biases)

    def forward(self, x: torch.Tensor, norm: torch.nn.LayerNorm, layout: SequenceLayout) -> torch.Tensor:
        if layout.lengths:
            # Packed: one kernel call per span on a CPU, without a mask and without padding.
            projected = project_heads(x, self.query_key_value, norm, self.heads)
            return self.output(VarlenAttention.apply(projected, *layout.positions, layout.lengths))
        query, key, value = self._projected(x, norm, layout.positions)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.key_mask, is_causal=self.causal)
        return self.output(attended.transpose(1, 2).flatten(2))

    def step(
        self, x: torch.Tensor, norm: torch.nn.LayerNorm, position: Positions, kept: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones.

        Args:
            position: cosines and sines of the token's position, each (1, E / 2).
            kept: keys and values (2, R, H, U, E) of the earlier tokens; the new token's are written to it.
        """
        query, *key_and_value = self._projected(x, norm, position)
        for room, vectors in zip(kept, key_and_value, strict=True):
            room[:, :, length] = vectors[:, :, 0]
        key, value = kept[:, :, :, : length + 1]
        attended = F.scaled_dot_product_attention(query, key, value)  # no mask: all kept keys are in the past
        return self.output(attended.transpose(1, 2).flatten(2))

    def _projected(self, x: torch.Tensor, norm: torch.nn.LayerNorm, positions: Positions) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, each (B, H, T, E); queries and keys are rotated by their positions."""
        projected = rotated(project_heads(x, self.query_key_value, norm, self.heads), *positions)
        return projected.permute(2, 0, 3, 1, 4).unbind()


class CrossAttention(torch.nn.Module):
    """Cross-attention of (B, T, D) over encoded (B, S, D) -> (B, T, D), without positions.

    `key_mask` (B, 1, 1, S) as in `SequenceLayout`.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = Linear(d_model, d_model)
        self.key_value = Linear(d_model, 2 * d_model)
        self.output = Linear(d_model, d_model)

    def forward(
        self, x: torch.Tensor, norm: torch.nn.LayerNorm, encoded: torch.Tensor, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self.attend(x, norm, *self.keys_and_values(encoded), key_mask)

    def keys_and_values(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of encoded (B, S, D), each (B, H, S, E), which decoding computes once."""
        batch, frames, _ = encoded.shape
        key, value = self.key_value(encoded).view(batch, frames, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return key, value

    def attend(
        self,
        x: torch.Tensor,
        norm: torch.nn.LayerNorm,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from x (B, T, D) over given keys and values (B, H, S, E): (B, T, D)."""
        batch, length, width = x.shape
        query = fused_linear(x, self.query, norm).view(batch, length, self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))
