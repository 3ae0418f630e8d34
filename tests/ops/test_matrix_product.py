"""Matrix products through oneDNN against double precision, and the conditions for their use."""

import pytest
import torch

from konkanivani.ops import products
from konkanivani.ops.products import MIN_ROWS, fast_linear, weight_gradient
from tests.tracers import OperationCounter

SHAPES = [(391, 256, 1024), (391, 1024, 256), (MIN_ROWS, 512, 1024), (97, 360, 1000)]


@pytest.fixture(autouse=True)
def use_onednn_on_any_processor(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch was built without oneDNN")
    monkeypatch.setattr(products, "_is_onednn_faster", lambda: True)


def onednn_calls(function, *inputs) -> int:
    with OperationCounter() as calls:
        function(*inputs)
    return calls.counts[torch.ops.mkldnn._linear_pointwise.default]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows, inputs, outputs", SHAPES)
def test_all_products_of_a_linear_layer_are_accurate(rows, inputs, outputs):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    gradient = torch.randn(rows, outputs)
    doubles = [tensor.double() for tensor in (x, weight, bias, gradient)]
    cases = [
        (fast_linear, (x, weight, bias), doubles[0] @ doubles[1].t() + doubles[2]),
        (fast_linear, (x, weight), doubles[0] @ doubles[1].t()),
        (fast_linear, (gradient, weight.t()), doubles[3] @ doubles[1]),
        (weight_gradient, (gradient, x), doubles[3].t() @ doubles[0]),
    ]
    for function, tensors, expected in cases:
        assert onednn_calls(function, *tensors) == 1
        assert relative_error(function(*tensors), expected) < 1e-6
        with torch.backends.mkldnn.flags(enabled=False):
            assert onednn_calls(function, *tensors) == 0
            assert relative_error(function(*tensors), expected) < 1e-6
        # Negative control: one changed element of a factor is detected.
        changed = tensors[0].clone()
        changed[0, 0] += 0.1
        assert relative_error(function(changed, *tensors[1:]), expected) > 1e-5


def test_batch_dimensions_are_flattened_to_rows():
    x, weight, bias = torch.randn(2, 140, 256), torch.randn(512, 256), torch.randn(512)
    assert onednn_calls(fast_linear, x, weight, bias) == 1
    assert torch.equal(fast_linear(x, weight, bias).flatten(0, 1), fast_linear(x.flatten(0, 1), weight, bias))


def test_result_does_not_depend_on_memory_alignment():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(391, 256), torch.randn(1024, 256), torch.randn(1024)
    expected = fast_linear(x, weight, bias)
    for offset in range(1, 17):
        moved = torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x)
        assert torch.equal(fast_linear(moved, weight, bias), expected)


def test_small_double_and_autocast_products_do_not_use_onednn():
    x, weight = torch.randn(MIN_ROWS, 512), torch.randn(1040, 512)
    assert onednn_calls(fast_linear, x, weight) == 1
    assert onednn_calls(fast_linear, x[1:], weight) == 0
    assert onednn_calls(fast_linear, x, weight[:1000]) == 0
    assert onednn_calls(fast_linear, x.double(), weight.double()) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onednn_calls(fast_linear, x, weight) == 0
        assert fast_linear(x, weight).dtype == torch.bfloat16
