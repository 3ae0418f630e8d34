"""Multi-head attention with rotary positions on torch's scaled_dot_product_attention.

B batch, T query frames, S key frames, D model width, H heads, E = D / H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import Lengths
from konkanivani.model.linear import Linear, linear_of

Positions = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class FrameLayout:
    """How the T frames, or tokens, of x (B, T, D) lie, the same for all blocks of a stack.

    `padding` (B, T) is True beyond an utterance's end, None where nothing is; with `lengths`, which add up to T, the
    frames of B = 1 are spans of so many, of an utterance each.
    """

    positions: Positions
    padding: torch.Tensor | None = None
    lengths: Lengths | None = None

    @property
    def key_mask(self) -> torch.Tensor | None:
        """(B, 1, 1, T), True where attention may see a key; None where it may see all."""
        return None if self.padding is None else ~self.padding[:, None, None, :]


class RotaryPositions(torch.nn.Module):
    """Cosines and sines (T, E / 2) for rotary position embedding (Su et al., 2021), base 10000, computed on demand.

    Nothing is stored: the tables take a thousandth of a block's time and would otherwise limit the length.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=dtype) / self.head_dim
        angles = torch.arange(length, device=like.device, dtype=dtype)[:, None] * (10_000.0**-exponents)[None, :]
        return angles.cos(), angles.sin()


class _Turned(torch.autograd.Function):
    """Queries, keys and values (B, H, T, E) of projected (B, T, 3 D), in its memory, the first two turned in place.

    So nothing is kept twice, and the three gradients are laid into one tensor as they are turned back.
    """

    @staticmethod
    def forward(
        ctx, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cosines, sines)
        return _split(_turn(projected, cosines, sines, heads), heads)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        batch, heads, length, width = gradients[0].shape
        by_projected = gradients[0].new_empty(batch, length, 3, heads, width)
        _turn_back_into(by_projected, gradients, cosines, sines)
        return by_projected.flatten(2), None, None, None


class _AttendedSpans(torch.autograd.Function):
    """Attention within each of the spans of `lengths` frames of projected (1, N, 3 D), which is turned in place.

    (1, N, D), by PyTorch's own kernels for a CPU (its scaled_dot_product_attention without a mask takes the same), each
    span's output laid into its place of one tensor, and its gradients too: autograd would keep every output twice.
    """

    @staticmethod
    def forward(
        ctx, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, lengths: Lengths
    ) -> torch.Tensor:
        _turn(projected, cosines, sines, heads)
        attended = projected.new_empty(1, projected.shape[1], projected.shape[2] // 3)
        ctx.heads, ctx.lengths, ctx.normalizers = heads, lengths, []
        for span, room in zip(projected.split(lengths, dim=1), attended.split(lengths, dim=1), strict=True):
            found, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_split(span, heads))
            room.copy_(found.transpose(1, 2).flatten(2))
            ctx.normalizers.append(normalizer)
        ctx.save_for_backward(projected, attended, cosines, sines)
        return attended

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, attended, cosines, sines = ctx.saved_tensors
        by_projected = torch.empty_like(projected)
        wholes = projected, attended, gradient, cosines[None], sines[None], by_projected
        for number, parts in enumerate(zip(*(whole.split(ctx.lengths, dim=1) for whole in wholes), strict=True)):
            span, found, by_found, turned_by, turned_up, room = parts
            by_found, found = (part.unflatten(2, (ctx.heads, -1)).transpose(1, 2) for part in (by_found, found))
            by_parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                by_found, *_split(span, ctx.heads), found, ctx.normalizers[number], 0.0, False
            )
            _turn_back_into(room.unflatten(2, (3, ctx.heads, -1)), by_parts, turned_by[0], turned_up[0])
        return by_projected, None, None, None, None


