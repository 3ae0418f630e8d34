"""Gradients that products add up, against those that autograd adds up."""

import pytest
import torch

from konkanivani.data.batch import Batch, Speech, collate, in_lanes_order
from konkanivani.model.kernels.gradient_accumulation import added_by_products
from konkanivani.model.kernels.linear import Linear
from tests.laws.parts import relative_difference


def summed(parts: int, adds: bool, asked: list[torch.Tensor] | None = None, uses: int = 1) -> Linear:
    """A layer after so many backward passes, each through `uses` of it."""
    torch.manual_seed(0)
    layer = Linear(5, 3).double()
    await_turn = (lambda weight: None) if asked is None else asked.append
    for _ in range(parts):
        x = torch.randn(2, 4, 5, dtype=torch.float64)
        loss = sum(layer(number * x).cos().sum() for number in range(1, uses + 1))
        if adds:
            with added_by_products(await_turn):
                loss.backward()
        else:
            loss.backward()
    return layer


@pytest.mark.parametrize("uses", [1, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sums_are_those_of_autograd(parts, uses):
    ours, theirs = (summed(parts, adds, uses=uses) for adds in (True, False))
    for name in ("weight", "bias"):
        found, expected = getattr(ours, name).grad, getattr(theirs, name).grad
        assert relative_difference(found, expected) < 1e-14
    less = summed(parts - 1, True, uses=uses).weight.grad  # the negative control
    assert less is None or relative_difference(ours.weight.grad, less) > 1e-3


def test_each_weight_waits_for_its_turn_before_it_is_added_to():
    asked: list[torch.Tensor] = []
    layer = summed(3, True, asked)
    assert len(asked) == 3 and all(weight is layer.weight for weight in asked)


def test_hooks_of_a_parameter_are_called_once_a_backward_pass_whoever_adds():
    torch.manual_seed(0)
    layer, called = Linear(5, 3), []
    layer.weight.register_hook(lambda gradient: called.append("before"))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: called.append("after"))
    for _ in range(2):
        with added_by_products(lambda weight: None):
            (layer(torch.randn(1, 4, 5)) + layer(torch.randn(1, 4, 5))).sum().backward()
    assert called == ["before", "after"] * 2


def test_elsewhere_a_gradient_is_autograds():
    layer = Linear(5, 3)
    layer.weight.grad = torch.zeros_like(layer.weight)
    (found,) = torch.autograd.grad(layer(torch.ones(1, 4, 5)).sum(), [layer.weight])
    assert found.abs().sum() > 0 == layer.weight.grad.abs().sum()


def batch_of(*samples: int) -> Batch:
    return collate([Speech(str(n), torch.zeros(n), [4], None) for n in samples], start=2, end=3)


@pytest.mark.parametrize(
    ("at_once", "order"), [(1, [10, 40, 20, 30]), (2, [30, 40, 20, 10]), (3, [20, 30, 40, 10]), (8, [10, 20, 30, 40])]
)
def test_side_by_side_the_costliest_come_first_and_wait_for_none(at_once, order):
    given = tuple(batch_of(n) for n in (10, 40, 20, 30))
    ordered = in_lanes_order(given, at_once)
    assert [sum(batch.sample_lengths) for batch in ordered] == order
    assert in_lanes_order(ordered, at_once) == ordered
