"""Dropout whose masks are cheap to draw on a CPU and take a byte a number."""

import torch
import torch.nn.functional as F

LEVELS = 2**16


class Dropout(torch.nn.Module):
    """Any shape: in training each number is 0 with probability `share`, else over 1 - share (Srivastava et al., 2014).

    On a CPU, torch's own draws a float a number and keeps it until the backward pass: a fifteenth of a step's time, a
    tenth of its activations. Here 64 random bits serve four numbers, so that `share` is met to 1 / 65,536, and a byte
    is kept.

    One that `ends_block` keeps its mask even where activations are recomputed: nothing that follows it in the block is
    needed by the backward pass, so recomputing can stop before the product that feeds it.
    """

    def __init__(self, share: float, ends_block: bool = False) -> None:
        super().__init__()
        self.share, self.ends_block = share, ends_block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.share == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.share)  # one fused kernel, and a byte a number as well
        return _Masked.apply(x, draw_mask(x, self.share), 1 / (1 - self.share), self.ends_block)

    def extra_repr(self) -> str:
        return f"share={self.share}"


def draw_mask(like: torch.Tensor, share: float) -> torch.Tensor:
    """A bool tensor of `like`'s shape, False with probability `share`, from torch's default generator."""
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device).random_(-(2**63), None)
    numbers = bits.view(torch.int16)[: like.numel()].view(like.shape)
    return numbers >= round(share * LEVELS) - LEVELS // 2


class _Masked(torch.autograd.Function):
    """x * mask * scale, keeping the mask alone."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, mask: torch.Tensor, scale: float, keeps_mask: bool) -> torch.Tensor:
        # What is saved is given back and recomputed by activation checkpointing, an attribute stays.
        ctx.mask = mask if keeps_mask else None
        ctx.save_for_backward(*(() if keeps_mask else (mask,)))
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        mask = ctx.saved_tensors[0] if ctx.mask is None else ctx.mask
        return _masked(gradient, mask, ctx.scale), None, None, None


def _masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """x * mask * scale; a mask that is multiplied as numbers takes half as long as one of truth values."""
    return (x * mask.view(torch.int8)).mul_(scale)
