"""Dropout against its definition: rate, scale, gradient, and independence of neighbours."""

import pytest
import torch

from konkanivani.models.conformer import draw_mask
from konkanivani.ops.fused import MaskedDropout
from konkanivani.randomness import GOLDEN, MaskCounters, derive_seed


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_dropout_has_its_rate_and_keeps_the_mean(share):
    torch.manual_seed(1)
    dropped = MaskedDropout(share)(torch.ones(1_000_003))
    zeros = float((dropped == 0).double().mean())
    assert abs(zeros - share) < 4 * (share * (1 - share) / 1e6) ** 0.5
    assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / (1 - share)))
    assert abs(float(dropped.double().mean()) - 1) < 0.01


def test_mask_bits_are_uniform_and_independent():
    torch.manual_seed(2)
    mask = draw_mask(torch.empty(400_000, 4), 0.5).double() - 0.5
    assert float(mask.mean(dim=0).abs().max()) < 0.004
    correlation = mask.T @ mask / len(mask) * 4 - torch.eye(4, dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.01
    assert float((mask[1:] * mask[:-1]).mean().abs()) < 0.002


def test_gradient_uses_the_mask_of_the_forward_pass():
    torch.manual_seed(3)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    y = MaskedDropout(0.3)(x)
    y.backward(torch.ones_like(y))
    assert torch.allclose(x.grad * x.detach(), y.detach())
    assert 0 < int((x.grad == 0).sum()) < x.numel()


def test_mask_depends_on_seed_and_eval_mode_is_identity():
    x, dropout = torch.randn(33, 3), MaskedDropout(0.4)
    torch.manual_seed(4)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(4)
    assert torch.equal(first, dropout(x)) and not torch.equal(first, second)
    assert dropout.eval()(x) is x and MaskedDropout(0.0)(x) is x


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_add_residual_equals_dropout_and_sum(weight):
    dropout, results = MaskedDropout(0.3), []
    x, branch = (torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    upstream = torch.randn(7, 5, dtype=torch.float64)
    for apply in (dropout.add_residual, lambda x, branch, weight: x + weight * dropout(branch)):
        torch.manual_seed(5)
        y = apply(x, branch, weight)
        results.append((y.detach(), *torch.autograd.grad(y, (x, branch), upstream)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert 0 < int((results[0][2] == 0).sum()) < branch.numel()
    assert torch.equal(dropout.eval().add_residual(x, branch, weight), torch.add(x, branch, alpha=weight))


def test_add_residual_of_bf16_branch_keeps_fp32_residual():
    x, branch = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True)
    y = MaskedDropout(0.3).add_residual(x, branch)
    y.sum().backward()
    assert y.dtype == torch.float32 and branch.grad.dtype == torch.bfloat16


def counted_bits(rows: int = 4, frames: int = 300, channels: int = 64, block: int = 1, seed: int = 0) -> torch.Tensor:
    """Return the bits of a mask as numbers from -0.5 to 0.5."""
    seeds = torch.tensor([derive_seed(seed, row) for row in range(rows)])
    return MaskCounters(seeds, block).draw_bits(frames, channels).double() / 2**16


def test_counted_masks_are_uniform_and_independent():
    bits = counted_bits()
    count = bits.numel()
    assert abs(float(bits.mean())) < 4 * (1 / 12 / count) ** 0.5
    assert abs(float(bits.var()) - 1 / 12) < 0.001
    occurrences = torch.histc(bits, bins=16, min=-0.5, max=0.5)
    assert float(((occurrences - count / 16) ** 2 / (count / 16)).sum()) < 40  # chi-square of 15 degrees of freedom
    # Neighbouring rows, frames and channels, other masks, blocks and seeds.
    others = [
        bits[1:] * bits[:-1],
        bits[:, 1:] * bits[:, :-1],
        bits[..., 1:] * bits[..., :-1],
        bits[..., 4:] * bits[..., :-4],
        bits * counted_bits(block=2),
        bits * counted_bits(seed=1),
    ]
    for product in others:
        assert abs(float(product.mean())) < 4 / 12 / product.numel() ** 0.5
    # Negative control: the same numbers.
    assert float((bits * counted_bits()).mean()) > 0.08


def test_counted_masks_do_not_depend_on_batch_or_length():
    whole = counted_bits(rows=4, frames=300)
    assert torch.equal(counted_bits(rows=2, frames=120), whole[:2, :120])
    counters = MaskCounters(torch.tensor([3, 4]))
    first = counters.draw_bits(5, 6)
    again = counters.copy()
    second = counters.draw_bits(5, 6)
    assert torch.equal(again.draw_bits(5, 6), second) and not torch.equal(first, second)


def test_counted_bits_equal_splitmix64():
    seeds = torch.tensor([derive_seed(7, row) for row in range(2)])
    counters = MaskCounters(seeds, block=3)
    counters.draw_bits(1, 1)
    bits = counters.draw_bits(20, 30)  # the second mask of block 3: 8 groups of channels per frame

    def mixed(number: int) -> int:
        """Return SplitMix64's finaliser in Python's integers."""
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        return number ^ number >> 31

    site = mixed(((3 << 32) + 2) * GOLDEN % 2**64)
    for row, frame, group in ((0, 0, 0), (1, 19, 6), (1, 5, 2)):
        number = mixed(((frame * 8 + group) * GOLDEN + (int(seeds[row]) ^ site)) % 2**64)
        lanes = [(number >> 16 * lane) % 2**16 for lane in range(4)]
        expected = [lane - 2**16 if lane >= 2**15 else lane for lane in lanes]
        assert bits[row, frame, 4 * group : 4 * group + 4].tolist() == expected
