"""Matrix products and depthwise convolutions of a CPU, in faster layouts.

M rows, K inputs (of a convolution: kernel size), N outputs; B batch, T frames or tokens, D input or model width.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from konkanivani.lengths import Lengths
from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import DepthwiseConv
from konkanivani.models.fine_tuning import AdaptedLinear
from konkanivani.models.twin import replace_modules, twin_of
from konkanivani.ops.packing import PackedLayout, SpanwiseDepthwiseConv
from konkanivani.ops.recompute import recomputed_part

# --------------------
# Matrix products in fp32, by oneDNN if it is faster, and linear layers that keep little for the backward pass.
#
# On a CPU, PyTorch computes products with Intel's MKL, which uses AVX-512 on Intel's processors only: on an AMD
# processor with AVX-512 they run at half the machine's rate. oneDNN, which PyTorch bundles and uses for convolutions,
# uses the instructions that it finds.
#
# By default, autograd keeps the input and the output of a LayerNorm and of an activation, although either is cheap to
# compute from the other: two fifths of a Conformer block's activations. `fused_linear` keeps only the input, which a
# residual connection usually keeps anyway (the idea: Chen et al., 2016; for norms: Bulò et al., 2018).


HAS_OPERATOR = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # PyTorch's own operator, not part of its public API
MIN_ROWS = 64  # with fewer rows, reordering the matrix for oneDNN costs the time that the product saves
# oneDNN spends a millisecond on generating code for each new product size, and batches have new sizes all the time: a
# smaller product takes less than that altogether.
MIN_MULTIPLICATIONS = 2**25
Gradients = Any  # return type of a Function's backward: a tensor, or a tuple whose elements may be None
Backward = tuple[torch.Tensor | None, ...]
Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS = {F.silu: torch.ops.aten.silu_backward, F.gelu: torch.ops.aten.gelu_backward}
"""Activations that `fused_linear` supports, each with its backward operator; GELU is exact."""


def fast_linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows (..., M, K) times the transpose of matrix (N, K), in any layout, plus bias (N,): (..., M, N)."""
    if is_by_onednn(rows, *matrix.shape):
        return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
    return F.linear(rows, matrix, bias)


def add_product(total: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor) -> None:
    """Add rows (M, K) times the transpose of matrix (N, K) to total (M, N), in place."""
    if rows.dtype != total.dtype or is_by_onednn(rows, *matrix.shape):
        total += fast_linear(rows, matrix)
    else:
        torch.addmm(total, rows, matrix.t(), out=total)


def weight_gradient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a layer's weights: the transpose of left (M, N) times right (M, K), (N, K)."""
    if is_by_onednn(left, right.shape[1], len(left)):
        # oneDNN's linear layer needs contiguous rows: a copy, which takes a tenth of the product's time.
        return torch.ops.mkldnn._linear_pointwise(left.t().contiguous(), right.t(), None, "none", [], "")
    return left.t() @ right


def is_by_onednn(rows: torch.Tensor, outputs: int, inputs: int) -> bool:
    """Return whether to compute the product of `rows`, of `inputs` numbers each, with oneDNN: faster if it is large."""
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or not is_onednn_preferred():
        return False
    if rows.numel() < MIN_ROWS * inputs or rows.numel() * outputs < MIN_MULTIPLICATIONS:
        return False
    # Under autocast the product is in half precision; an exporter does not know PyTorch's private operator.
    return not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting()


def is_onednn_preferred() -> bool:
    """Return whether this process computes its large fp32 products with oneDNN."""
    return HAS_OPERATOR and _is_onednn_faster() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _is_onednn_faster() -> bool:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")


