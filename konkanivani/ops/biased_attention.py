"""Attention with a bias of the scores, computed in chunks of queries, forward and backward.

PyTorch's kernels that need no (B, H, T, S) scores in memory take no bias that has a gradient, so that T5's attention
would keep several such tensors: 28 MiB each for 8 x 384 tokens and 6 heads. Here the scores of one chunk exist at a
time, small enough for a CPU's cache; the backward pass recomputes them, and keeps the inputs only.

B batch, H heads, T queries, S keys, E head width, C queries of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.models.t5.model import Attention
from konkanivani.models.twin import replace_modules
from konkanivani.ops.products import without_autocast

SCORE_NUMBERS = 2**20  # of a chunk: 4 MiB in fp32
MIN_QUERIES = 32
CAUSAL_QUERIES = 96  # fewer waste less of the scores after the query, and take longer to launch


class ChunkedAttention(Attention):
    """Twin of T5's attention, computed by `biased_attention`."""

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if query.shape[2] == 1:  # a step of a search
            return super().attend_heads(query, key, value, bias, key_mask)
        return biased_attention(query, key, value, bias, key_mask, self.is_causal)


def biased_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return softmax(query keyᵀ + bias) value (B, H, T, E), for queries (B, H, T, E) and keys and values (B, H, S, E).

    Args:
        bias: (1, H, T, S), or None.
        key_mask: (B, 1, 1, S), True for keys that are attended to, or None.
        is_causal: the bias is -inf for keys after the query, whose scores are not computed.
    """
    # Projected tensors are transposed views, whose products would copy them once per chunk.
    inputs = query.contiguous(), key.contiguous(), value.contiguous()
    return _BiasedAttention.apply(*inputs, bias, key_mask, is_causal)


def use_chunked_attention(model: torch.nn.Module) -> None:
    """Replace T5's attention by twins that compute it in chunks."""
    replace_modules(model, {Attention: ChunkedAttention})


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a batch, some of their queries, and the keys that these attend to."""

    rows: slice
    queries: slice
    keys: slice

    def weights(
        self, query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention weights (b, H, C, S): the softmax of the scores."""
        scores = query[self.rows, :, self.queries] @ key[self.rows, :, self.keys].mT
        if bias is not None:
            part = bias[:, :, self.queries, self.keys]
            # In half precision the sum is in the bias' precision, as in the published models.
            scores = scores.add_(part) if scores.dtype == part.dtype else scores + part
        if key_mask is not None:
            scores = scores.masked_fill_(~key_mask[self.rows, :, :, self.keys], -torch.inf)
        return F.softmax(scores, dim=-1)


def _chunks(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Iterator[_Chunk]:
    """Yield chunks of about `SCORE_NUMBERS` scores; if causal, of `CAUSAL_QUERIES` queries at most."""
    batch, heads, queries, _ = query.shape
    width = heads * key.shape[2]
    count = min(queries, max(MIN_QUERIES, SCORE_NUMBERS // width))
    if is_causal:
        count = min(count, CAUSAL_QUERIES)
    rows = max(1, SCORE_NUMBERS // (width * count))
    # A plan's tensors without data are of a subclass: chunks of one shape take the same memory, and one of each is run.
    is_traced = type(query) is not torch.Tensor
    traced: set[tuple[int, int, int]] = set()
    for first_row in range(0, batch, rows):
        for first in range(0, queries, count):
            end = min(first + count, queries)
            keys = end if is_causal else key.shape[2]
            shape = min(rows, batch - first_row), end - first, keys
            if is_traced and shape in traced:
                continue
            traced.add(shape)
            yield _Chunk(slice(first_row, first_row + rows), slice(first, end), slice(0, keys))


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        key_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, bias, key_mask)
        ctx.is_causal = is_causal
        out = torch.empty_like(query)
        for chunk in _chunks(query, key, is_causal):
            weights = chunk.weights(query, key, bias, key_mask)
            out[chunk.rows, :, chunk.queries] = weights.to(value.dtype) @ value[chunk.rows, :, chunk.keys]
        return out

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, bias, key_mask = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for chunk in _chunks(query, key, ctx.is_causal):
            rows, queries, keys = chunk.rows, chunk.queries, chunk.keys
            weights = chunk.weights(query, key, bias, key_mask)
            grad_out = gradient[rows, :, queries]
            grad_value[rows, :, keys] += weights.to(value.dtype).mT @ grad_out
            grad_weights = (grad_out @ value[rows, :, keys].mT).to(weights.dtype)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            if grad_bias is not None:
                grad_bias[:, :, queries, keys] += grad_scores.sum(0, keepdim=True)
            grad_scores = grad_scores.to(query.dtype)
            grad_query[rows, :, queries] = grad_scores @ key[rows, :, keys]
            grad_key[rows, :, keys] += grad_scores.mT @ query[rows, :, queries]
        return grad_query, grad_key, grad_value, grad_bias, None, None
