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

from konkanivani.model.kernels.products import fast_linear, weight_gradient, without_autocast
from konkanivani.model.losses import TARGET_PADDING

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
        found = _Scores(rows, weight, targets)
        chosen: float | torch.Tensor = 0.0
        sums = []
        for columns in found.slices():
            logits = found.logits(columns)
            chosen = chosen + (1 - smoothing) * found.of_targets(logits, columns)
            # Label smoothing: the target distribution has (1 - s) at the target and s / V everywhere.
            if smoothing:
                chosen = chosen + smoothing / len(weight) * logits.sum(1)
            sums.append(logits.logsumexp(1))
        denominators = torch.stack(sums).logsumexp(0)
        losses = denominators - chosen
        ctx.save_for_backward(rows, weight, targets, denominators)
        ctx.smoothing = smoothing
        ctx.dtype = found.dtype
        ctx.buffer = buffer
        return torch.where(found.counts, losses, 0.0).sum()

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, targets, denominators = ctx.saved_tensors
        # The forward pass's dtype: backward itself runs outside of autocast.
        found = _Scores(rows.to(ctx.dtype), weight, targets)
        by_loss = torch.where(found.counts, gradient, 0.0)[:, None]
        by_rows = torch.zeros_like(rows)
        grad_weight = ctx.buffer() if ctx.needs_input_grad[1] else None
        for columns in found.slices():
            # d loss / d logits = softmax - target distribution
            by_logits = found.logits(columns).sub_(denominators[:, None]).exp_()
            if ctx.smoothing:
                by_logits -= ctx.smoothing / len(weight)
            found.add_at_targets(by_logits, columns, ctx.smoothing - 1)
            by_logits = by_logits.mul_(by_loss).to(found.dtype)
            by_rows += fast_linear(by_logits, found.part(columns).t())
            if grad_weight is not None:
                grad_weight[columns] += weight_gradient(by_logits, found.rows).to(grad_weight.device)
        return by_rows, grad_weight, None, None, None


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
        self._places = torch.where(self._is_inside, targets - starts, 0)[..., None]

    def slices(self) -> Iterator[slice]:
        """Yield the slices of the vocabulary, in order."""
        for start in range(0, len(self._weight), self._width):
            yield slice(start, min(start + self._width, len(self._weight)))

    def part(self, columns: slice) -> torch.Tensor:
        """Return the slice's weight (W, D) on the rows' device, in the products' dtype."""
        return self._weight[columns].to(self.rows.device, self.dtype)

    def logits(self, columns: slice) -> torch.Tensor:
        """Return a slice's logits (N, W) in at least fp32, as a new tensor that the caller may overwrite."""
        made = fast_linear(self.rows, self.part(columns))
        return made.to(torch.promote_types(made.dtype, torch.float32))

    def of_targets(self, logits: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the logits (N,) of targets within the slice, 0 for others."""
        places, is_inside = self._of_slice(columns)
        return torch.where(is_inside, logits.gather(1, places).squeeze(1), 0.0)

    def add_at_targets(self, values: torch.Tensor, columns: slice, summand: float) -> None:
        """Add `summand` to values (N, W) in place, at each target within the slice."""
        places, is_inside = self._of_slice(columns)
        values.scatter_add_(1, places, (summand * is_inside.to(values.dtype))[:, None])

    def _of_slice(self, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each target's column in the slice (N, 1), 0 if it is not there, and whether it is there (N,)."""
        number = columns.start // self._width
        return self._places[number], self._is_inside[number]
