"""GPUs known by name, with their memory and compute capability. Does not import torch.

Memory is the size that PyTorch reports, slightly below the nominal size. Compute capabilities are from NVIDIA's list
(developer.nvidia.com/cuda-gpus).
"""

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from konkanivani.console import GIB
from konkanivani.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """A GPU: usable memory in bytes, compute capability, and nominal memory in GB."""

    name: str
    memory: int
    capability: tuple[int, int]
    box: int | None = None


def _read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in known_gpus.csv; of several sizes, the first and smallest is the default of the name."""
    with open(Path(__file__).with_suffix(".csv"), encoding="utf-8") as file:
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
    wanted, size = _plain(name)
    if _TOO_OLD.fullmatch(wanted):
        raise UsageError(
            f"--gpu {name}: PyTorch does not support a GPU this old (compute capability below 5.0). Train on "
            "the CPU, and plan with --memory_budget alone, for example 4GiB."
        )
    # Exact name first; then a laptop GPU, or the desktop GPU of the same number.
    ways = wanted, f"{wanted}laptop", wanted.removesuffix("laptop")
    named = [gpu for way in ways for gpu in KNOWN_GPUS if _plain(gpu.name)[0] == way]
    for gpu in named:
        if size in (None, gpu.box):
            return gpu
    if named:
        sizes = " or ".join(f"{box} GB" for box in sorted({gpu.box for gpu in named if gpu.box is not None}))
        raise UsageError(
            f"--gpu {name}: it exists with {sizes}. Add the size to the name, or give --memory_budget, for example "
            "8GiB."
        )
    names = {_plain(gpu.name)[0]: gpu.name for gpu in reversed(KNOWN_GPUS)}
    near = [names[one] for one in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)]
    examples = (
        f"The most similar known names are {', '.join(near)}"
        if near
        else "Known GPUs are for example GTX 980, RTX 3060 or T4"
    )
    raise UsageError(
        f"--gpu {name} is not a known GPU. {examples}. Or give its memory as --memory_budget, for example 8GiB."
    )


def _plain(name: str) -> tuple[str, int | None]:
    """Return the name as one lower-case word without vendor and series words, and the memory in GB that it names."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("notebook", "laptop").replace("mobile", "laptop")
    words = _SERIES.sub(" ", _MAKER.sub(" ", _SLIM.sub(" laptop ", words)))
    size = _SIZE.search(words)
    word = re.sub(r"\s+", "", _SIZE.sub(" ", words)).replace("laptoplaptop", "laptop")
    # The number identifies a GPU: "3060" is RTX 3060, and "A4000" is RTX A4000.
    return re.sub(r"^(gtx(?=titan)|[rg]tx(?=a?\d))", "", word), int(size.group(1)) if size else None
