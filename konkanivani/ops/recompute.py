"""Activation checkpointing: activations of a part are not kept but recomputed in the backward pass."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from konkanivani.models.twin import replace_modules
from konkanivani.models.whisper.model import Attention
from konkanivani.randomness import MaskCounters, counted_dropout, dropout_generator, dropout_state, mask_counters

Result = TypeVar("Result")
Part = TypeVar("Part", bound=torch.nn.Module)


# Attention operators on a CPU and on CUDA: a third of a block's work, whose result is as small as the block's input.
ATTENTION = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
    if hasattr(torch.ops.aten, name)
]


recomputed_part: ContextVar[Callable[[], AbstractContextManager] | None] = ContextVar("recomputed_part", default=None)
"""Set, not None, inside of a checkpointed part, in its first forward pass as well as in its recomputation.

The value returns a context manager under which the result of the part's next attention is kept, or `nullcontext` if
results are not kept.

PyTorch's selective checkpointing inspects each operator in Python, which costs a third of a step on the GPU's host: so
it is entered for attention alone.
"""


class KeptAttention(Attention):
    """Twin of Whisper's attention, whose result is kept when a block is recomputed with `keeps_attention`."""

    def attend_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        next_context = recomputed_part.get() or nullcontext
        with next_context():
            return super().attend_heads(query, key, value, key_mask, is_causal)


def keep_attention(model: torch.nn.Module) -> None:
    """Replace Whisper's attention by twins whose results are kept when blocks are recomputed."""
    replace_modules(model, {Attention: KeptAttention})


class KeptResults:
    """Contexts that keep the results of a part's attentions in the forward pass and return them in the recomputation.

    A Whisper decoder block has two attentions. Each has a pair of contexts of its own: since PyTorch 2.14, entering the
    recomputation's context a second time counts as a second backward pass.
    """

    def __init__(self) -> None:
        self._restoring: deque[AbstractContextManager] = deque()

    def save_next(self) -> AbstractContextManager:
        """Return the context of the next attention in the forward pass."""
        saving, restoring = create_selective_checkpoint_contexts(ATTENTION)
        self._restoring.append(restoring)
        return saving

    def restore_next(self) -> AbstractContextManager:
        """Return the context of the next attention in the recomputation."""
        return self._restoring.popleft()


def run_recomputed(
    function: Callable[..., Result],
    *inputs: object,
    keeps_random_state: bool = False,
    keeps_attention: bool = False,
    input_place: torch.device | None = None,
) -> Result:
    """Return the function's result, dropping its activations and recomputing them in backward (Chen et al., 2016).

    Args:
        keeps_random_state: restore the random generators for the recomputation. Needed unless the function draws no
            random numbers or draws them from its inputs alone.
        keeps_attention: keep the results of `KeptAttention`, so that attention is not recomputed.
        input_place: device on which the first input waits for the recomputation (default: its own). The other inputs,
            which all blocks share, stay.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    # PyTorch restores its default generators, but knows nothing of the one that dropout draws from in this thread.
    counters = mask_counters()
    masks = dropout_generator() if keeps_random_state and counters is None else None
    state = None if masks is None else masks.get_state()
    # Copied: the first pass counts on.
    counters = None if counters is None else counters.copy()

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        if not keeps_attention:
            return _recomputation_context(nullcontext, None, None), _recomputation_context(nullcontext, state, counters)
        saved_results = KeptResults()
        return _recomputation_context(saved_results.save_next, None, None), _recomputation_context(
            saved_results.restore_next, state, counters
        )

    is_default = keeps_random_state and masks is None and counters is None
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=is_default, context_fn=contexts)
    if input_place is None:
        return run(function, *inputs)
    first, *remaining = inputs
    assert isinstance(first, torch.Tensor)
    # The hooks apply to tensors that the checkpoint saves: its only input, as the others are bound to the function.
    with saved_tensors_hooks(lambda saved: saved.to(input_place), partial(_move_to, first.device)):
        return run(lambda value: function(value, *remaining), first)


def _move_to(device: torch.device, saved: torch.Tensor) -> torch.Tensor:
    return saved.to(device)


@contextmanager
def _recomputation_context(
    keeper: Callable[[], AbstractContextManager], state: torch.Tensor | None, counters: MaskCounters | None
) -> Iterator[None]:
    """Set `recomputed_part` and, with a `state` or counters, let dropout draw the masks of the forward pass again."""
    token = recomputed_part.set(keeper)
    try:
        with (
            nullcontext() if state is None else dropout_state(state),
            nullcontext() if counters is None else counted_dropout(counters.copy()),
        ):
            yield
    finally:
        recomputed_part.reset(token)


def snapshot_parameters(module: Part) -> Part:
    """Return the module bound to its current weights, for a part of it that is recomputed later.

    Weights swapped in for one call (torch.func.functional_call) are swapped out again before the backward pass.
    """
    if all(isinstance(weight, torch.nn.Parameter) for weight in module.parameters()):
        return module
    # The memo keeps the weights themselves from being copied.
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
