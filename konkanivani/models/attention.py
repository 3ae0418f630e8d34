"""Multi-head attention (Vaswani et al., 2017) with rotary or relative positions.

B batch, T query frames, S key frames, P distances, D model width, H heads, E = D / H head width.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.lengths import CHUNK_FRAMES, BatchLengths, Lengths, padding_or_none

Positions = tuple[torch.Tensor, ...]
"""Position tables of attention: rotary cosines and sines of each position, or one table of relative distances."""


@dataclass(frozen=True)
class SequenceLayout:
    """Layout of the T frames or tokens of x (B, T, D), the same for all blocks of a stack.

    `padding` (B, T) is True after an utterance's end, None if no utterance is padded. `chunk_frames` is the longest
    sequence that the passes of ops/chunks.py compute in one piece.
    """

    positions: Positions = ()
    padding: torch.Tensor | None = None
    chunk_frames: int = CHUNK_FRAMES

    # Computed once for all blocks: attention would launch four kernels per block for it.
    @functools.cached_property
    def score_mask(self) -> torch.Tensor | None:
        """(B, 1, 1, T), 0 for keys that are attended to, -inf for others; None if all are attended to."""
        if self.padding is None:
            return None
        dtype = self.positions[0].dtype if self.positions else torch.float32
        return score_mask_of(~self.padding[:, None, None, :], dtype)


UNPADDED = SequenceLayout()


def key_mask_of(keys: torch.Tensor, lengths: BatchLengths) -> torch.Tensor | None:
    """Return the key mask (B, 1, 1, S) of keys (B, S, D), True for keys that are attended to; None if all are."""
    padding = padding_or_none(lengths, keys.shape[1], keys.device)
    return None if padding is None else ~padding[:, None, None, :]


def score_mask_of(key_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a key mask as numbers to add to the scores: 0 for keys that are attended to, -inf for others."""
    return torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device).masked_fill_(~key_mask, -torch.inf)


def score_mask_for(inputs: torch.Tensor, keys: torch.Tensor, lengths: BatchLengths) -> torch.Tensor | None:
    """Return the score mask of keys (B, S, D) for attention whose queries are projected from `inputs`, or None."""
    key_mask = key_mask_of(keys, lengths)
    return None if key_mask is None else score_mask_of(key_mask, dtype_of_products(inputs))


def dtype_of_products(like: torch.Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output: autocast's if it is on, else that of its input `like`."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


class RotaryPositions(torch.nn.Module):
    """Rotary position embedding (Su et al., 2021): cosines and sines (T, E / 2), base 10000.

    Computed on demand: the tables take a thousandth of a block's time, and stored ones would limit the length.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, length: int, like: torch.Tensor) -> Positions:
        # In half precision neighbouring positions of a long utterance would have the same angle.
        dtype = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=dtype) / self.head_dim
        # theta_i = 10000^(-2 i / E) (Su et al., 2021, section 3.2.2).
        angles = torch.arange(length, device=like.device, dtype=dtype)[:, None] * (10_000.0**-exponents)[None, :]
        # In the dtype in which they are multiplied: each block would cast them.
        multiplied = dtype_of_products(like)
        return angles.cos().to(multiplied), angles.sin().to(multiplied)

    def of_spans(self, lengths: Lengths, like: torch.Tensor) -> Positions:
        """Return the tables of concatenated spans of these lengths; positions restart at 0 in each span."""
        tables = self(max(lengths), like)
        return tuple(torch.cat([table[:length] for length in lengths]) for table in tables)


class RelativePositions(torch.nn.Module):
    """Sinusoidal embeddings (2 T - 1, D) of the distances T - 1, ..., -(T - 1), base 10000, computed on demand."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, length: int, like: torch.Tensor) -> Positions:
        dtype = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.d_model, 2, device=like.device, dtype=dtype) / self.d_model
        distances = torch.arange(length - 1, -length, -1, device=like.device, dtype=dtype)
        angles = distances[:, None] * (10_000.0**-exponents)[None, :]
        # Sines and cosines alternate along D, as in NeMo's weights.
        return (torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1),)

    def of_spans(self, lengths: Lengths, like: torch.Tensor) -> Positions:
        """Return the longest span's table; a shorter span uses the middle of it."""
        return self(max(lengths), like)


