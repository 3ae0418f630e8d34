"""Activation checkpointing: what is computed on the way is not kept, but computed again in the backward pass."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")

_IS_RECOMPUTED = ContextVar("is_recomputed", default=False)


def recomputed(function: Callable[..., Result], *inputs: object, keeps_random_state: bool = False) -> Result:
    """The function's result; of what it computes on the way nothing is kept (Chen et al., 2016).

    If it draws random numbers, they must follow from its inputs, or the generators' state be kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=keeps_random_state,
        context_fn=lambda: (_recomputation(), _recomputation()),
    )


def is_recomputed() -> bool:
    """Whether what runs here, in this thread, will run again or does: it stops at the last tensor that was kept."""
    return _IS_RECOMPUTED.get()


@contextlib.contextmanager
def _recomputation() -> Iterator[None]:
    token = _IS_RECOMPUTED.set(True)
    try:
        yield
    finally:
        _IS_RECOMPUTED.reset(token)
