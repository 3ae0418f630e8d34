"""What training takes on a device beside the tensors that a trace sees, and the cards that are known by name. No torch.

The card's memory is what its driver leaves to programs, as nvidia-smi shows it; the compute capability is NVIDIA's list
(developer.nvidia.com/cuda-gpus).
"""

from dataclasses import dataclass

from konkanivani.budget import GIB, MIB
from konkanivani.errors import UsageError

FIRST_WITH_BF16 = (8, 0)
FIRST_WITH_LARGE_WORKSPACE = (9, 0)


@dataclass(frozen=True)
class Gpu:
    """A card: usable memory in bytes, and its compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


def _gpu(name: str, gib: float, capability: tuple[int, int]) -> Gpu:
    return Gpu(name, int(gib * GIB), capability)


KNOWN_GPUS = (
    _gpu("GTX 960", 3.9, (5, 2)),
    _gpu("GTX 970", 3.9, (5, 2)),
    _gpu("GTX 980", 3.9, (5, 2)),
    _gpu("GTX 980 Ti", 5.9, (5, 2)),
    _gpu("GTX 1050 Ti", 3.9, (6, 1)),
    _gpu("GTX 1060", 5.9, (6, 1)),
    _gpu("GTX 1070", 7.9, (6, 1)),
    _gpu("GTX 1080", 7.9, (6, 1)),
    _gpu("GTX 1080 Ti", 10.9, (6, 1)),
    _gpu("GTX 1650", 3.8, (7, 5)),
    _gpu("GTX 1660", 5.8, (7, 5)),
    _gpu("RTX 2060", 5.8, (7, 5)),
    _gpu("RTX 2070", 7.8, (7, 5)),
    _gpu("RTX 2080 Ti", 10.7, (7, 5)),
    _gpu("RTX 3050", 7.8, (8, 6)),
    _gpu("RTX 3060", 11.8, (8, 6)),
    _gpu("RTX 3070", 7.8, (8, 6)),
    _gpu("RTX 3080", 9.8, (8, 6)),
    _gpu("RTX 3090", 23.7, (8, 6)),
    _gpu("RTX 4060", 7.7, (8, 9)),
    _gpu("RTX 4070", 11.7, (8, 9)),
    _gpu("RTX 4090", 23.6, (8, 9)),
    _gpu("P100", 15.9, (6, 0)),
    _gpu("T4", 14.7, (7, 5)),
    _gpu("V100", 15.8, (7, 0)),
    _gpu("L4", 22.2, (8, 9)),
    _gpu("A10", 22.2, (8, 6)),
    _gpu("A100", 39.4, (8, 0)),
    _gpu("H100", 79.2, (9, 0)),
)


def find_gpu(name: str) -> Gpu:
    """The known card of this name, however it is written; a UsageError lists the known ones."""
    wanted = _plain(name)
    for gpu in KNOWN_GPUS:
        if _plain(gpu.name) == wanted:
            return gpu
    known = ", ".join(gpu.name for gpu in KNOWN_GPUS)
    raise UsageError(f"--gpu {name} is not a card known here. Give --memory_budget instead, or one of: {known}.")


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))


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

    Measured beside the tensors (two threads, docs/LOG.md): 180 to 370 MiB in a step of one length, 330 to 390 MiB after
    many steps of mixed ones. The process itself, Python and PyTorch as imported, is not part of a CPU's budget.
    """
    return DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=300 * MIB, context=0)


def cuda_costs(name: str, capability: tuple[int, int], context: int | None = None) -> DeviceCosts:
    """A CUDA card; `context` in bytes as measured, or None where there is no card to measure it on.

    PyTorch's allocator hands out multiples of 512 bytes (CUDACachingAllocator), takes 8.125 MiB for cuBLAS and up to 4
    MiB for cuBLASLt, from Hopper on 32 MiB for each (CublasHandlePool, CUDABlas). 16 MiB for cuDNN's convolutions and
    450 MiB for a context with its kernels are assumptions on the safe side, not yet measured here.
    """
    matrix_products = 64 * MIB if capability >= FIRST_WITH_LARGE_WORKSPACE else 8 * MIB + 128 * 1024 + 4 * MIB
    return DeviceCosts(
        name,
        is_cuda=True,
        rounding=512,
        workspace=matrix_products + 16 * MIB,
        context=450 * MIB if context is None else context,
    )
