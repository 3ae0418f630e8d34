"""Invariant 4: recomputing every block gives the same loss, gradients and buffers, bit for bit, with dropout."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from konkanivani.memory.plan import RecomputePolicy
from konkanivani.ops.packing import PackedEncoder
from konkanivani.randomness import seed_step
from konkanivani.training.step import StepParts, forward_and_backward, loss_counts
from tests.invariants.parts import KINDS, MODEL, double_parts, global_batch, speeches, with_dropout
from tests.tracers import OperationCounter

PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("addmm", "baddbmm", "mm", "convolution")]


def train_global_batch(parts: StepParts) -> tuple[list[torch.Tensor], int]:
    """Return the losses, gradients and buffers after a global batch, and its number of matrix products."""
    full_batch = global_batch(speeches(4), 2)
    seed_step(parts.seed, 5)
    parts.model.train()
    with OperationCounter() as calls:
        sums = [forward_and_backward(parts, batch, loss_counts(full_batch)) for batch in full_batch.micro_batches]
    tensors = [tensor for pair in sums for tensor in pair]
    tensors += [p.grad for p in parts.model.parameters()] + list(parts.model.buffers())
    return tensors, sum(calls.counts[product] for product in PRODUCTS)


@pytest.mark.parametrize("kind", ["conformer", "other parts"])
def test_recomputation_gives_bitwise_equal_gradients_with_dropout(kind):
    model = with_dropout(KINDS[kind], 0.3)
    kept, products = train_global_batch(double_parts(model, "never"))
    recomputed, recomputed_products = train_global_batch(double_parts(model, "always"))
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
    assert recomputed_products > 1.2 * products


def test_each_block_is_recomputed_exactly_once(monkeypatch):
    """Count matrix products: recomputation adds the forward products of each block, subsampling included."""
    monkeypatch.setattr(PackedEncoder, "packs", False)  # packing runs attention and convolution once per utterance
    per_global_batch, model = 2, with_dropout(MODEL, 0.3)
    products = [train_global_batch(double_parts(model, mode))[1] for mode in ("never", "always")]
    in_blocks = per_global_batch * (4 + 9 * MODEL.encoder_layers + 7 * MODEL.decoder_layers)
    assert products[1] - products[0] == in_blocks


def test_partial_recomputation_is_bitwise_equal_and_depends_on_length():
    model = with_dropout(MODEL, 0.3)
    counted = []
    for count in range(5):
        parts = double_parts(model)
        forward = dataclasses.replace(parts.forward, recompute=RecomputePolicy.first(count))
        tensors, products = train_global_batch(dataclasses.replace(parts, forward=forward))
        counted.append(products)
        assert all(
            torch.equal(one, other)
            for one, other in zip(train_global_batch(double_parts(model))[0], tensors, strict=True)
        )
    assert counted == sorted(set(counted))
    policy = RecomputePolicy("auto", ((5.0, 0), (9.0, 3)))
    assert [policy(seconds).count for seconds in (4.9, 5.0, 5.1, 9.0)] == [0, 0, 3, 3]
    assert policy(9.1) == RecomputePolicy("always")(1.0)


def test_negative_control_new_dropout_masks_change_gradient():
    model = with_dropout(MODEL, 0.3)
    kept, _ = train_global_batch(double_parts(model, "never"))
    parts = double_parts(model, "never")

    def checkpoint_without_rng(_number, block):
        return functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)

    forward = dataclasses.replace(parts.forward, recompute=lambda _seconds: checkpoint_without_rng)
    other, _ = train_global_batch(dataclasses.replace(parts, forward=forward))
    assert not all(torch.equal(one, two) for one, two in zip(kept, other, strict=True))