def without_autocast(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate a Function's `backward` to run in the precision of its inputs, even if called inside autocast.

    PyTorch advises against calling backward inside autocast but does not refuse it: every fp32 product would be rounded
    to bf16, and on a CPU a bf16 convolution may never terminate (`FastDepthwiseConv`).
    """

    @functools.wraps(backward)
    def undisturbed(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        device = gradients[0].device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return undisturbed


class Weighted(Protocol):
    """Weights of a `fused_linear`: weight (N, D), bias (N,) or None."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


def fused_linear(
    x: torch.Tensor, linear: Weighted, norm: torch.nn.LayerNorm | None = None, activation: Activation | None = None
) -> torch.Tensor:
    """Return linear(activation(norm(x))) of x (B, T, D); norm and activation are optional.

    In autocast the product is in half precision; the norm is in at least fp32 on every device.
    """
    low_rank = linear.low_rank if isinstance(linear, AdaptedLinear) else None
    # The plain layers' products stay PyTorch's.
    is_fast = type(linear) not in (torch.nn.Linear, AdaptedLinear)
    is_checkpointed = recomputed_part.get() is not None
    if low_rank is None and torch.is_grad_enabled() and not is_checkpointed:
        scale, shift, epsilon = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        return _Linear.apply(x, linear.weight, linear.bias, scale, shift, epsilon, activation, is_fast)
    normed = x if norm is None else norm(_to_fp32(x))
    inner = activation(normed) if activation else normed
    # In a checkpointed part activations are kept only briefly, so the norm is left to plain autograd, which is faster.
    # The product is too under autocast. In full precision it stays `_Linear`, whose backward pass leaves autocast: if
    # backward were called inside of autocast, plain autograd would round the fp32 operands to half precision.
    if torch.is_grad_enabled() and not (is_checkpointed and torch.is_autocast_enabled(inner.device.type)):
        out = _Linear.apply(inner, linear.weight, linear.bias, None, None, 0.0, None, is_fast)
    else:
        out = _product(is_fast)(inner, _cast_weight(linear.weight, inner), linear.bias)
    return out if low_rank is None else out + low_rank(inner)


def fused_linears(
    x: torch.Tensor, linears: Sequence[Weighted], norm: torch.nn.LayerNorm | None = None
) -> tuple[torch.Tensor, ...]:
    """Return linear(norm(x)) of x (B, T, D) for each of the linears, with one norm and one cast of x for all.

    The result and the precisions are those of `fused_linear`.
    """
    is_checkpointed = recomputed_part.get() is not None
    is_adapted = any(isinstance(linear, AdaptedLinear) for linear in linears)
    is_graph_kept = torch.is_grad_enabled() and not is_adapted
    if norm is not None and (is_checkpointed or not is_graph_kept):
        x = norm(_to_fp32(x))
        norm = None
    if not is_graph_kept:
        return tuple(fused_linear(x, linear) for linear in linears)
    scale, shift, epsilon = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    is_fast = type(linears[0]) is not torch.nn.Linear
    weights = [part for linear in linears for part in (linear.weight, linear.bias)]
    return _Linears.apply(x, scale, shift, epsilon, is_fast, is_checkpointed, *weights)


class FastLinear(torch.nn.Linear):
    """Twin of a linear layer, computed by `fused_linear` and by oneDNN if that is faster."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(x, self)


class FastAdaptedLinear(AdaptedLinear):
    """Twin of `AdaptedLinear`, computed by `fused_linear` and by oneDNN if that is faster."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(x, self)


class PointwiseConv(torch.nn.Conv2d):
    """Twin of a 1 x 1 convolution of (B, C, T, F), as a matrix product: a quarter of oneDNN's time on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.compiler.is_exporting() else _PointwiseConv.apply(x, self.weight, self.bias)


def use_fast_products(model: torch.nn.Module) -> None:
    """Replace linear layers and 1 x 1 convolutions by twins with faster products on a CPU."""
    replace_modules(model, {torch.nn.Linear: FastLinear, AdaptedLinear: FastAdaptedLinear})
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Conv2d and child.kernel_size == (1, 1):
                setattr(module, name, twin_of(child, PointwiseConv))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor | None,
        shift: torch.Tensor | None,
        epsilon: float,
        activation: Activation | None,
        is_fast: bool,
    ) -> torch.Tensor:
        ctx.is_fast = is_fast
        ctx.epsilon = epsilon
        ctx.activation = activation
        ctx.save_for_backward(x, weight, scale, shift)
        # Only x is saved: the norm and the activation are computed again in the backward pass.
        if scale is not None:
            x, _, _ = _normalize(x, scale, shift, epsilon)
        inner = activation(x) if activation else x
        rows = _product(is_fast)(inner.flatten(0, -2), _cast_weight(weight, x), bias)
        # _unsafe_view is not a view to autograd, so queries and keys may be rotated in place.
        return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], -1])

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> Backward:
        x, weight, scale, shift = ctx.saved_tensors
        normed = x
        if scale is not None:
            normed, mean, inverse_deviation = _normalize(x, scale, shift, ctx.epsilon)
        inner = (ctx.activation(normed) if ctx.activation else normed).to(gradient.dtype)
        rows = gradient.flatten(0, -2)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            columns = inner.flatten(0, -2)
            grad_weight = weight_gradient(rows, columns) if ctx.is_fast else rows.t() @ columns
            del columns
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        del inner  # freed before the next product allocates its output
        # A frozen layer at the bottom of the network needs neither the input's nor the norm's gradient.
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            return None, grad_weight, grad_bias, None, None, None, None, None
        grad_inner = _product(ctx.is_fast)(rows, weight.to(gradient.dtype).t()).view_as(x).to(normed.dtype)
        if ctx.activation:
            grad_inner = ACTIVATIONS[ctx.activation](grad_inner, normed)
        if scale is None:
            return grad_inner, grad_weight, grad_bias, None, None, None, None, None
        del normed
        grad_x, grad_scale, grad_shift = torch.ops.aten.native_layer_norm_backward(
            grad_inner, _to_fp32(x), scale.shape, mean, inverse_deviation, scale, shift, [True, True, True]
        )
        return grad_x, grad_weight, grad_bias, grad_scale, grad_shift, None, None, None


class _Linears(torch.autograd.Function):
    """Several linear layers of one input, whose gradients are summed before the norm's backward pass."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        shift: torch.Tensor | None,
        epsilon: float,
        is_fast: bool,
        is_checkpointed: bool,
        *weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.is_fast = is_fast
        ctx.epsilon = epsilon
        ctx.dtype = x.dtype
        inner = x if scale is None else _normalize(x, scale, shift, epsilon)[0]
        matrices = [weight for weight in weights[::2] if weight is not None]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inner = inner.to(dtype)
            multiplied = [weight.to(dtype) for weight in matrices]
        else:
            multiplied = [_cast_weight(weight, inner) for weight in matrices]
        # In a checkpointed part activations are kept only briefly: as they were multiplied, without another cast.
        saved = [inner, *multiplied] if is_checkpointed else [x, *matrices]
        ctx.save_for_backward(scale, shift, *saved)
        rows = inner.flatten(0, -2)
        products = (
            _product(is_fast)(rows, matrix, bias) for matrix, bias in zip(multiplied, weights[1::2], strict=True)
        )
        return tuple(torch.ops.aten._unsafe_view(product, [*x.shape[:-1], -1]) for product in products)

    @staticmethod
    @without_autocast
    def backward(ctx, *gradients: torch.Tensor) -> Backward:
        scale, shift, x, *matrices = ctx.saved_tensors
        dtype = gradients[0].dtype
        inner = x
        if scale is not None:
            inner, mean, inverse_deviation = _normalize(x, scale, shift, ctx.epsilon)
        columns = inner.to(dtype).flatten(0, -2)
        needs_inner = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        full = ctx.dtype if scale is None else inner.dtype
        del inner
        grad_inner = None
        grad_weights: list[torch.Tensor | None] = []
        # Backwards, as autograd sums.
        for number in reversed(range(len(matrices))):
            rows = gradients[number].flatten(0, -2)
            needs_weight, needs_bias = ctx.needs_input_grad[6 + 2 * number : 8 + 2 * number]
            grad_bias = rows.sum(0) if needs_bias else None
            grad_weight = None
            if needs_weight:
                grad_weight = weight_gradient(rows, columns) if ctx.is_fast else rows.t() @ columns
            grad_weights = [grad_weight, grad_bias, *grad_weights]
            if needs_inner:
                product = _product(ctx.is_fast)(rows, matrices[number].to(dtype).t())
                # Added in full precision, in the kernel that casts.
                grad_inner = product.to(full) if grad_inner is None else grad_inner.add_(product)
                del product
        del columns
        if grad_inner is None:
            return (None,) * 6 + tuple(grad_weights)
        grad_inner = grad_inner.view_as(x)
        if scale is None:
            return grad_inner, None, None, None, None, None, *grad_weights
        grad_x, grad_scale, grad_shift = torch.ops.aten.native_layer_norm_backward(
            grad_inner, _to_fp32(x), scale.shape, mean, inverse_deviation, scale, shift, [True, True, True]
        )
        return grad_x, grad_scale, grad_shift, None, None, None, *grad_weights


class _PointwiseConv(torch.autograd.Function):
    """1 x 1 convolution by `torch.baddbmm`, whose own backward would run in bf16 if called inside autocast."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.baddbmm(bias[:, None], weight.flatten(1).expand(len(x), -1, -1), x.flatten(2))
        return torch.ops.aten._unsafe_view(out, x.shape)  # no view to autograd: the caller zeroes padding in place

    @staticmethod
    @without_autocast
    def backward(ctx, gradient: torch.Tensor) -> Backward:
        x, weight = (tensor.to(gradient.dtype) for tensor in ctx.saved_tensors)
        grad_out = gradient.flatten(2)
        grad_x = (weight.flatten(1).t() @ grad_out).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = (grad_out @ x.flatten(2).mT).sum(0).view_as(weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_out.sum((0, 2)) if ctx.needs_input_grad[2] else None


def _product(is_fast: bool) -> Callable[..., torch.Tensor]:
    return fast_linear if is_fast else F.linear


def _cast_weight(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the weight cast to x's precision if it is stored in another one; the copy lives for one product."""
    # Autocast casts weights itself.
    return weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype)


def _normalize(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the LayerNorm of x in at least fp32, the means and the inverse standard deviations."""
    return torch.native_layer_norm(_to_fp32(x), scale.shape, scale, shift, epsilon)


def _to_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# --------------------
# Depthwise convolution of the Conformer along frames, with fast CPU forward and backward passes.


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
