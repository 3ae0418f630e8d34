"""Matrix products in fp32, on some processors by another library than PyTorch's own choice.

On a CPU PyTorch gives them to Intel's MKL, which keeps AVX-512 for Intel's processors: on one of AMD's that has it they
run at half the machine's rate. oneDNN, which PyTorch brings too and convolves with, takes what it finds.

M rows, K inputs, N outputs.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HAS_OPERATOR = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # PyTorch's own, without a public name
MIN_ROWS = 64  # with fewer, laying out the matrix for oneDNN takes as long as it saves
Gradients = Any  # what autograd takes: one, or a tuple of which each may be None


def fast_linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows (..., M, K) by the transpose of matrix (N, K) in any layout, plus bias (N,): (..., M, N)."""
    if is_by_onednn(rows) and rows.numel() >= MIN_ROWS * rows.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
    return F.linear(rows, matrix, bias)


def weight_gradient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The transpose of left (M, N) by right (M, K): (N, K), the gradient of a layer's weights."""
    if is_by_onednn(left) and min(left.shape[1], right.shape[1]) >= MIN_ROWS:
        # oneDNN's linear layer wants its rows one after another: a copy, which takes a tenth of the product.
        return torch.ops.mkldnn._linear_pointwise(left.t().contiguous(), right.t(), None, "none", [], "")
    return left.t() @ right


def is_by_onednn(rows: torch.Tensor) -> bool:
    """Whether products of these rows are made by oneDNN."""
    if not is_onednn_preferred() or rows.device.type != "cpu" or rows.dtype != torch.float32:
        return False
    return not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting()


def is_onednn_preferred() -> bool:
    """Whether this process makes its fp32 products by oneDNN."""
    return HAS_OPERATOR and _is_onednn_faster() and torch.backends.mkldnn.enabled


@functools.cache
def _is_onednn_faster() -> bool:
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")


def in_own_precision(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A Function's `backward` in the precision of what it is given, whether or not it is called inside of autocast.

    PyTorch advises against calling it there, and does not refuse it: every product of fp32 would be rounded to bf16,
    and on a CPU a convolution of ours in bf16 may never end (depthwise.py).
    """

    @functools.wraps(backward)
    def unsurrounded(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        device = gradients[0].device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, *gradients)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return unsurrounded
