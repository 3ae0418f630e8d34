"""Cross entropy over a large vocabulary, computed in slices so that all logits never exist at once.

The logits of 448 labels over 51,865 tokens take 89 MiB in fp32, as do their softmax and their gradient: more than all
activations of Whisper's smaller sizes with recomputation. Here the forward pass keeps one number per label, the log of
the softmax's denominator, and the backward pass recomputes each slice's logits before its part of the gradients: four
matrix products with this layer's weight, not three.

N labels, D width, V vocabulary, W columns of a slice.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from konkanivani.models.losses import TARGET_PADDING
from konkanivani.models.twin import replace_modules
from konkanivani.models.whisper.model import TiedEmbedding, TiedHead, VocabularyLoss, Whisper
from konkanivani.ops.products import fast_linear, fused_linear, weight_gradient, without_autocast

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
        return vectors.to(tokens.device), TiedHead(head, gradient.buffer)


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
    """Let Whisper compute its loss in slices of the vocabulary, with one gradient of the tied weight."""
    if isinstance(model, Whisper):
        model.loss = SlicedVocabularyLoss()
        replace_modules(model, {TiedEmbedding: SlicedTiedEmbedding})


def use_fast_logits(model: torch.nn.Module) -> None:
    """Let Whisper compute logits by oneDNN if that is faster."""
    replace_modules(model, {TiedEmbedding: FastTiedEmbedding, SlicedTiedEmbedding: FastSlicedTiedEmbedding})


class TiedGradient:
    """Gradient of a weight (V, D) that is used twice, accumulated in place in the earlier micro-batches' gradient.

    Autograd would hold the sum of the earlier gradients and this one, each of the weight's size. Here the sum is taken
    out of `.grad`, the output layer's gradient is added to it in slices, then the rows of the embedded vectors, and the
    result is returned to autograd as this pass's gradient. Rounding is the same as autograd's: earlier + (output layer
    + vectors).
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
        self._weight.grad = None
        # Rows of this batch's tokens are added at the end, for the same rounding as autograd's.
        self._earlier = earlier[self.tokens]
        earlier[self.tokens] = 0
        return earlier

    def finish(self, grad_head: torch.Tensor, grad_vectors: torch.Tensor) -> torch.Tensor:
        """Return grad_head (V, D) plus the vectors' gradient (B, U, D) and the earlier sum's rows, added in place."""
        grad_vectors = grad_vectors.to(grad_head.dtype)
        # On a CPU, index_put_ accumulates in the order in which threads arrive: not reproducible.
        if grad_head.device.type == "cpu":
            grad_head.index_add_(0, self.tokens.flatten(), grad_vectors.flatten(0, 1))
        else:
            grad_head.index_put_((self.tokens,), grad_vectors, accumulate=True)
        # A repeated token has the same row several times: the sum is assigned, not accumulated.
        if self._earlier is not None:
            grad_head[self.tokens] = grad_head[self.tokens] + self._earlier
            self._earlier = None
        return grad_head


class _Tied(torch.autograd.Function):
    """Embedding and output layer of one weight; autograd would hold a gradient of its size for each, and their sum."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: TiedGradient) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.gradient = gradient
        return torch.nn.functional.embedding(gradient.tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad_vectors: torch.Tensor, grad_head: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient.finish(grad_head, grad_vectors), None
