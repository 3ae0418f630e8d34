"""What training takes on a device beside the tensors that a trace sees. No torch."""

from dataclasses import dataclass

from konkanivani.base.units import MIB

FIRST_WITH_LARGE_WORKSPACE = (9, 0)


@dataclass(frozen=True)
class DeviceCosts:
    """Bytes beside the tensors; `rounding` is what the allocator rounds each of them up to a multiple of.

    `workspace` is what the libraries keep for matrix products and convolutions, `context` what the process takes before
    its first tensor. `among_ranks` is what training takes more, or less, than alone where several ranks share it.
    """

    name: str
    is_cuda: bool
    rounding: int
    workspace: int
    context: int
    among_ranks: int = 0

    @property
    def beside(self) -> int:
        """All of it."""
        return self.workspace + self.context + self.among_ranks

    def attention_workspace(self, utterances: int, frames: int, d_model: int, is_half: bool) -> int:
        """Bytes of the fp32 sums of one attention's three gradients, where those are in half precision."""
        return 3 * 4 * utterances * frames * d_model if self.is_cuda and is_half else 0


def cpu_costs() -> DeviceCosts:
    """A CPU: what libraries load when training starts and hold for each thread, and the holes that freed tensors leave.

    Measured on two threads, without the tensors: 180 to 370 MiB in a step of one length, 330 to 390 MiB after many
    steps of mixed lengths (docs/experiments.md). Python and PyTorch as imported are not part of a CPU's budget.
    """
    return DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=300 * MIB, context=0)


def cuda_costs(name: str, capability: tuple[int, int], context: int | None = None) -> DeviceCosts:
    """A CUDA card; `context` in bytes as measured, or None where there is no card to measure it on.

    PyTorch's allocator hands out multiples of 512 bytes (CUDACachingAllocator), takes 8.125 MiB for cuBLAS and up to 4
    MiB for cuBLASLt, from Hopper on 32 MiB for each (CublasHandlePool, CUDABlas). 16 MiB for convolutions and 450 MiB
    for a context with its kernels are assumed.
    """
    matrix_products = 64 * MIB if capability >= FIRST_WITH_LARGE_WORKSPACE else 8 * MIB + 128 * 1024 + 4 * MIB
    return DeviceCosts(
        name,
        is_cuda=True,
        rounding=512,
        workspace=matrix_products + 16 * MIB,
        context=450 * MIB if context is None else context,
    )