def rotate(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return projected (B, T, 3, H, E) with queries and keys rotated by their positions' angles, as a new tensor."""
    queries_and_keys, values = projected.split((2, 1), dim=2)
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    # Component i is paired with i + E / 2, not with its neighbour: the same up to a permutation of the weights.
    first, second = queries_and_keys.chunk(2, dim=-1)
    rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return torch.cat([rotated, values], dim=2)


class SelfAttention(torch.nn.Module):
    """Self-attention with rotary positions, (B, T, D) -> (B, T, D); padding is masked."""

    def __init__(self, d_model: int, heads: int, causal: bool, biases: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query_key_value = torch.nn.Linear(d_model, 3 * d_model, bias=biases)
        self.output = torch.nn.Linear(d_model, d_model, bias=biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        return self.attend(self.query_key_value(x), layout)

    def attend(self, projected: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return the attention (B, T, D) of projected queries, keys and values (B, T, 3 D)."""
        query, key, value = self.split_heads(projected, layout.positions)
        mask = None if layout.score_mask is None else layout.score_mask.to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.output(attended.transpose(1, 2).flatten(2))

    def step(self, x: torch.Tensor, position: Positions, past: torch.Tensor, length: int) -> torch.Tensor:
        """Attend from the newest token (R, 1, D) alone, after `length` earlier ones.

        Args:
            position: cosines and sines of the token's position, each (1, E / 2).
            past: keys and values (2, R, H, U, E) of the earlier tokens; the new token's are written to it.
        """
        query, key, value = self.split_heads(self.query_key_value(x), position)
        past[0, :, :, length] = key[:, :, 0]
        past[1, :, :, length] = value[:, :, 0]
        keys, values = past[:, :, :, : length + 1]
        attended = F.scaled_dot_product_attention(query, keys, values)  # no mask: all cached keys are in the past
        return self.output(attended.transpose(1, 2).flatten(2))

    def split_heads(self, projected: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, each (B, H, T, E); queries and keys are rotated by their positions."""
        rotated = rotate(projected.unflatten(-1, (3, self.heads, -1)), *positions)
        return rotated.permute(2, 0, 3, 1, 4).unbind()


class CrossAttention(torch.nn.Module):
    """Cross-attention of (B, T, D) over encoded (B, S, D) -> (B, T, D), without positions.

    `key_mask` (B, 1, 1, S) is True for keys that are attended to, or a score mask as in `SequenceLayout`.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = torch.nn.Linear(d_model, d_model)
        self.key_value = torch.nn.Linear(d_model, 2 * d_model)
        self.output = torch.nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        return self.attend(self.query(x), *self.keys_and_values(encoded), key_mask)

    def keys_and_values(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of encoded (B, S, D), each (B, H, S, E), which decoding computes once."""
        key, value = self.key_value(encoded).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return key, value

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend from projected queries (B, T, D) over given keys and values (B, H, S, E): (B, T, D)."""
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask)
        return self.output(attended.transpose(1, 2).flatten(2))


class SeparateProjections(torch.nn.Module):
    """Base of Whisper's and T5's attention, whose queries, keys and values have a projection each.

    The families differ in the scores: scale, mask and bias.
    """

    def __init__(
        self, heads: int, query: torch.nn.Linear, key: torch.nn.Linear, value: torch.nn.Linear, output: torch.nn.Linear
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = query
        self.key = key
        self.value = value
        self.output = output

    def split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Return projected (B, T, H E) as (B, H, T, E)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def join_heads(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the output projection (B, T, D) of attended (B, H, T, E)."""
        return self.output(attended.transpose(1, 2).flatten(2))

    def keys_and_values(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of encoded (B, S, D), each (B, H, S, E)."""
        return self.split_heads(self.key(encoded)), self.split_heads(self.value(encoded))

    def cached_keys_and_values(
        self, x: torch.Tensor, past: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each (R, H, `length` + 1, E), of the newest token (R, 1, D) and of earlier ones.

        `past` (2, R, H, U, E) contains the keys and values of `length` earlier tokens; the new token's are added to it.
        """
        key, value = self.keys_and_values(x)
        past[0, :, :, length] = key[:, :, 0]
        past[1, :, :, length] = value[:, :, 0]
        keys, values = past[:, :, :, : length + 1]
        return keys, values


class RelativeSelfAttention(torch.nn.Module):
    """Self-attention with relative positions, (B, T, D) -> (B, T, D); padding is masked.

    As in Transformer-XL and NeMo's Conformers. Query i scores key j by ((q + u) k + (q + v) W r(i - j)) / sqrt(E) (Dai
    et al., 2019, section 3.3): u and v (D,) are biases of content and of position, W is a matrix and r(i - j) the
    sinusoidal embedding of a distance.
    """

    def __init__(self, d_model: int, heads: int, biases: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = torch.nn.Linear(d_model, 3 * d_model, bias=biases)
        self.position = torch.nn.Linear(d_model, d_model, bias=False)
        self.content_bias = torch.nn.Parameter(torch.zeros(d_model))
        self.position_bias = torch.nn.Parameter(torch.zeros(d_model))
        self.output = torch.nn.Linear(d_model, d_model, bias=biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        return self.attend(self.query_key_value(x), layout)

    def attend(self, projected: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return the attention (B, T, D) of projected queries, keys and values (B, T, 3 D)."""
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = self.attend_heads(query, key, value, self.position(*layout.positions), layout)
        return self.output(attended.transpose(1, 2).flatten(2))

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        distances: torch.Tensor,
        layout: SequenceLayout,
    ) -> torch.Tensor:
        """Attend from queries over keys and values, each (B, H, T, E), with `distances` W r (2 T - 1, D)."""
        return attend_by_distance(query, distances, key, value, self.content_bias, self.position_bias, layout.padding)


def attend_by_distance(
    query: torch.Tensor,
    distances: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    content_bias: torch.Tensor,
    position_bias: torch.Tensor,
    padding: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of queries (B, H, N, E) over keys and values (B, H, T, E): (B, H, N, E).

    Args:
        distances: projected embeddings W r (N + T - 1, D), from the distance of the last query to the first key down
            to the distance of the first query to the last key.
        padding: (B, T), True for keys to be masked.
    """
    # In at least fp32 whatever the autocast: the scores leave the range of fp16.
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        full = [vectors.to(dtype) for vectors in (query, key, value)]
        heads = query.shape[1]
        width = query.shape[3]
        by_content, by_position = (
            full[0] + bias.to(dtype).view(heads, 1, width) for bias in (content_bias, position_bias)
        )
        by_distance = distances.to(dtype).view(-1, heads, width).permute(1, 2, 0)
        bias = shift_to_keys((by_position * width**-0.5) @ by_distance, key.shape[2])
        if padding is not None:
            bias = bias.masked_fill(padding[:, None, None, :], -torch.inf)
        # Not SDPA: with a bias that needs a gradient it uses its math path, which also checks each row for a missing
        # key.
        query_rows, key_rows, value_rows = (part.flatten(0, 1) for part in (by_content, *full[1:]))
        # The position term is the addend of the content product, so the two are never held separately.
        scores = torch.baddbmm(bias.flatten(0, 1), query_rows, key_rows.mT, alpha=width**-0.5)
        attended = (scores.softmax(-1) @ value_rows).view_as(query)
    return attended.to(query.dtype)


def shift_to_keys(scores: torch.Tensor, keys: int) -> torch.Tensor:
    """Turn scores by distance (B, H, N, P), P = N + T - 1, into scores by key (B, H, N, T).

    The relative shift of Dai et al. (2019, appendix B), as a view.
    """
    # The score of query n and key t is in column N - 1 - n + t. In flat memory that is n P + N - 1 - n + t
    # = n (P - 1) + (N - 1) + t: rows of P - 1 columns that start N - 1 numbers later.
    queries, distances = scores.shape[2:]
    if queries == 1:
        return scores
    return scores.flatten(2)[:, :, queries - 1 : -1].unflatten(2, (queries, distances - 1))[..., :keys]
