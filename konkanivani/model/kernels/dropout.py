"""Dropout whose masks are cheap to draw on a CPU and take one byte per number."""

import torch
import torch.nn.functional as F

from konkanivani.base.randomness import dropout_generator

LEVELS = 2**16


class Dropout(torch.nn.Module):
    """Dropout of a tensor: in training each number is 0 with probability `p`, else divided by 1 - p.

    Srivastava et al. (2014). On a CPU, torch's dropout draws a float per number and keeps it until the backward pass: a
    fifteenth of a step's time, a tenth of its activations. Here 64 random bits serve four numbers, so that `p` is
    rounded to 1 / 65,536, and one byte per number is kept.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

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


def draw_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """Return a bool tensor of `like`'s shape, False with probability `p`, drawn as `dropout_seed` determines."""
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    # From -2^63 up to the largest int64 inclusive (None): all 64 bits are random.
    bits.random_(-(2**63), None, generator=dropout_generator())
    numbers = bits.view(torch.int16)[: like.numel()].view(like.shape)
    return numbers >= round(p * LEVELS) - LEVELS // 2


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
