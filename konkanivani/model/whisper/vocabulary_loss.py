"""Cross entropy over a large vocabulary of which no more than a slice's logits are ever there.

The logits of 448 labels over 51,865 tokens are 89 MiB in fp32; a softmax and a gradient of that size lie beside them,
more than all that a recomputed model of Whisper's smaller sizes keeps. Here the forward pass keeps a number for each
label, the logarithm of the softmax's denominator, and the backward pass makes each slice's logits again and then its
part of the gradients: a fourth product of this head in place of three.

N labels, D width, V vocabulary, W columns of a slice.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from konkanivani.model.kernels.products import fast_linear, weight_gradient, without_autocast
from konkanivani.model.losses import TARGET_PADDING

SLICE_NUMBERS = 2**21  # of a slice's logits, and of its part of the weight's gradient: 8 MiB in fp32
MIN_COLUMNS = 1024  # of fewer, a product is no longer worth its start


LogitBuffer = Callable[[], torch.Tensor]


def vocabulary_loss_sum(
    decoded: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float,
    buffer: LogitBuffer | None = None,
) -> torch.Tensor:
    """The summed, smoothed cross entropy of logits decoded (B, U, D) @ weight (V, D)ᵀ against targets (B, U).

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
        chosen, sums = 0.0, []
        for columns in found.slices():
            logits = found.logits(columns)
            chosen = chosen + (1 - smoothing) * found.of_targets(logits, columns)
            if smoothing:
                chosen = chosen + smoothing / len(weight) * logits.sum(1)
            sums.append(logits.logsumexp(1))
        denominators = torch.stack(sums).logsumexp(0)
        losses = denominators - chosen
        ctx.save_for_backward(rows, weight, targets, denominators)
        ctx.smoothing, ctx.dtype, ctx.buffer = smoothing, found.dtype, buffer
        return torch.where(found.counts, losses, 0.0).sum()

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, targets, denominators = ctx.saved_tensors
        found = _Scores(rows.to(ctx.dtype), weight, targets)
        by_loss = torch.where(found.counts, gradient, 0.0)[:, None]
        by_rows = torch.zeros_like(rows)
        grad_weight = ctx.buffer() if ctx.needs_input_grad[1] else None
        for columns in found.slices():
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
    """Logits of rows (N, D) over a weight (V, D), a slice of the vocabulary at a time.

    `dtype` is that of the products, `counts` (N,) says which labels are no padding.
    """

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        device = rows.device.type
        in_half = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if in_half else rows.dtype
        self.rows, self.counts = rows.to(self.dtype), targets != TARGET_PADDING
        self._weight, vocabulary = weight, len(weight)
        self._width = max(MIN_COLUMNS, SLICE_NUMBERS // max(1, *rows.shape))
        starts = torch.arange(0, vocabulary, self._width, device=targets.device)[:, None]
        self._is_inside = (targets >= starts) & (targets < starts + self._width)
        self._places = torch.where(self._is_inside, targets - starts, 0)[..., None]

    def slices(self) -> Iterator[slice]:
        """Of the vocabulary, in order."""
        for start in range(0, len(self._weight), self._width):
            yield slice(start, min(start + self._width, len(self._weight)))

    def part(self, columns: slice) -> torch.Tensor:
        """The slice's weight (W, D), as it is multiplied."""
        return self._weight[columns].to(self.rows.device, self.dtype)

    def logits(self, columns: slice) -> torch.Tensor:
        """(N, W), in at least fp32; nobody else has them."""
        made = fast_linear(self.rows, self.part(columns))
        return made.to(torch.promote_types(made.dtype, torch.float32))

    def of_targets(self, logits: torch.Tensor, columns: slice) -> torch.Tensor:
        """(N,): those of the targets that lie in the slice, 0 for others."""
        places, is_inside = self._of_slice(columns)
        return torch.where(is_inside, logits.gather(1, places).squeeze(1), 0.0)

    def add_at_targets(self, values: torch.Tensor, columns: slice, summand: float) -> None:
        """Adds to values (N, W), in place, where a target lies in the slice."""
        places, is_inside = self._of_slice(columns)
        values.scatter_add_(1, places, (summand * is_inside.to(values.dtype))[:, None])

    def _of_slice(self, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns (N, 1) of the slice, any where the target is in another one, and whether it is in this one (N,)."""
        number = columns.start // self._width
        return self._places[number], self._is_inside[number]
