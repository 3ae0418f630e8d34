"""Self-attention with relative positions, as in Transformer-XL (Dai et al., 2019) and NeMo's Conformers.

B batch, T frames, N queries of a chunk, P distances, D model width, H heads, E = D / H head width.
"""

import torch

from konkanivani.base.lengths import SMALL_CHUNK_FRAMES, Lengths
from konkanivani.model.attention import Positions, SequenceLayout, project_heads
from konkanivani.model.kernels.products import Linear
from konkanivani.model.kernels.recompute import run_recomputed


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


class RelativeSelfAttention(torch.nn.Module):
    """Self-attention with relative positions, (B, T, D) -> (B, T, D); padding is masked, spans do not see each other.

    Query i scores key j by ((q + u) k + (q + v) W r(i - j)) / sqrt(E) (Dai et al., 2019, section 3.3): u and v (D,) are
    biases of content and of position, W is a matrix and r(i - j) the sinusoidal embedding of a distance.

    Memory: of all tensors with a number per pair of frames, only the softmax is kept for the backward pass, up to
    `chunk_frames`; for longer utterances nothing is, and chunks of queries are recomputed. At most `chunk_frames`
    squared numbers per head exist at a time, or, for an hour of speech, the scores of a hundred queries.
    """

    def __init__(self, d_model: int, heads: int, biases: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = Linear(d_model, 3 * d_model, bias=biases)
        self.position = Linear(d_model, d_model, bias=False)
        self.content_bias = torch.nn.Parameter(torch.zeros(d_model))
        self.position_bias = torch.nn.Parameter(torch.zeros(d_model))
        self.output = Linear(d_model, d_model, bias=biases)

    def forward(self, x: torch.Tensor, norm: torch.nn.LayerNorm, layout: SequenceLayout) -> torch.Tensor:
        projected = project_heads(x, self.query_key_value, norm, self.heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        distances = self.position(*layout.positions)
        lengths = layout.lengths
        if not lengths:
            return self.output(self._attend(queries, keys, values, distances, layout).transpose(1, 2).flatten(2))
        attended = []
        longest = max(lengths)
        spans = (vectors.split(lengths, dim=2) for vectors in (queries, keys, values))
        for query, key, value in zip(*spans, strict=True):
            length = query.shape[2]
            # Distances length - 1, ..., -(length - 1): the middle of the longest span's table.
            near = distances[longest - length : longest + length - 1]
            attended.append(self._attend(query, key, value, near, layout))
        return self.output(torch.cat(attended, dim=2).transpose(1, 2).flatten(2))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        distances: torch.Tensor,
        layout: SequenceLayout,
    ) -> torch.Tensor:
        """Attend from queries (B, H, T, E), a chunk at a time, over keys and values: (B, H, T, E)."""
        length = query.shape[2]
        most = layout.chunk_frames
        others = key, value, self.content_bias, self.position_bias, layout.padding
        if length <= most:
            return attend_by_distance(query, distances, *others)
        pieces = []
        first = 0
        # chunk x length is at most most^2 scores, but a chunk has at least SMALL_CHUNK_FRAMES queries.
        for chunk in query.split(max(most**2 // length, min(most, SMALL_CHUNK_FRAMES)), dim=2):
            # Distances of this chunk's queries: from its last query to key 0, down to its first query to the last key.
            end = first + chunk.shape[2]
            near = distances[length - end : 2 * length - 1 - first]
            pieces.append(run_recomputed(attend_by_distance, chunk, near, *others))
            first = end
        return torch.cat(pieces, dim=2)


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
        bias = shifted((by_position * width**-0.5) @ by_distance, key.shape[2])
        if padding is not None:
            bias = bias.masked_fill(padding[:, None, None, :], -torch.inf)
        # Not SDPA: with a bias that needs a gradient it uses its math path, which also checks each row for a missing
        # key.
        query_rows, key_rows, value_rows = (part.flatten(0, 1) for part in (by_content, *full[1:]))
        # The position term is the addend of the content product, so the two are never held separately.
        scores = torch.baddbmm(bias.flatten(0, 1), query_rows, key_rows.mT, alpha=width**-0.5)
        attended = (scores.softmax(-1) @ value_rows).view_as(query)
    return attended.to(query.dtype)


def shifted(scores: torch.Tensor, keys: int) -> torch.Tensor:
    """Turn scores by distance (B, H, N, P), P = N + T - 1, into scores by key (B, H, N, T).

    The relative shift of Dai et al. (2019, appendix B), as a view.
    """
    # The score of query n and key t is in column N - 1 - n + t. In flat memory that is n P + N - 1 - n + t
    # = n (P - 1) + (N - 1) + t: rows of P - 1 columns that start N - 1 numbers later.
    queries, distances = scores.shape[2:]
    if queries == 1:
        return scores
    return scores.flatten(2)[:, :, queries - 1 : -1].unflatten(2, (queries, distances - 1))[..., :keys]
