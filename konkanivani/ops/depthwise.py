"""Depthwise convolution of the Conformer along frames, with fast CPU forward and backward passes.

B batch, T frames, D model width, K kernel size.
"""

import functools
import operator

import torch
import torch.nn.functional as F

from konkanivani.lengths import Lengths
from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import DepthwiseConv
from konkanivani.models.twin import replace_modules
from konkanivani.ops.packing import PackedLayout, SpanwiseDepthwiseConv
from konkanivani.ops.products import without_autocast


class FastDepthwiseConv(SpanwiseDepthwiseConv):
    """Twin of `DepthwiseConv` and of its packed twin; other devices than a CPU use PyTorch's kernels."""

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:  # type: ignore[override]
        if x.device.type != "cpu":
            return super().forward(x, layout)
        if layout.padding is not None:
            x = x.masked_fill(layout.padding[:, :, None], 0.0)
        lengths = layout.lengths if isinstance(layout, PackedLayout) else (x.shape[1],)
        return depthwise_conv(x, self, lengths)


def use_fast_depthwise(model: torch.nn.Module) -> None:
    """Replace depthwise convolutions by twins with a faster backward pass on a CPU."""
    replace_modules(model, {DepthwiseConv: FastDepthwiseConv, SpanwiseDepthwiseConv: FastDepthwiseConv})


def depthwise_conv(x: torch.Tensor, depthwise: torch.nn.Conv1d, lengths: Lengths) -> torch.Tensor:
    """Convolve x (B, T, D) along T with `depthwise` on a CPU, in full precision under autocast too: (B, T, D).

    The kernel size must be odd and the padding must keep the length. Each span of `lengths`, which add up to T, is
    convolved separately.
    """
    # In bf16 the convolution may never terminate, see DepthwiseConv.
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return depthwise_conv(x.to(depthwise.weight.dtype), depthwise, lengths).to(x.dtype)
    if torch.is_grad_enabled():
        return _DepthwiseConv.apply(x, depthwise.weight, depthwise.bias, lengths)
    return _convolve_spans(x, depthwise.weight, depthwise.bias, lengths)


class _DepthwiseConv(torch.autograd.Function):
    """Depthwise convolution whose kernel gradient is computed as a convolution of x by the gradient, of T frames.

    oneDNN's own kernel gradient is 3 to 13 times slower, growing with the utterance (docs/experiments.md). Inside
    autocast the backward pass is in full precision as well, since in bf16 it might never terminate.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        ctx.save_for_backward(x, kernel)
        ctx.lengths = lengths
        return _convolve_spans(x, kernel, bias, lengths)

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        grad_x = None
        grad_kernel = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            # The gradient of the input is a correlation with the flipped kernel.
            grad_x = _convolve_spans(gradient, kernel.flip(2), None, ctx.lengths)
        if ctx.needs_input_grad[1]:
            pairs = zip(gradient.split(ctx.lengths, dim=1), x.split(ctx.lengths, dim=1), strict=True)
            grad_kernel = functools.reduce(operator.add, (_kernel_gradient(*pair, kernel.shape[2]) for pair in pairs))
        if ctx.needs_input_grad[2]:
            grad_bias = gradient.sum((0, 1))
        return grad_x, grad_kernel, grad_bias, None


def _convolve_spans(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, lengths: Lengths) -> torch.Tensor:
    if len(lengths) == 1:
        return _convolve(x, kernel, bias)
    return torch.cat([_convolve(span, kernel, bias) for span in x.split(lengths, dim=1)], dim=1)


def _convolve(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve x (B, T, D) with kernel (D, 1, K): (B, T, D)."""
    # As a conv2d of images one frame high, in channels-last layout, which is D's layout already: the same numbers ten
    # times as fast as conv1d, which reorders to channels first.
    reach = kernel.shape[2] // 2
    out = F.conv2d(_as_image(x), kernel.unsqueeze(2), bias, padding=(0, reach), groups=x.shape[2])
    return out.squeeze(2).transpose(1, 2)


def _kernel_gradient(gradient: torch.Tensor, x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the gradient by a kernel (D, 1, size), given the input x and the output's gradient, both (B, T, D)."""
    # B x D channels: each utterance's channels are convolved with their own gradient, then summed over B.
    batch, frames, width = x.shape
    image, kernel = (_as_image(part.transpose(0, 1).reshape(1, frames, batch * width)) for part in (x, gradient))
    out = F.conv2d(image, kernel.transpose(0, 1), padding=(0, size // 2), groups=batch * width)
    return out.view(batch, width, 1, size).sum(0)


def _as_image(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).unsqueeze(2)
