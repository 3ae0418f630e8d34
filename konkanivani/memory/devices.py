"""Memory that training takes on a device in addition to the traced tensors. Does not import torch."""

from dataclasses import dataclass

from konkanivani.console import MIB

FIRST_WITH_LARGE_WORKSPACE = (9, 0)


@dataclass(frozen=True)
class DeviceCosts:
    """Fixed costs of a device in bytes; `rounding` is the granularity of the allocator.

    `workspace` is kept by libraries for matrix products and convolutions, `context` is allocated before the first
    tensor. `among_ranks` is the difference of multi-rank training to a single process; it may be negative.
    """

    name: str
    is_cuda: bool
    rounding: int
    workspace: int
    context: int
    among_ranks: int = 0

    @property
    def beside(self) -> int:
        """Sum of all fixed costs."""
        return self.workspace + self.context + self.among_ranks

    def attention_workspace(self, utterances: int, frames: int, d_model: int, is_half: bool) -> int:
        """Return the bytes of the fp32 sums of the gradients of query, key and value in half-precision attention."""
        # The kernel accumulates half-precision gradients in fp32 buffers of its own.
        return 3 * 4 * utterances * frames * d_model if self.is_cuda and is_half else 0


def cpu_costs() -> DeviceCosts:
    """Return the costs of a CPU: libraries loaded at the start of training, per-thread buffers, and heap fragmentation.

    Measured with two threads, without tensors: 180 to 370 MiB in a step of one length, 330 to 390 MiB after many steps
    of mixed lengths (docs/experiments.md). The imported Python and PyTorch are not part of a CPU's budget.
    """
    return DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=300 * MIB, context=0)


def cuda_costs(name: str, capability: tuple[int, int], context: int | None = None) -> DeviceCosts:
    """Return the costs of a CUDA GPU; `context` is the measured size in bytes, or None without a GPU to measure.

    PyTorch's allocator hands out multiples of 512 bytes (CUDACachingAllocator). 16 MiB for convolutions and 450 MiB for
    a context with its kernels are assumed.
    """
    # PyTorch takes 8.125 MiB for cuBLAS and up to 4 MiB for cuBLASLt, from Hopper on 32 MiB for each (CublasHandlePool,
    # CUDABlas).
    matrix_products = 64 * MIB if capability >= FIRST_WITH_LARGE_WORKSPACE else 8 * MIB + 128 * 1024 + 4 * MIB
    return DeviceCosts(
        name,
        is_cuda=True,
        rounding=512,
        workspace=matrix_products + 16 * MIB,
        context=450 * MIB if context is None else context,
    )
