"""Computation in chunks, exact and with memory that grows linearly: CTC, subsampling, attention, cross entropy.

CTC includes the output layer. PyTorch's kernel keeps the forward variables of all frames, T' x (2 U + 1) numbers: 1 GB
for ten minutes of speech. Here only one chunk's forward variables exist at a time. Each chunk maps the forward
variables before it to the ones after it and is recomputed in the backward pass, so only the variables between chunks
are kept. With chunks of sqrt(T') frames, both the kept variables and one chunk's take sqrt(T') x (2 U + 1) numbers: 18
MB each at ten minutes, 260 MB at an hour, for which the encoder needs twenty times that.

The recursion is equations 6 and 7 of Graves et al. (2006), in log space.

B batch, T' encoder frames, C frames of a chunk, D model width, V vocabulary, U tokens, S = 2 U + 1 states: the tokens
with a blank before, between and after them; F mel bins, H heads, E = D / H head width. A row of forward variables has S
+ 2 columns: the first two stay impossible, so that the predecessors of all states are a shifted view.

Sequences longer than the layout's `chunk_frames` encoder frames or tokens are computed in chunks, one after another,
and recomputed in the backward pass; subsampling, attention and cross entropy too. A minute of speech is computed in one
piece.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from konkanivani.lengths import CHUNK_FRAMES, SMALL_CHUNK_FRAMES, BatchLengths, Lengths, on_host, subsampled_length
from konkanivani.models.asr import BLANK, Head, HeadLosses, at_least_float32, cross_entropy_sum
from konkanivani.models.attention import UNPADDED, RelativeSelfAttention, SequenceLayout, attend_by_distance
from konkanivani.models.conformer import PaddedSubsampling, Subsampling
from konkanivani.models.t5.model import Attention
from konkanivani.models.twin import replace_modules
from konkanivani.ops.packing import PackedRelativeSelfAttention
from konkanivani.ops.products import without_autocast
from konkanivani.ops.recompute import run_recomputed, snapshot_parameters

# --------------------
# CTC loss whose memory grows linearly with the utterance: exact, with the output layer included, in chunks of frames.


# log(0): finite, so that differences are never inf - inf, and far below the log probability of any path.
IMPOSSIBLE = -1e30


def long_ctc_losses(
    encoded: torch.Tensor, head: Head, encoded_lengths: Lengths, tokens: torch.Tensor, token_lengths: Lengths
) -> torch.Tensor:
    """Return the CTC losses (B,), in float64, of head(encoded) against the tokens; blank is 0.

    Equal to PyTorch's kernel, including an infinite loss if an utterance has too few frames for its tokens.

    Args:
        encoded: (B, T', D), with the lengths `encoded_lengths`.
        head: output layer, (B, C, D) -> logits (B, C, V).
        tokens: (B, U), with the lengths `token_lengths`.
    """
    states = interleave_blanks(tokens[:, : max(token_lengths)])
    skips = log_skips(states)
    # Double precision whatever the model's: after ten minutes a path's log probability is about -10^5, where float32
    # has steps of 0.008, and the rounding errors add up.
    log_alpha = torch.full((len(states), states.shape[1] + 2), IMPOSSIBLE, dtype=torch.float64, device=states.device)
    # Before the first frame all mass is on the first blank, whose successors are itself and the first token.
    log_alpha[:, 2] = 0.0
    # ceil(sqrt(T')): one chunk's forward variables then take the same memory as the ones kept between chunks.
    start = 0
    chunk = math.isqrt(encoded.shape[1] - 1) + 1
    for frames in encoded.split(chunk, dim=1):
        left = [min(max(0, length - start), frames.shape[1]) for length in encoded_lengths]
        log_alpha = run_recomputed(_advance_chunk, frames, head, states, skips, log_alpha, left)
        start += frames.shape[1]
    return _losses(log_alpha, token_lengths)


def interleave_blanks(tokens: torch.Tensor) -> torch.Tensor:
    """Insert blanks into tokens (B, U); return states (B, 2 U + 1)."""
    states = tokens.new_full((tokens.shape[0], 2 * tokens.shape[1] + 1), BLANK)
    states[:, 1::2] = tokens
    return states


def log_skips(states: torch.Tensor) -> torch.Tensor:
    """Return (B, S) float64: 0 if a state may follow the one two before it (a different token), else IMPOSSIBLE."""
    before = F.pad(states[:, :-2], (2, 0), value=BLANK)[:, : states.shape[1]]
    is_open = (states != BLANK) & (states != before)
    return torch.zeros_like(states, dtype=torch.float64).masked_fill_(~is_open, IMPOSSIBLE)


def _advance_chunk(
    frames: torch.Tensor,
    head: Head,
    states: torch.Tensor,
    skips: torch.Tensor,
    log_alpha: torch.Tensor,
    left: list[int],
) -> torch.Tensor:
    """Return the forward variables after the frames (B, C, D), given the ones before them."""
    logits = head(frames)  # in the precision of the caller's autocast; softmax and recursion are not
    with torch.autocast(logits.device.type, enabled=False):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=dtype).transpose(0, 1)
        _, after = ctc_chunk(log_probabilities, states, skips, log_alpha, left)
    return after


def _losses(log_alpha: torch.Tensor, token_lengths: Lengths) -> torch.Tensor:
    """Return the negative log likelihood (B,): the sum over all paths that end in the last token or the last blank."""
    ends = torch.tensor([(2 * length + 1, 2 * length + 2) for length in token_lengths])
    log_likelihood = log_alpha.gather(1, ends.to(log_alpha.device, non_blocking=True)).logsumexp(dim=1)
    # An unreachable end is IMPOSSIBLE plus some log probabilities, hence the margin of a half.
    return torch.where(log_likelihood < IMPOSSIBLE / 2, math.inf, -log_likelihood)


@torch.library.custom_op("konkanivani::ctc_chunk", mutates_args=())
def ctc_chunk(
    log_probabilities: torch.Tensor, states: torch.Tensor, skips: torch.Tensor, before: torch.Tensor, left: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log forward variables of each frame (C, B, S + 2) and after the last frame (B, S + 2), in float64.

    Args:
        log_probabilities: (C, B, V).
        states, skips: (B, S).
        before: forward variables before the chunk, (B, S + 2).
        left: number of frames of the chunk that belong to each utterance; after them its variables stay unchanged.
    """
    # A custom operator, so that a trace records one node and does not unroll the loop over frames.
    ends = _ends(left, log_probabilities)
    log_alphas = before.new_full((len(log_probabilities), *before.shape), IMPOSSIBLE)
    previous = before
    # Graves et al. (2006), eq. 6 and 7: alpha_t(s) = y_t(s) (alpha_t-1(s) + alpha_t-1(s-1) + [skip] alpha_t-1(s-2)).
    for frame, emissions in enumerate(log_probabilities):
        now = log_alphas[frame, :, 2:]
        torch.logaddexp(previous[:, 2:], previous[:, 1:-1], out=now)
        torch.logaddexp(now, previous[:, :-2] + skips, out=now)
        now += emissions.gather(1, states)
        if frame >= min(left):
            now.copy_(torch.where(ends > frame, now, previous[:, 2:]))
        previous = log_alphas[frame]
    return log_alphas, previous.clone()  # an operator's outputs must not alias each other


@ctc_chunk.register_fake
def _(log_probabilities, states, skips, before, left):
    return before.new_empty((len(log_probabilities), *before.shape)), torch.empty_like(before)


@torch.library.custom_op("konkanivani::ctc_chunk_backward", mutates_args=())
def ctc_chunk_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    states: torch.Tensor,
    skips: torch.Tensor,
    before: torch.Tensor,
    log_alphas: torch.Tensor,
    left: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients by the log probabilities (C, B, V) and by `before` (B, S + 2).

    `gradient` (B, S + 2) is the gradient by the forward variables after the last frame. A state's gradient is the
    posterior probability of passing through it. Going one frame back, it is divided among the state's predecessors in
    proportion to their share in the state's forward variable.
    """
    ends = _ends(left, log_probabilities)
    size = states.shape[1]
    by_log_probabilities = torch.zeros_like(log_probabilities)
    # Transitions out of state s: into s itself, into s + 1, into s + 2.
    transitions = torch.stack(
        [torch.zeros_like(skips), torch.zeros_like(skips), F.pad(skips[:, 2:], (0, 2))[:, :size]], dim=1
    )
    occupied = F.pad(gradient[:, 2:], (0, 2))
    reached = torch.full_like(before, IMPOSSIBLE)
    for frame in range(len(log_probabilities) - 1, -1, -1):
        previous = before if frame == 0 else log_alphas[frame - 1]
        emissions = log_probabilities[frame].gather(1, states)
        torch.sub(emissions, log_alphas[frame, :, 2:], out=reached[:, :size])
        # A share is at most 1; the clamp ensures it for impossible states too, so exp cannot overflow.
        shares = (_successors(reached) + previous[:, None, 2:] + transitions).clamp_(max=0.0).exp_()
        earlier = (shares * _successors(occupied)).sum(dim=1)
        now = occupied[:, :size].to(log_probabilities.dtype)
        if frame >= min(left):
            earlier = torch.where(ends > frame, earlier, occupied[:, :size])
            now = now * (ends > frame)
        by_log_probabilities[frame].scatter_add_(1, states, now)
        occupied[:, :size] = earlier
    return by_log_probabilities, F.pad(occupied[:, :size], (2, 0))


@ctc_chunk_backward.register_fake
def _(gradient, log_probabilities, states, skips, before, log_alphas, left):
    return torch.empty_like(log_probabilities), torch.empty_like(before)


def _successors(padded: torch.Tensor) -> torch.Tensor:
    """Return a view (B, 3, S) of (B, S + 2): columns s, s + 1 and s + 2 for each state s."""
    return padded.unfold(1, padded.shape[1] - 2, 1)


def _ends(left: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(left).to(like.device, non_blocking=True)[:, None]


def _keep(ctx, inputs, output) -> None:
    log_probabilities, states, skips, before, ctx.left = inputs
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradient of all forward variables
    ctx.save_for_backward(log_probabilities, states, skips, before, output[0])


def _backward(ctx, _gradient_of_alphas, gradient):
    by_log_probabilities, by_before = ctc_chunk_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.left)
    return by_log_probabilities, None, None, by_before, None


ctc_chunk.register_autograd(_backward, setup_context=_keep)


# --------------------
# Long sequences in chunks, so that memory does not grow with the square of the frames, with the same result.


GPU_CHUNK_FRAMES = 100  # encoder frames of a chunk on a GPU, where a full convolution copies its inputs ninefold


class ChunkedSubsampling(Subsampling):
    """Twin of `Subsampling`, whose first convolution computes sixteen numbers of each input."""

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        size = layout.chunk_frames
        if frames <= size:
            return super().forward(features, layout)
        # Frame t' sees features 4 t' to 4 t' + 6, so neighbouring chunks overlap by three features.
        spans = [(4 * start, 4 * min(start + size, frames) + 3) for start in range(0, frames, size)]
        subsample = partial(Subsampling.forward, snapshot_parameters(self))
        return torch.cat([run_recomputed(subsample, features[:, first:end], layout) for first, end in spans], dim=1)


class ChunkedPaddedSubsampling(PaddedSubsampling):
    """Twin of `PaddedSubsampling`."""

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        frames = subsampled_length(features.shape[1], self.kind)
        size = layout.chunk_frames
        if self.kind == "striding" and features.device.type == "cuda":
            size = min(size, GPU_CHUNK_FRAMES)
        if frames <= size:
            return super().forward(features, layout)
        pieces = []
        subsample = snapshot_parameters(self).subsample
        padding = layout.padding
        for start in range(0, frames, size):
            # Start one frame early and drop it: only that frame sees the zeros before the chunk.
            before = min(start, 1)
            span = slice(self.stride * (start - before), self.stride * (start + size))
            chunk_padding = None if padding is None else padding[:, span]
            pieces.append(run_recomputed(subsample, features[:, span], chunk_padding, before))
        return torch.cat(pieces, dim=1)

    def subsample(self, features: torch.Tensor, padding: torch.Tensor | None, before: int) -> torch.Tensor:
        """Return the subsampled frames of a chunk without the first `before` ones."""
        x = self.convolve(features, padding)
        return self.output(x[:, :, before:].transpose(1, 2).flatten(2))


class ChunkedRelativeSelfAttention(RelativeSelfAttention):
    """Twin of `RelativeSelfAttention` that attends from a chunk of queries at a time.

    Of all tensors with a number per pair of frames, only the softmax is kept for the backward pass, up to
    `chunk_frames`; for longer utterances nothing is, and chunks of queries are recomputed. At most `chunk_frames`
    squared numbers per head exist at a time, or, for an hour of speech, the scores of a hundred queries.
    """

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        distances: torch.Tensor,
        layout: SequenceLayout,
    ) -> torch.Tensor:
        length = query.shape[2]
        size = layout.chunk_frames
        if length <= size:
            return super().attend_heads(query, key, value, distances, layout)
        pieces = []
        first = 0
        shared = key, value, self.content_bias, self.position_bias, layout.padding
        # chunk x length is at most size^2 scores, but a chunk has at least SMALL_CHUNK_FRAMES queries.
        for chunk in query.split(max(size**2 // length, min(size, SMALL_CHUNK_FRAMES)), dim=2):
            # Distances of this chunk's queries: from its last query to key 0, down to its first query to the last key.
            end = first + chunk.shape[2]
            near = distances[length - end : 2 * length - 1 - first]
            pieces.append(run_recomputed(attend_by_distance, chunk, near, *shared))
            first = end
        return torch.cat(pieces, dim=2)


class ChunkedPackedRelativeSelfAttention(ChunkedRelativeSelfAttention, PackedRelativeSelfAttention):
    """Twin of `PackedRelativeSelfAttention` that attends from a chunk of queries at a time."""


class ChunkedLosses(HeadLosses):
    """Twin of `HeadLosses`; beyond `chunk_frames`, memory grows linearly with the frames or tokens."""

    def ctc(
        self,
        encoded: torch.Tensor,
        head: Head,
        encoded_lengths: BatchLengths,
        tokens: torch.Tensor,
        token_lengths: Lengths,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        if encoded.shape[1] <= chunk_frames:
            return super().ctc(encoded, head, encoded_lengths, tokens, token_lengths)
        losses = long_ctc_losses(encoded, head, on_host(encoded_lengths), tokens, token_lengths)
        return losses.sum().to(at_least_float32(encoded))

    def attention(
        self,
        decoded: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        label_smoothing: float,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        if decoded.shape[1] <= chunk_frames:
            return super().attention(decoded, head, targets, label_smoothing)
        chunks = zip(decoded.split(chunk_frames, dim=1), targets.split(chunk_frames, dim=1), strict=True)
        # Each chunk's logits are dropped after use and recomputed in the backward pass.
        sums = [run_recomputed(cross_entropy_sum, chunk, head, labels, label_smoothing) for chunk, labels in chunks]
        return torch.stack(sums).sum()


def compute_in_chunks(model: torch.nn.Module) -> None:
    """Replace modules whose memory grows steeply with an utterance's length by twins that compute in chunks."""
    replace_modules(
        model,
        {
            Subsampling: ChunkedSubsampling,
            PaddedSubsampling: ChunkedPaddedSubsampling,
            RelativeSelfAttention: ChunkedRelativeSelfAttention,
            PackedRelativeSelfAttention: ChunkedPackedRelativeSelfAttention,
        },
    )


# --------------------
# T5's attention, with a bias of the scores, in chunks of queries, forward and backward.
#
# PyTorch's kernels that need no (B, H, T, S) scores in memory take no bias that has a gradient, so that T5's attention
# would keep several such tensors: 28 MiB each for 8 x 384 tokens and 6 heads. Here the scores of one chunk exist at a
# time, small enough for a CPU's cache; the backward pass recomputes them, and keeps the inputs only.
#
# B batch, H heads, T queries, S keys, E head width, C queries of a chunk.


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
        # In fp32 as under autocast, which the backward pass runs without.
        return F.softmax(scores, dim=-1, dtype=at_least_float32(scores))


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
