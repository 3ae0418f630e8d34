"""Fused modules: norm with product, dropout masks, and losses over slices of the vocabulary.

The logits of 448 labels over 51,865 tokens take 89 MiB in fp32, as do their softmax and their gradient: more than all
activations of Whisper's smaller sizes with recomputation. The sliced loss keeps in its forward pass one number per
label, the log of the softmax's denominator, and the backward pass recomputes each slice's logits before its part of the
gradients: four matrix products with this layer's weight, not three.

By default, autograd keeps the input and the output of a LayerNorm and of an activation, although either is cheap to
compute from the other: two fifths of a Conformer block's activations. `fused_linear` keeps the input only. Of dropout,
autograd keeps the mask as floats, a tenth of a step's activations; here it takes one byte per number. The twins share
the plain blocks' parameters and names and compute the same numbers.

B batch, T frames or tokens, S encoder frames, N labels, D model width, V vocabulary, W columns of a slice.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from konkanivani.models.asr import TARGET_PADDING, TiedEmbedding, TiedHead, VocabularyLoss, in_full
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
from konkanivani.ops.products import fast_linear, fused_linear, weight_gradient, without_autocast

# --------------------
# Cross entropy over a large vocabulary, computed in slices so that all logits never exist at once.


SLICE_NUMBERS = 2**21  # of a slice's logits, and of its part of the weight's gradient: 8 MiB in fp32
MIN_COLUMNS = 1024  # narrower products are dominated by their launch overhead


LogitBuffer = Callable[[], torch.Tensor]


def vocabulary_loss_sum(
    decoded: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float,
    buffer: LogitBuffer | None = None,
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
        ctx, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, smoothing: float, buffer: LogitBuffer
    ) -> torch.Tensor:
        scores = _Scores(rows, weight, targets)
        chosen: float | torch.Tensor = 0.0
        sums = []
        for columns in scores.slices():
            logits = scores.logits(columns)
            chosen = chosen + (1 - smoothing) * scores.of_targets(logits, columns)
            # Label smoothing: the target distribution has (1 - s) at the target and s / V everywhere.
            if smoothing:
                chosen = chosen + smoothing / len(weight) * logits.sum(1)
            sums.append(logits.logsumexp(1))
        denominators = torch.stack(sums).logsumexp(0)
        losses = denominators - chosen
        ctx.save_for_backward(rows, weight, targets, denominators)
        ctx.smoothing = smoothing
        ctx.dtype = scores.dtype
        ctx.buffer = buffer
        return torch.where(scores.counts, losses, 0.0).sum()

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, targets, denominators = ctx.saved_tensors
        # The forward pass's dtype: backward itself runs outside of autocast.
        scores = _Scores(rows.to(ctx.dtype), weight, targets)
        grad_loss = torch.where(scores.counts, gradient, 0.0)[:, None]
        grad_rows = torch.zeros_like(rows)
        grad_weight = ctx.buffer() if ctx.needs_input_grad[1] else None
        for columns in scores.slices():
            # d loss / d logits = softmax - target distribution
            grad_logits = scores.logits(columns).sub_(denominators[:, None]).exp_()
            if ctx.smoothing:
                grad_logits -= ctx.smoothing / len(weight)
            scores.add_at_targets(grad_logits, columns, ctx.smoothing - 1)
            grad_logits = grad_logits.mul_(grad_loss).to(scores.dtype)
            grad_rows += fast_linear(grad_logits, scores.part(columns).t())
            if grad_weight is not None:
                grad_weight[columns] += weight_gradient(grad_logits, scores.rows).to(grad_weight.device)
        return grad_rows, grad_weight, None, None, None


class _Scores:
    """Logits of rows (N, D) with a weight (V, D), one slice of the vocabulary at a time.

    `dtype` is the matrix products' dtype; `counts` (N,) is True for labels that are not padding.
    """

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        device = rows.device.type
        in_half = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if in_half else rows.dtype
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
        """Return a slice's logits (N, W) in at least fp32, as a new tensor that the caller may overwrite."""
        logits = fast_linear(self.rows, self.part(columns))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def of_targets(self, logits: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the logits (N,) of targets within the slice, 0 for others."""
        indices, is_inside = self._of_slice(columns)
        return torch.where(is_inside, logits.gather(1, indices).squeeze(1), 0.0)

    def add_at_targets(self, values: torch.Tensor, columns: slice, summand: float) -> None:
        """Add `summand` to values (N, W) in place, at each target within the slice."""
        indices, is_inside = self._of_slice(columns)
        values.scatter_add_(1, indices, (summand * is_inside.to(values.dtype))[:, None])

    def _of_slice(self, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each target's column in the slice (N, 1), 0 if it is not there, and whether it is there (N,)."""
        number = columns.start // self._width
        return self._columns[number], self._is_inside[number]


class SlicedTiedEmbedding(TiedEmbedding):
    """Twin of `TiedEmbedding`; vectors and output layer have one gradient, in the memory of the earlier one."""

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
    """Let Whisper compute logits by oneDNN if that is faster."""
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
        x = x + self.cross_attention.attend(query, *self.cross_attention.keys_and_values(encoded), encoded_mask)
        return x + self.feedforward(x)


def attend_to_itself(
    attention: whisper.Attention,
    norm: torch.nn.LayerNorm,
    x: torch.Tensor,
    is_causal: bool,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return Whisper's self-attention of norm(x), with the norm fused with the three products."""
    query = fused_linear(x, attention.query, norm)
    key = attention.split_heads(fused_linear(x, attention.key, norm))
    value = attention.split_heads(fused_linear(x, attention.value, norm))
    return attention.attend(query, key, value, key_mask, is_causal)


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
    """Replace blocks by twins that fuse residual additions with dropout and, if asked, norms with projections."""
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
        return _masked(x, mask, scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _masked(gradient, mask, ctx.scale), None, None


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
        return gradient, _masked(gradient, mask, ctx.scale).to(ctx.dtype), None, None


def _masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return _as_numbers(mask, x.dtype).mul_(x).mul_(scale)


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as zeros and ones of `dtype`."""
    # Converting from int8 takes half the time of converting from bool.
    return mask.view(torch.int8).to(dtype)
