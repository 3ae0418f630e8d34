"""Activation checkpointing: what is computed on the way is not kept, but computed again in the backward pass."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")
Part = TypeVar("Part", bound=torch.nn.Module)


# Attention on a CPU and on CUDA: a third of a block's work whose result is as small as the block's input.
ATTENTION = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
]


recomputed_part: ContextVar[AbstractContextManager | None] = ContextVar("recomputed_part", default=None)
"""Set where what is computed is dropped, to be computed again; within it what attention gives is kept, or nothing is.

PyTorch's own mode that keeps a result looks at each operator in Python, which takes a card's host a third of a step:
so it is on for attention alone.
"""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """PyTorch's attention, whose result is kept where what is around it is recomputed with `keeps_attention`."""
    with recomputed_part.get() or nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def run_recomputed(
    function: Callable[..., Result], *inputs: object, keeps_random_state: bool = False, keeps_attention: bool = False
) -> Result:
    """The function's result; of what it computes on the way nothing is kept (Chen et al., 2016), or what `attend` gave.

    If it draws random numbers, they must follow from its inputs, or the generators' state be kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        keepers = create_selective_checkpoint_contexts(ATTENTION) if keeps_attention else (nullcontext(), nullcontext())
        return _within(keepers[0]), _within(keepers[1])

    return checkpoint(
        function, *inputs, use_reentrant=False, preserve_rng_state=keeps_random_state, context_fn=contexts
    )


@contextmanager
def _within(keeper: AbstractContextManager) -> Iterator[None]:
    token = recomputed_part.set(keeper)
    try:
        yield
    finally:
        recomputed_part.reset(token)


def snapshot_parameters(module: Part) -> Part:
    """The module with the weights that it has at this moment, for a part of it that is recomputed later.

    By then those that were put in for the time of one call (torch.func.functional_call) are out again.
    """
    if all(isinstance(weight, torch.nn.Parameter) for weight in module.parameters()):
        return module
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
