"""The Conformer's convolution on a CPU in half precision: correct and without a hang."""

import pytest
import torch

from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import ConvolutionModule
from konkanivani.ops.products import depthwise_conv
from tests.fork_server import fork_server

CONVOLVE = """
import torch
from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import ConvolutionModule
from konkanivani.ops.products import use_fast_depthwise
torch.set_num_threads({threads})
module, x = ConvolutionModule({width}, 31), torch.randn(1, {frames}, {width}, requires_grad=True)
if {is_fast}:
    use_fast_depthwise(module)
with torch.autocast("cpu", dtype=torch.bfloat16):
    module(x, SequenceLayout()).float().sum().backward()
print(x.grad.isfinite().all().item())
"""


def test_bf16_convolution_equals_rounded_fp32_convolution():
    torch.manual_seed(0)
    module = ConvolutionModule(48, 31)
    x = torch.randn(2, 40, 48).bfloat16()
    expected = module.depthwise(x.float(), SequenceLayout())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = depthwise_conv(x, module.depthwise, (40,))
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected.bfloat16())
    other = module.depthwise(x.float().flip(1), SequenceLayout())
    assert not torch.allclose(actual, other.bfloat16(), atol=0.1)  # negative control


# Sixteen channels per thread: the bf16 kernel of oneDNN, used here before, never finished on AVX-512.
@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize(("threads", "width", "frames"), [(2, 32, 58), (8, 128, 200), (1, 16, 31)])
def test_bf16_convolution_finishes_with_any_number_of_threads(threads, width, frames, is_fast):
    program = CONVOLVE.format(threads=threads, width=width, frames=frames, is_fast=is_fast)
    ended = fork_server().run_program(program)
    assert ended.stdout.strip() == "True", ended.stderr
