"""The CPU convolutions equal the modules of PyTorch, in float64."""

import pytest
import torch

from konkanivani.models.conformer import Subsampling
from konkanivani.ops.products import PointwiseConv, depthwise_conv
from tests.invariants.parts import relative_difference

BOUND = 1e-12


def gradients(output: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of a weighted sum of all output elements, each with a different weight."""
    counts = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
    return list(torch.autograd.grad((output * counts).sum(), of))


def differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(relative_difference(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("batch", "lengths"), [(1, (40,)), (3, (7,)), (2, (33,)), (1, (20, 5, 31)), (1, (1, 1)), (1, (1600,))]
)
@pytest.mark.parametrize("kernel", [3, 31])
def test_convolution_over_frames_equals_conv1d_of_each_span(batch, lengths, kernel):
    torch.manual_seed(0)
    module = torch.nn.Conv1d(6, 6, kernel, padding=kernel // 2, groups=6).double()
    x = torch.randn(batch, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    parameters = [x, module.weight, module.bias]
    ours = depthwise_conv(x, module, lengths)
    spans = [module(span.transpose(1, 2)).transpose(1, 2) for span in x.split(lengths, dim=1)]
    theirs = torch.cat(spans, dim=1)
    assert differences([ours, *gradients(ours, parameters)], [theirs, *gradients(theirs, parameters)]) < BOUND
    with torch.no_grad():
        assert torch.equal(depthwise_conv(x, module, lengths), ours)


def test_negative_control_convolution_across_spans_differs():
    torch.manual_seed(0)
    module = torch.nn.Conv1d(6, 6, 31, padding=15, groups=6).double()
    x = torch.randn(1, 40, 6, dtype=torch.float64)
    assert relative_difference(depthwise_conv(x, module, (20, 20)), depthwise_conv(x, module, (40,))) > 1e-2


def test_pointwise_convolution_equals_conv2d():
    torch.manual_seed(0)
    module = PointwiseConv(6, 6, 1).double()
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    parameters, conv2d = [x, module.weight, module.bias], torch.nn.functional.conv2d
    ours, theirs = module(x), conv2d(*parameters)
    assert differences([ours, *gradients(ours, parameters)], [theirs, *gradients(theirs, parameters)]) < BOUND
    assert relative_difference(conv2d(x, module.weight.transpose(0, 1), module.bias), ours) > 1e-2


def test_subsampling_in_half_precision_is_rounded_once():
    """Convolutions are computed in full precision, also under autocast."""
    torch.manual_seed(0)
    subsampling, features = Subsampling(80, 8, 16), torch.randn(2, 60, 80)
    full = subsampling(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = subsampling(features)
    assert half.dtype == torch.bfloat16
    assert 0 < relative_difference(half.float(), full) < 1e-2
