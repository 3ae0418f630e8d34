"""The precision of a backward pass of our own, whatever surrounds it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

Gradients = Any  # what autograd takes: one, or a tuple of which each may be None


def in_own_precision(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A Function's `backward` in the precision of what it is given, whether or not it is called inside of autocast.

    PyTorch advises against calling it there, and does not refuse it: every product of fp32 would be rounded to bf16,
    and on a CPU a convolution of ours in bf16 may never end (depthwise.py).
    """

    @functools.wraps(backward)
    def unsurrounded(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        device = gradients[0].device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return unsurrounded
