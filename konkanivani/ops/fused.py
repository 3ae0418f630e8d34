"""Fused modules: norm with product, dropout masks, and losses over slices of the vocabulary.

B batch, T frames or tokens, S encoder frames, N labels, D model width, V vocabulary, W columns of a slice.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from konkanivani.models.asr import TARGET_PADDING, TiedEmbedding, TiedHead, VocabularyLoss, at_least_float32, in_full
from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import (
    ConformerBlock,
    ConvolutionModule,
    Dropout,
    FeedForward,
    TransformerBlock,
    draw_mask,
)
from konkanivani.models.decoder import DecoderBlock
from konkanivani.models.t5.model import T5
from konkanivani.models.twin import replace_modules
from konkanivani.models.whisper import model as whisper
from konkanivani.models.whisper.model import Whisper
from konkanivani.ops.products import (
    add_product,
    fast_linear,
    fused_linear,
    fused_linears,
    weight_gradient,
    without_autocast,
)

# --------------------
# Cross entropy over a large vocabulary, computed in slices so that all logits never exist at once.
#
# The logits of 448 labels over 51,865 tokens take 89 MiB in fp32, as do their softmax and their gradient: more than all
# activations of Whisper's smaller sizes with recomputation. The forward pass keeps one number per label, the log of the
# softmax's denominator, and the backward pass recomputes each slice's logits before its part of the gradients: four
# matrix products with this layer's weight, not three.


SLICE_NUMBERS = 2**21  # of a slice's logits, and of its part of the weight's gradient: 8 MiB in fp32
MIN_COLUMNS = 1024  # narrower products are dominated by their launch overhead


GradientBuffer = Callable[[], torch.Tensor]


def vocabulary_loss_sum(
    decoded: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float,
    buffer: GradientBuffer | None = None,
) -> torch.Tensor:
    """Return the summed, smoothed cross entropy of logits decoded (B, U, D) @ weight (V, D)ᵀ against targets (B, U).

    The weight may be on another device: it is copied in slices, and its gradient is added to the tensor that `buffer`
    returns in the backward pass (default: zeros) on the weight's device. Padding is -1. The loss is at least fp32;
    under autocast the matrix products are in half precision.
    """
    buffer = buffer or partial(torch.zeros_like, weight)
    return _VocabularyLoss.apply(decoded.flatten(0, 1), weight, targets.flatten(), label_smoothing, buffer)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, smoothing: float, buffer: GradientBuffer
    ) -> torch.Tensor:
        scores = _Scores(rows, weight, targets)
        gathered = []
        sums = []
        denominators = []
        for columns in scores.slices():
            logits = scores.logits(columns)
            gathered.append(scores.gather(logits, columns))
            if smoothing:
                sums.append(logits.sum(1))
            denominators.append(logits.logsumexp(1))
        denominator = torch.stack(denominators).logsumexp(0)
        # Label smoothing: the target distribution has (1 - s) at the target and s / V everywhere.
        chosen = (1 - smoothing) * scores.of_targets(gathered)
        if smoothing:
            chosen = torch.stack(sums).sum(0).mul_(smoothing / len(weight)).add_(chosen)
        losses = denominator - chosen
        ctx.save_for_backward(rows, weight, targets, denominator)
        ctx.smoothing = smoothing
        ctx.dtype = scores.dtype
        ctx.buffer = buffer
        return torch.where(scores.counts, losses, 0.0).sum()

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, targets, denominator = ctx.saved_tensors
        # The forward pass's dtype: backward itself runs outside of autocast.
        scores = _Scores(rows.to(ctx.dtype), weight, targets)
        grad_loss = torch.where(scores.counts, gradient, 0.0)[:, None]
        shares = scores.shares_of_targets(ctx.smoothing - 1)
        grad_rows = torch.zeros_like(rows)
        grad_weight = ctx.buffer() if ctx.needs_input_grad[1] else None
        for columns in scores.slices():
            part = scores.part(columns)
            # d loss / d logits = softmax - target distribution
            grad_logits = scores.log_softmax(part, denominator).exp_()
            if ctx.smoothing:
                grad_logits -= ctx.smoothing / len(weight)
            scores.add_at_targets(grad_logits, columns, shares)
            grad_logits = scores.scaled(grad_logits, grad_loss)
            add_product(grad_rows, grad_logits, part.t())
            del part
            if grad_weight is not None:
                grad_weight[columns].add_(weight_gradient(grad_logits, scores.rows).to(grad_weight.device))
        return grad_rows, grad_weight, None, None, None


class _Scores:
    """Logits of rows (N, D) with a weight (V, D), one slice of the vocabulary at a time.

    `dtype` is the products' dtype, `full_dtype` the logits'; `counts` (N,) is True for labels that are not padding.
    """

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        device = rows.device.type
        in_half = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if in_half else rows.dtype
        self.full_dtype = at_least_float32(rows)
        self.rows = rows.to(self.dtype)
        self.counts = targets != TARGET_PADDING
        self._weight = weight
        vocabulary = len(weight)
        # A slice of W columns has N W logits and W D weights: bound the larger.
        self._width = max(MIN_COLUMNS, SLICE_NUMBERS // max(1, *rows.shape))
        starts = torch.arange(0, vocabulary, self._width, device=targets.device)[:, None]
        self._is_inside = (targets >= starts) & (targets < starts + self._width)
        self._columns = torch.where(self._is_inside, targets - starts, 0)[..., None]

    def slices(self) -> Iterator[slice]:
        """Yield the slices of the vocabulary, in order."""
        for start in range(0, len(self._weight), self._width):
            yield slice(start, min(start + self._width, len(self._weight)))

    def part(self, columns: slice) -> torch.Tensor:
        """Return the slice's weight (W, D) on the rows' device, in the products' dtype."""
        return self._weight[columns].to(self.rows.device, self.dtype)

    def logits(self, columns: slice) -> torch.Tensor:
        """Return a slice's logits (N, W) in at least fp32."""
        return fast_linear(self.rows, self.part(columns)).to(self.full_dtype)

    def log_softmax(self, part: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities (N, W) of a slice, given its weight and the softmax's log denominator (N,)."""
        logits = fast_linear(self.rows, part)
        # The subtraction casts half-precision logits in the same kernel.
        return torch.sub(logits, denominator[:, None], out=logits if logits.dtype == self.full_dtype else None)

    def gather(self, logits: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the logits (N, 1) at the targets' columns, arbitrary for targets outside of the slice."""
        return logits.gather(1, self._columns[columns.start // self._width])

    def of_targets(self, gathered: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits (N,) of the targets, given those that each slice gathered."""
        # Exact: each row of the sum has one number, of the slice with the target.
        return torch.where(self._is_inside, torch.cat(gathered, dim=1).t(), 0.0).sum(0)

    def shares_of_targets(self, share: float) -> torch.Tensor:
        """Return a tensor (slices, N, 1) with `share` where a target is in the slice, else 0."""
        return (share * self._is_inside.to(self.full_dtype))[..., None]

    def add_at_targets(self, values: torch.Tensor, columns: slice, shares: torch.Tensor) -> None:
        """Add the slice's `shares_of_targets` to values (N, W) in place."""
        number = columns.start // self._width
        values.scatter_add_(1, self._columns[number], shares[number])

    def scaled(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return values (N, W) times factors (N, 1) in the products' dtype; may overwrite the values."""
        out = values if values.dtype == self.dtype else torch.empty_like(values, dtype=self.dtype)
        return torch.mul(values, factors, out=out)


class SlicedTiedEmbedding(TiedEmbedding):
    """Twin of `TiedEmbedding`; vectors and output layer have one gradient, accumulated in the existing `.grad`."""

    def with_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, TiedHead]:
        """Return vectors (B, U, D) of tokens (B, U) and the output layer; used together, they have one gradient.

        The vectors are on the tokens' device, the output layer and the gradient on the weight's.
        """
        gradient = TiedGradient(self.weight, tokens.to(self.weight.device))
        vectors, head = _Tied.apply(self.weight, gradient)
        return in_full(vectors).to(tokens.device), TiedHead(head, gradient.buffer)


class FastTiedEmbedding(TiedEmbedding):
    """Twin of `TiedEmbedding` with logits by oneDNN if that is faster."""

    def logits(self, decoded: torch.Tensor) -> torch.Tensor:
        return fused_linear(decoded, self)


class FastSlicedTiedEmbedding(FastTiedEmbedding, SlicedTiedEmbedding):
    """Twin of `SlicedTiedEmbedding` with logits by oneDNN if that is faster."""


class SlicedVocabularyLoss(VocabularyLoss):
    """Twin of `VocabularyLoss` by `vocabulary_loss_sum`."""

    def __call__(
        self, decoded: torch.Tensor, head: TiedHead, targets: torch.Tensor, label_smoothing: float
    ) -> torch.Tensor:
        return vocabulary_loss_sum(decoded, head.weight, targets, label_smoothing, head.gradient_buffer)


def slice_vocabulary(model: torch.nn.Module) -> None:
    """Let pretrained models compute their loss in slices of the vocabulary, with one gradient of a tied weight."""
    if isinstance(model, Whisper | T5):
        model.loss = SlicedVocabularyLoss()
        replace_modules(model, {TiedEmbedding: SlicedTiedEmbedding})


def use_fast_logits(model: torch.nn.Module) -> None:
    """Let Whisper and T5 compute logits by oneDNN if that is faster."""
    replace_modules(model, {TiedEmbedding: FastTiedEmbedding, SlicedTiedEmbedding: FastSlicedTiedEmbedding})


class TiedGradient:
    """Gradient of a weight (V, D) that is used twice, accumulated in place in the earlier micro-batches' gradient.

    Autograd would hold the sum of the earlier gradients and this one, each of the weight's size. Here the output
    layer's gradient is added to the earlier sum in slices, then the rows of the embedded vectors, and autograd gets no
    gradient. Rounding is the same as autograd's: earlier + (output layer + vectors).
    """

    def __init__(self, weight: torch.Tensor, tokens: torch.Tensor) -> None:
        self._weight = weight
        self.tokens = tokens
        self._earlier: torch.Tensor | None = None  # (B, U, D)

    def buffer(self) -> torch.Tensor:
        """Return the tensor (V, D) to add the output layer's gradient to: the earlier sum, with tokens' rows zeroed."""
        earlier = self._weight.grad
        # A hook must see this pass's gradient alone.
        if earlier is None or self._weight._backward_hooks:
            return torch.zeros_like(self._weight)
        # Rows of this batch's tokens are added at the end, for the same rounding as autograd's.
        self._earlier = earlier[self.tokens]
        # Not `earlier[tokens] = 0`, which makes a tensor of the number on the host: a capture would refuse it.
        earlier.index_fill_(0, self.tokens.flatten(), 0.0)
        return earlier

    def finish(self, grad_head: torch.Tensor, grad_vectors: torch.Tensor) -> torch.Tensor | None:
        """Add the vectors' gradient (B, U, D) and the earlier sum's rows to grad_head (V, D) in place.

        Return grad_head if it is not the parameter's `.grad` yet.
        """
        grad_vectors = grad_vectors.to(grad_head.dtype)
        # On a CPU, index_put_ accumulates in the order in which threads arrive: not reproducible.
        if grad_head.device.type == "cpu":
            grad_head.index_add_(0, self.tokens.flatten(), grad_vectors.flatten(0, 1))
        else:
            grad_head.index_put_((self.tokens,), grad_vectors, accumulate=True)
        # A repeated token has the same row several times: the sum is assigned, not accumulated.
        if self._earlier is None:
            return grad_head
        grad_head[self.tokens] = grad_head[self.tokens] + self._earlier
        self._earlier = None
        return None


class _Tied(torch.autograd.Function):
    """Embedding and output layer of one weight; autograd would hold a gradient of its size for each, and their sum."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: TiedGradient) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.gradient = gradient
        return torch.nn.functional.embedding(gradient.tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad_vectors: torch.Tensor, grad_head: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.gradient.finish(grad_head, grad_vectors), None


# --------------------
# Blocks whose norms, activations and residual additions are computed with the neighbouring operation.
#
# `ops.products.fused_linear` keeps the input of a norm and an activation only. Of dropout, autograd keeps the mask as
# floats, a tenth of a step's activations; here it takes one byte per number. The twins share the plain blocks'
# parameters and names and compute the same numbers.


class MaskedDropout(Dropout):
    """Twin of `Dropout` that draws the same masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)  # one fused kernel, which keeps one byte per number as well
        return masked(x, draw_mask(x, self.p), 1 / (1 - self.p))

    def add_residual(self, x: torch.Tensor, branch: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return x + weight * dropout(branch), on a CPU in fewer passes over memory than the separate operations."""
        if self.training and self.p and x.device.type == "cpu":
            return add_masked(x, branch, draw_mask(branch, self.p), weight / (1 - self.p))
        return torch.add(x, self(branch), alpha=weight)


def add_residual(x: torch.Tensor, branch: torch.Tensor, dropout: Dropout, weight: float = 1.0) -> torch.Tensor:
    """Return x + weight * dropout(branch), in one pass if the dropout is a `MaskedDropout`."""
    if isinstance(dropout, MaskedDropout):
        return dropout.add_residual(x, branch, weight)
    return torch.add(x, dropout(branch), alpha=weight)


class FusedFeedForward(FeedForward):
    """Twin of `FeedForward` that keeps its input and one product for the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.silu)


class FusedConvolutionModule(ConvolutionModule):
    """Twin of `ConvolutionModule` with fused norms and activation."""

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = F.glu(fused_linear(x, self.gate, self.norm), dim=-1)
        x = self.depthwise(x, layout)
        return fused_linear(x, self.output, self.depthwise_norm, activation=F.silu)


class FusedConformerBlock(ConformerBlock):
    """Twin of `ConformerBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        x = add_residual(x, self.first_feedforward(x), self.dropout, 0.5)
        projected = project(x, self.attention_norm, self.attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.attention.attend(projected, layout), self.dropout)
        x = add_residual(x, self.convolution(x, layout), self.dropout)
        return add_residual(x, self.second_feedforward(x), self.dropout, 0.5)


class FusedTransformerBlock(TransformerBlock):
    """Twin of `TransformerBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        projected = project(x, self.attention_norm, self.attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.attention.attend(projected, layout), self.dropout)
        return add_residual(x, self.feedforward(x), self.dropout)


class FusedDecoderBlock(DecoderBlock):
    """Twin of `DecoderBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(
        self, x: torch.Tensor, layout: SequenceLayout, encoded: torch.Tensor, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        projected = project(x, self.self_attention_norm, self.self_attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.self_attention.attend(projected, layout), self.dropout)
        query = project(x, self.cross_attention_norm, self.cross_attention.query, self.fuses_norms)
        cross_kv = self.cross_attention.keys_and_values(encoded)
        x = add_residual(x, self.cross_attention.attend(query, *cross_kv, encoded_mask), self.dropout)
        return add_residual(x, self.feedforward(x), self.dropout)


class FusedWhisperFeedForward(whisper.FeedForward):
    """Twin of Whisper's feed-forward module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.gelu)


class FusedWhisperEncoderBlock(whisper.EncoderBlock):
    """Twin of Whisper's encoder block."""

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + attend_to_itself(self.self_attention, self.self_attention_norm, x, False, key_mask)
        return x + self.feedforward(x)


class FusedWhisperDecoderBlock(whisper.DecoderBlock):
    """Twin of Whisper's decoder block."""

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, encoded_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + attend_to_itself(self.self_attention, self.self_attention_norm, x, True, None)
        query = fused_linear(x, self.cross_attention.query, self.cross_attention_norm)
        attention = self.cross_attention
        key, value = map(attention.split_heads, fused_linears(encoded, (attention.key, attention.value)))
        x = x + attention.attend(query, key, value, encoded_mask)
        return x + self.feedforward(x)


def attend_to_itself(
    attention: whisper.Attention,
    norm: torch.nn.LayerNorm,
    x: torch.Tensor,
    is_causal: bool,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return Whisper's self-attention of norm(x), with the norm fused with the three products."""
    key, value, query = fused_linears(x, (attention.key, attention.value, attention.query), norm)
    return attention.attend(query, attention.split_heads(key), attention.split_heads(value), key_mask, is_causal)


def project(x: torch.Tensor, norm: torch.nn.LayerNorm, linear: torch.nn.Linear, fuses_norm: bool) -> torch.Tensor:
    """Return linear(norm(x)), which keeps only x if the norm is fused."""
    return fused_linear(x, linear, norm) if fuses_norm else linear(norm(x))


def fuse_norms(model: torch.nn.Module) -> None:
    """Replace feed-forward, convolution and Whisper's blocks by twins that fuse norms and activations with products."""
    replace_modules(
        model,
        {
            FeedForward: FusedFeedForward,
            ConvolutionModule: FusedConvolutionModule,
            whisper.FeedForward: FusedWhisperFeedForward,
            whisper.EncoderBlock: FusedWhisperEncoderBlock,
            whisper.DecoderBlock: FusedWhisperDecoderBlock,
        },
    )


def fuse_blocks(model: torch.nn.Module, fuses_norms: bool) -> None:
    """Replace blocks by twins that fuse residual additions with dropout and optionally norms with projections."""
    kinds = {
        ConformerBlock: FusedConformerBlock,
        TransformerBlock: FusedTransformerBlock,
        DecoderBlock: FusedDecoderBlock,
    }
    replace_modules(model, kinds)
    for block in model.modules():
        if isinstance(block, FusedConformerBlock | FusedTransformerBlock | FusedDecoderBlock):
            block.fuses_norms = fuses_norms


def masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x * mask * scale; autograd keeps only the mask."""
    return _Masked.apply(x, mask, scale)


def add_masked(x: torch.Tensor, branch: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x + branch * mask * scale; autograd keeps only the mask."""
    return _MaskedSum.apply(x, branch, mask, scale)


class _Masked(torch.autograd.Function):
    """x * mask * scale; keeps only the mask."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _apply_mask(x, mask, scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _apply_mask(gradient, mask, ctx.scale), None, None


class _MaskedSum(torch.autograd.Function):
    """x + branch * mask * scale; keeps only the mask."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, branch: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        ctx.dtype = branch.dtype
        return torch.addcmul(x, branch, _as_numbers(mask, branch.dtype), value=scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return gradient, _apply_mask(gradient, mask, ctx.scale).to(ctx.dtype), None, None


def _apply_mask(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return _as_numbers(mask, x.dtype).mul_(x).mul_(scale)


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as zeros and ones of `dtype`."""
    # Converting from int8 takes half the time of converting from bool.
    return mask.view(torch.int8).to(dtype)
