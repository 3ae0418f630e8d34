"""Activation checkpointing: what is computed on the way is not kept, but computed again in the backward pass."""

import copy
from collections.abc import Callable, Set
from functools import partial
from typing import TypeVar

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Result = TypeVar("Result")
Part = TypeVar("Part", bound=torch.nn.Module)


# Attention on a CPU and on CUDA: a third of a block's work whose result is as small as the block's input.
ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
)


def run_recomputed(
    function: Callable[..., Result],
    *inputs: object,
    keeps_random_state: bool = False,
    kept: Set[torch._ops.OpOverload] = frozenset(),
) -> Result:
    """The function's result; of what it computes on the way nothing is kept (Chen et al., 2016) but `kept` results.

    If it draws random numbers, they must follow from its inputs, or the generators' state be kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)

    def policy(_context: SelectiveCheckpointContext, operation: Callable, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if kept else {}
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=keeps_random_state, **contexts)


def as_it_is_now(module: Part) -> Part:
    """The module with the weights that it has at this moment, for a part of it that is recomputed later.

    By then those that were put in for the time of one call (torch.func.functional_call) are out again.
    """
    if all(isinstance(weight, torch.nn.Parameter) for weight in module.parameters()):
        return module
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
