"""GPUs known by name, free memory of the host, and memory that training takes besides the traced tensors.

Does not import torch.

Memory is the size that PyTorch reports, slightly below the nominal size. Compute capabilities are from NVIDIA's list
(developer.nvidia.com/cuda-gpus).
"""

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from konkanivani.config import TrainConfig
from konkanivani.console import GIB, MIB, parse_budget
from konkanivani.errors import UsageError

# --------------------
# Free memory of the host, within the limits of the process's control groups (containers, Slurm, systemd).


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
NO_LIMIT = 2**62
# Limit, use, and the part of the use that is cache of files and can be freed at once, for versions 2 and 1:
# https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int:
    """Return the bytes of host memory that this process can still allocate without swapping."""
    return min([_system_available(), *map(_left_in_cgroup, _memory_cgroups())])


def _system_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 4 * 2**30  # unknown: assume a small machine


def _memory_cgroups() -> list[Path]:
    """Return the folders of the process's control groups for memory and of all their parents."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    # In a container, the group's path may be the host's, which does not exist: the root has the limits.
    folders = [CGROUPS, CGROUPS / "memory"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = CGROUPS if not controllers else CGROUPS / "memory"
        if not controllers or "memory" in controllers.split(","):
            folder = root / path.lstrip("/")
            folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(folders))


def _left_in_cgroup(folder: Path) -> int:
    """Return the bytes left under the limit of a control group; NO_LIMIT if it has none."""
    for limit, use, cache in CGROUP_FILES:
        try:
            left = int((folder / limit).read_text()) - int((folder / use).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return left + int(statistics.get(cache, 0))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return NO_LIMIT


# --------------------
# Memory that training takes on a device in addition to the traced tensors. Does not import torch.


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
    graphs: int = 0
    """Bytes of captured graphs besides the tensors of the largest micro-batch; 0 without --cuda_graphs."""

    @property
    def beside(self) -> int:
        """Sum of all fixed costs."""
        return self.workspace + self.context + self.among_ranks + self.graphs

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


# --------------------
# GPUs known by name, with their memory and compute capability. Does not import torch.


@dataclass(frozen=True)
class Gpu:
    """A GPU: usable memory in bytes, compute capability, and nominal memory in GB."""

    name: str
    memory: int
    capability: tuple[int, int]
    box: int | None = None


def _read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in known_gpus.csv; of several sizes, the first and smallest is the default of the name."""
    with open(Path(__file__).with_name("known_gpus.csv"), encoding="utf-8") as file:
        return tuple(
            Gpu(row["name"], int(float(row["usable_gib"]) * GIB), (int(major), int(minor)), int(row["box_gb"]))
            for row in csv.DictReader(file)
            for major, minor in [row["capability"].split(".")]
        )


KNOWN_GPUS = _read_gpus()
# GPUs of compute capability 3.x or less, for which the supported builds of PyTorch have no kernels.
_TOO_OLD = re.compile(r"k([124]0[cmx]?|80|520|[1-6]000)|titan(black|z)?|(gt)?[4-6]\d\d(ti|m)?|7[6-8]0(ti|m)?|gt7[1-4]0")

_MAKER = re.compile(r"\b(nvidia|geforce|tesla|quadro|gpu|graphics|card|v?ram|pcie?|sxm\d?|hbm\d?e?)\b")
_SERIES = re.compile(r"\b(generation|blackwell|lovelace|workstation|server|edition)\b")
_SLIM = re.compile(r"\b(with )?max q( design)?\b")
_SIZE = re.compile(r"\b(\d+) ?g(?:i?b)?\b")


def find_gpu(name: str) -> Gpu:
    """Return the known GPU with this name in any spelling; raises a UsageError that suggests similar names."""
    wanted, size = _plain_name(name)
    if _TOO_OLD.fullmatch(wanted):
        raise UsageError(
            f"--gpu {name}: PyTorch does not support a GPU this old (compute capability below 5.0). Train on "
            "the CPU, and plan with --memory_budget alone, for example 4GiB."
        )
    # Exact name first; then a laptop GPU, or the desktop GPU of the same number.
    spellings = wanted, f"{wanted}laptop", wanted.removesuffix("laptop")
    matching = [gpu for spelling in spellings for gpu in KNOWN_GPUS if _plain_name(gpu.name)[0] == spelling]
    for gpu in matching:
        if size in (None, gpu.box):
            return gpu
    if matching:
        sizes = " or ".join(f"{box} GB" for box in sorted({gpu.box for gpu in matching if gpu.box is not None}))
        raise UsageError(
            f"--gpu {name}: it exists with {sizes}. Add the size to the name, or give --memory_budget, for example "
            "8GiB."
        )
    names = {_plain_name(gpu.name)[0]: gpu.name for gpu in reversed(KNOWN_GPUS)}
    near = [names[near_name] for near_name in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)]
    examples = (
        f"The most similar known names are {', '.join(near)}"
        if near
        else "Known GPUs are for example GTX 980, RTX 3060 or T4"
    )
    raise UsageError(
        f"--gpu {name} is not a known GPU. {examples}. Or give its memory as --memory_budget, for example 8GiB."
    )


def _plain_name(name: str) -> tuple[str, int | None]:
    """Return the name as one lower-case word without vendor and series words, and the memory in GB that it names."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("notebook", "laptop").replace("mobile", "laptop")
    words = _SERIES.sub(" ", _MAKER.sub(" ", _SLIM.sub(" laptop ", words)))
    size = _SIZE.search(words)
    word = re.sub(r"\s+", "", _SIZE.sub(" ", words)).replace("laptoplaptop", "laptop")
    # The number identifies a GPU: "3060" is RTX 3060, and "A4000" is RTX A4000.
    return re.sub(r"^(gtx(?=titan)|[rg]tx(?=a?\d))", "", word), int(size.group(1)) if size else None


@dataclass(frozen=True)
class PlanTarget:
    """Device to plan for: its fixed costs, and the budget in bytes; 0 if none is given."""

    costs: DeviceCosts
    budget: int


def find_target(config: TrainConfig, gpu: str | None, needs_budget: bool = True) -> PlanTarget:
    """Return the target of a plan: the GPU of this name, or the device of the configuration, and its budget.

    Raises a UsageError for an unknown GPU, a contradiction, or a missing budget if one is needed.
    """
    target_gpu = find_gpu(gpu) if gpu else None
    budget = config.memory.memory_budget
    if needs_budget and not (target_gpu or budget):
        raise UsageError("Give --memory_budget, for example 4GiB, or --gpu with the name of a GPU.")
    if target_gpu and config.run.device == "cpu":
        raise UsageError(f"--device cpu contradicts --gpu {gpu}: give only one of them.")
    size = parse_budget(budget) if budget else target_gpu.memory if target_gpu else 0
    if target_gpu is None and config.run.device != "cuda":
        return PlanTarget(cpu_costs(), size)
    # --device cuda without --gpu: assume Turing, compute capability 7.5.
    target_gpu = target_gpu or Gpu("a CUDA GPU", size, (7, 5))
    return PlanTarget(cuda_costs(target_gpu.name, target_gpu.capability), size)
