"""The memory-saving linear layer and the in-place rotary positions equal the plain formulas under autograd."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from konkanivani.models.attention import RotaryPositions, SelfAttention, SequenceLayout
from konkanivani.ops.products import fused_linear

VARIANTS = [(with_norm, activation) for with_norm in (False, True) for activation in (None, F.silu, F.gelu)]


def build(with_norm: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.nn.Linear, object]:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(6, dtype=dtype) if with_norm else None
    if norm:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    return torch.randn(2, 5, 6, dtype=dtype, requires_grad=True), torch.nn.Linear(6, 4, dtype=dtype), norm


def plain_linear(x, linear, norm, activation):
    x = norm(x) if norm else x
    return linear(activation(x) if activation else x)


def result_and_gradients(function, x, linear, norm, activation) -> list[torch.Tensor]:
    tensors = [x, *linear.parameters(), *(norm.parameters() if norm else ())]
    output = function(x, linear, norm, activation)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), tensors)]


@pytest.mark.parametrize("with_norm, activation", VARIANTS)
def test_fused_linear_and_gradients_equal_autograd(with_norm, activation):
    parts = build(with_norm)
    expected = result_and_gradients(plain_linear, *parts, activation)
    actual = result_and_gradients(fused_linear, *parts, activation)
    assert len(actual) == len(expected) == (6 if with_norm else 4)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    another = result_and_gradients(fused_linear, *parts, {None: F.silu, F.silu: F.gelu, F.gelu: F.silu}[activation])
    assert not any(torch.allclose(one, other) for one, other in zip(another[:3], expected[:3], strict=True))


@pytest.mark.parametrize("with_norm, activation", VARIANTS)
def test_autocast_output_is_bf16_and_gradients_are_fp32(with_norm, activation):
    parts = build(with_norm, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused_linear(*parts, activation)
        result = result_and_gradients(fused_linear, *parts, activation)
    assert output.dtype == torch.bfloat16 and all(gradient.dtype == torch.float32 for gradient in result[1:])
    for one, other in zip(result, result_and_gradients(plain_linear, *parts, activation), strict=True):
        assert float((one - other).norm()) < 0.02 * float(other.norm())


def kept_bytes(function, x, linear, norm, activation) -> int:
    """Return the bytes kept for the backward pass in addition to x and the parameters."""
    known = {tensor.untyped_storage()._cdata for tensor in [x, *linear.parameters(), *norm.parameters()]}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = function(x, linear, norm, activation)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)


def test_fused_linear_saves_only_its_input_for_backward():
    parts = build(with_norm=True)
    assert kept_bytes(fused_linear, *parts, activation=F.gelu) == 0
    assert kept_bytes(plain_linear, *parts, activation=F.gelu) >= 2 * parts[0].nbytes


def test_saved_input_is_freed_during_the_backward_pass():
    x, linear, norm = build(with_norm=True)
    events, middle = [], x * 2
    middle.register_hook(lambda gradient: events.append("the backward pass reaches what comes before"))
    inner = middle * 3
    weakref.finalize(inner.untyped_storage(), events.append, "freed")
    output = fused_linear(inner, linear, norm, activation=F.gelu).sum()
    del inner
    assert events == []
    output.backward()
    assert events == ["freed", "the backward pass reaches what comes before"]


def rotate(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate vectors (B, T, H, E): components j and j + E / 2 as complex numbers times e^(i angle)."""
    pairs = torch.complex(*vectors.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_attention_equals_complex_rotation(causal):
    torch.manual_seed(0)
    attention, norm = SelfAttention(12, heads=3, causal=causal).double(), torch.nn.LayerNorm(12).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    angles = torch.arange(7)[:, None] * 10_000.0 ** -(torch.arange(0, 4, 2) / 4)[None, :].double()
    query, key, value = attention.query_key_value(norm(x)).view(2, 7, 3, 3, 4).unbind(2)
    scores = torch.einsum("bthe,bshe->bhts", rotate(query, angles), rotate(key, angles)) / 2
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    expected = attention.output(torch.einsum("bhts,bshe->bthe", scores.softmax(-1), value).flatten(2))
    actual = attention(norm(x), SequenceLayout(RotaryPositions(4)(7, x)))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    parameters = [x, *attention.parameters(), *norm.parameters()]
    for one, other in zip(
        torch.autograd.grad(actual.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_gradients_without_bias_and_with_frozen_norm_equal_autograd():
    x, _, norm = build(with_norm=True)
    linear = torch.nn.Linear(6, 4, bias=False, dtype=torch.float64)
    norm.weight.requires_grad_(False)
    tensors = [x, linear.weight, norm.bias]
    actual = torch.autograd.grad(fused_linear(x, linear, norm, F.gelu).square().sum(), tensors)
    expected = torch.autograd.grad(plain_linear(x, linear, norm, F.gelu).square().sum(), tensors)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