def _split(projected: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values (B, H, T, E), views of projected (B, T, 3 D)."""
    return projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _turn_back_into(
    room: torch.Tensor, gradients: Sequence[torch.Tensor], cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Lays gradients by turned queries and keys, turned back, and by values (B, H, T, E) into room (B, T, 3, H, E)."""
    by_query, by_key, by_value = (gradient.transpose(1, 2) for gradient in gradients)
    _turn_into(room[:, :, 0], by_query, cosines, -sines)
    _turn_into(room[:, :, 1], by_key, cosines, -sines)
    room[:, :, 2].copy_(by_value)


def _turn_into(room: torch.Tensor, vectors: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Writes vectors (B, T, H, E) turned by their positions' angles into `room`, which is as large."""
    cosines, sines = (table.to(vectors.dtype)[:, None, :] for table in (cosines, sines))
    (first, second), (to_first, to_second) = vectors.chunk(2, dim=-1), room.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines)


def _turn(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> torch.Tensor:
    """Turns the queries and keys of projected (B, T, 3 D), in place, and returns it."""
    queries_and_keys = projected.unflatten(-1, (3, heads, -1))[:, :, :2]
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    first, second = queries_and_keys.chunk(2, dim=-1)
    turned = (first * cosines).addcmul_(second, sines, value=-1)
    second.mul_(cosines).addcmul_(first, sines)
    first.copy_(turned)
    return projected


def _turned(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> torch.Tensor:
    """What `_turn` makes of projected (B, T, 3 D), as a new tensor: in an exported graph nothing changes in place."""
    query_key_value = projected.unflatten(-1, (3, heads, -1))
    queries_and_keys, values = query_key_value.split((2, 1), dim=2)
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    first, second = queries_and_keys.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return torch.cat([turned, values], dim=2).flatten(2)


class SelfAttention(torch.nn.Module):
    """(B, T, D) -> (B, T, D): rotary self-attention that sees no padding; each span sees itself alone."""

    def __init__(self, d_model: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value = Linear(d_model, 3 * d_model)
        self.output = Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, norm: torch.nn.LayerNorm, layout: FrameLayout) -> torch.Tensor:
        if layout.lengths:
            return self.output(self._attended_spans(x, norm, layout.positions, layout.lengths))
        attended = F.scaled_dot_product_attention(
            *self._projected(x, norm, layout.positions), attn_mask=layout.key_mask, is_causal=self.causal
        )
        return self.output(attended.transpose(1, 2).flatten(2))

    def step(
        self, x: torch.Tensor, norm: torch.nn.LayerNorm, position: Positions, kept: torch.Tensor, length: int
    ) -> torch.Tensor:
        """The last token's (R, 1, D) alone, after `length` others; its position's cosines and sines are (1, E / 2).

        `kept` (2, R, H, U, E) holds the others' keys and values, and is given this one's.
        """
        query, *key_and_value = self._projected(x, norm, position)
        for room, vectors in zip(kept, key_and_value, strict=True):
            room[:, :, length] = vectors[:, :, 0]
        key, value = kept[:, :, :, : length + 1]
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _projected(self, x: torch.Tensor, norm: torch.nn.LayerNorm, positions: Positions) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each (B, H, T, E), the first two turned by their positions."""
        projected = linear_of(x, self.query_key_value, norm)
        if torch.compiler.is_exporting():
            return _split(_turned(projected, *positions, self.heads), self.heads)
        if torch.is_grad_enabled():
            return _Turned.apply(projected, *positions, self.heads)
        return _split(_turn(projected, *positions, self.heads), self.heads)

    def _attended_spans(
        self, x: torch.Tensor, norm: torch.nn.LayerNorm, positions: Positions, lengths: Lengths
    ) -> torch.Tensor:
        return _AttendedSpans.apply(linear_of(x, self.query_key_value, norm), *positions, self.heads, lengths)


class CrossAttention(torch.nn.Module):
    """(B, T, D) over encoded (B, S, D) -> (B, T, D), without positions; `key_mask` (B, 1, 1, S) as FrameLayout's."""

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
        """Those of encoded (B, S, D), each (B, H, S, E): they depend on no token."""
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
        """(B, T, D) -> (B, T, D) over given keys and values."""
        batch, length, width = x.shape
        query = linear_of(x, self.query, norm).view(batch, length, self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask)
        return self.output(attended.transpose(1, 2).reshape(batch, length, width))
