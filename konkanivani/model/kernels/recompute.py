"""Activation checkpointing: what is computed on the way is not kept, but computed again in the backward pass."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def run_recomputed(function: Callable[..., Result], *inputs: object, keeps_random_state: bool = False) -> Result:
    """The function's result; of what it computes on the way nothing is kept (Chen et al., 2016).

    If it draws random numbers, they must follow from its inputs, or the generators' state be kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=keeps_random_state)
