"""A weight's gradient added to its `.grad` by the very product that makes it.

Autograd writes a product first, then reads it and the sum and writes the sum: over all weights, once a micro-batch.

M rows, K inputs, N outputs.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from konkanivani.model.kernels.matmul import is_by_onednn, product_over_rows

_AWAIT_TURN: ContextVar[Callable[[torch.Tensor], None] | None] = ContextVar("await_turn", default=None)


@contextlib.contextmanager
def added_by_products(await_turn: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Backward passes in this thread add to `.grad` by products, each after `await_turn(weight)` has returned.

    Not for `torch.autograd.grad`, which leaves every `.grad` as it is.
    """
    token = _AWAIT_TURN.set(await_turn)
    try:
        yield
    finally:
        _AWAIT_TURN.reset(token)


def gradient_of(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The transpose of left (M, N) by right (M, K), for autograd to add to the gradient of `weight` (N, K).

    None where it has been added to `weight.grad` already: where that is there, and adding costs the product nothing.
    """
    await_turn = _AWAIT_TURN.get()
    if await_turn is None or not weight.is_leaf or is_by_onednn(left):
        return product_over_rows(left, right)
    await_turn(weight)
    if weight.grad is None or weight.grad.dtype != left.dtype:
        return product_over_rows(left, right)
    weight.grad.addmm_(left.t(), right)
    return None
