"""The cards that are known by name, with their memory. No torch here.

Memory is what PyTorch finds on such a card, a little below what its box says; the compute capability is NVIDIA's list
(developer.nvidia.com/cuda-gpus).
"""

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from konkanivani.base.errors import UsageError
from konkanivani.base.units import GIB


@dataclass(frozen=True)
class Gpu:
    """A card: usable memory in bytes, its compute capability, and the GB that its box names."""

    name: str
    memory: int
    capability: tuple[int, int]
    box: int | None = None


def _read_gpus() -> tuple[Gpu, ...]:
    """The cards of known_gpus.csv; of several sizes the smallest comes first, which stands for the name alone."""
    with open(Path(__file__).with_suffix(".csv"), encoding="utf-8") as file:
        return tuple(
            Gpu(row["name"], int(float(row["usable_gib"]) * GIB), (int(major), int(minor)), int(row["box_gb"]))
            for row in csv.DictReader(file)
            for major, minor in [row["capability"].split(".")]
        )


KNOWN_GPUS = _read_gpus()
# Their compute capability is 3.x or less, for which no build of PyTorch that we take holds kernels.
_TOO_OLD = re.compile(r"k([124]0[cmx]?|80|520|[1-6]000)|titan(black|z)?|(gt)?[4-6]\d\d(ti|m)?|7[6-8]0(ti|m)?|gt7[1-4]0")

_MAKER = re.compile(r"\b(nvidia|geforce|tesla|quadro|gpu|graphics|card|v?ram|pcie?|sxm\d?|hbm\d?e?)\b")
_SERIES = re.compile(r"\b(generation|blackwell|lovelace|workstation|server|edition)\b")
_SLIM = re.compile(r"\b(with )?max q( design)?\b")
_SIZE = re.compile(r"\b(\d+) ?g(?:i?b)?\b")


def find_gpu(name: str) -> Gpu:
    """The known card of this name, however it is written; a UsageError names the nearest ones that are known."""
    wanted, size = _plain(name)
    if _TOO_OLD.fullmatch(wanted):
        raise UsageError(
            f"--gpu {name}: PyTorch does not support a GPU this old (compute capability below 5.0). Train on "
            "the CPU, and plan with --memory_budget alone, for example 4GiB."
        )
    # Then what else it may mean: a laptop's card, or the one on a desk that a laptop's is like.
    ways = wanted, f"{wanted}laptop", wanted.removesuffix("laptop")
    named = [gpu for way in ways for gpu in KNOWN_GPUS if _plain(gpu.name)[0] == way]
    for gpu in named:
        if size in (None, gpu.box):
            return gpu
    if named:
        sizes = " or ".join(f"{box} GB" for box in sorted({gpu.box for gpu in named}))
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
    """The name as one lower-case word without its maker's words, and the GB that it names."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("notebook", "laptop").replace("mobile", "laptop")
    words = _SERIES.sub(" ", _MAKER.sub(" ", _SLIM.sub(" laptop ", words)))
    size = _SIZE.search(words)
    word = re.sub(r"\s+", "", _SIZE.sub(" ", words)).replace("laptoplaptop", "laptop")
    # Cards are told apart by their numbers: 3060 is RTX 3060, and A4000 RTX A4000.
    return re.sub(r"^(gtx(?=titan)|[rg]tx(?=a?\d))", "", word), int(size.group(1)) if size else None
