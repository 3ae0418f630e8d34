"""Invariant 12: frozen weights do not change, and the trained ones get the same gradients as without freezing.

No gradient is computed for a frozen weight: the test counts the matrix products of a step.
"""

import dataclasses
import functools
from collections import Counter

import pytest
import torch

from konkanivani.models.asr import trained_parameters
from konkanivani.ops import products
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.optimizers import build_optimizer
from konkanivani.training.step import StepParts, forward_and_backward, loss_counts, train_step
from tests.invariants.parts import double_parts, global_batch, speeches

LAYERS = ("encoder.blocks.0.attention", "encoder.blocks.1.convolution", "decoder.blocks.1.feedforward", "ctc_head")
SPOKEN = speeches(4)


def parts_with(trained: str = "", concurrent_micro_batches: int = 1, recompute: str = "never") -> StepParts:
    """Return step parts that train only the parameters whose names start with `trained`."""
    parts = double_parts(recompute=recompute)
    for name, parameter in parts.model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    forward = dataclasses.replace(parts.forward, concurrent_micro_batches=concurrent_micro_batches)
    return dataclasses.replace(parts, forward=forward, optimizer=build_optimizer(parts.model, parts.schedule))


def gradients(parts: StepParts) -> dict[str, torch.Tensor]:
    """Return the gradients of a global batch in two micro-batches, by parameter name."""
    full_batch = global_batch(SPOKEN, 2)
    parts.model.train()
    for batch in full_batch.micro_batches:
        forward_and_backward(parts, batch, loss_counts(full_batch))
    return {name: p.grad for name, p in parts.model.named_parameters() if p.grad is not None}


whole_gradients = functools.cache(lambda: gradients(parts_with()))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradient_of_only_trained_layer_equals_full_training(layer, recompute):
    whole, alone = whole_gradients(), gradients(parts_with(layer, recompute=recompute))
    assert alone and alone.keys() == {name for name in whole if name.startswith(layer)}
    assert all(torch.equal(gradient, whole[name]) for name, gradient in alone.items())


@pytest.mark.parametrize("concurrent_micro_batches", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_training_steps_do_not_change_frozen_weights(layer, concurrent_micro_batches, two_threads):
    parts = parts_with(layer, concurrent_micro_batches)
    before = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    for number in range(2):
        assert not train_step(parts, global_batch(SPOKEN, 2), number).is_skipped
    changed = {name for name, tensor in parts.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(name.startswith(layer) for name in changed)
    state = OptimizerState(parts.model, parts.optimizer).state_dict()
    assert {name.rpartition("/")[0] for name in state} == {
        name for name, parameter in parts.model.named_parameters() if parameter.requires_grad
    }


def weight_products(parts: StepParts, monkeypatch: pytest.MonkeyPatch) -> Counter[torch.Size]:
    """Count the weight gradients that the linear layers compute in a global batch, by shape."""
    computed, product = Counter(), products.weight_gradient

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = product(left, right)
        computed[result.shape] += 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(products, "weight_gradient", counted)
        gradients(parts)
    return computed


@pytest.mark.parametrize("layer", LAYERS)
def test_no_gradient_is_computed_for_frozen_weights(layer, monkeypatch):
    parts = parts_with(layer)
    matrices = Counter(p.shape for p in trained_parameters(parts.model) if p.dim() == 2)
    computed = weight_products(parts, monkeypatch)
    assert computed == Counter({shape: 2 * count for shape, count in matrices.items()})  # two micro-batches
    assert weight_products(parts_with(), monkeypatch).total() > 3 * computed.total()  # negative control
