"""Dropout that keeps one byte per number and adds the residual in the same pass, for training on a CPU.

Autograd would keep the mask as floats: a tenth of a step's activations.
"""

import torch
import torch.nn.functional as F

from konkanivani.model.conformer import Dropout, draw_mask


class MaskedDropout(Dropout):
    """Twin of `Dropout` that draws the same masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)  # one fused kernel, which keeps one byte per number as well
        return _Masked.apply(x, draw_mask(x, self.p), 1 / (1 - self.p))

    def add_residual(self, x: torch.Tensor, branch: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return x + weight * dropout(branch), on a CPU in fewer passes over memory than the separate operations."""
        if self.training and self.p and x.device.type == "cpu":
            mask = draw_mask(branch, self.p)
            return _MaskedSum.apply(x, branch, mask, weight / (1 - self.p))
        return torch.add(x, self(branch), alpha=weight)


def add_residual(x: torch.Tensor, branch: torch.Tensor, dropout: Dropout, weight: float = 1.0) -> torch.Tensor:
    """Return x + weight * dropout(branch), in one pass if the dropout is a `MaskedDropout`."""
    if isinstance(dropout, MaskedDropout):
        return dropout.add_residual(x, branch, weight)
    return torch.add(x, dropout(branch), alpha=weight)


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
