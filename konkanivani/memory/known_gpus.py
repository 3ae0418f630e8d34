"""The cards that are known by name, with their memory. No torch here.

Memory is what PyTorch finds on such a card, a little below what its box says; the compute capability is NVIDIA's list
(developer.nvidia.com/cuda-gpus).
"""

import difflib
import re
from dataclasses import dataclass

from konkanivani.base.errors import UsageError
from konkanivani.base.units import GIB


@dataclass(frozen=True)
class Gpu:
    """A card: usable memory in bytes, and its compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


# Compute capability, then for each card the GB on its box and the GiB that can be used; of several sizes the smallest
# comes first, which stands for the name alone.
_CARDS = {
    (5, 0): (
        *(("GTX 750", 1, 0.9), ("GTX 750 Ti", 2, 1.9), ("GTX 950M", 2, 1.9), ("GTX 960M", 2, 1.9)),
        *(("940MX", 2, 1.9), ("MX130", 2, 1.9), ("Quadro K2200", 4, 3.9), ("Quadro M2000M", 4, 3.9)),
    ),
    (5, 2): (
        *(("GTX 950", 2, 1.9), ("GTX 960", 4, 3.9), ("GTX 960 2GB", 2, 1.9), ("GTX 970", 4, 3.9)),
        *(("GTX 980", 4, 3.9), ("GTX 980 Ti", 6, 5.9), ("TITAN X", 12, 11.8), ("Quadro M4000", 8, 7.9)),
        *(("Quadro M6000", 12, 11.8), ("M40", 12, 11.1), ("M40 24GB", 24, 22.3), ("M60", 8, 7.4)),
    ),
    (6, 0): (("P100", 16, 15.9), ("P100 12GB", 12, 11.9)),
    (6, 1): (
        *(("GTX 1050", 2, 1.9), ("GTX 1050 3GB", 3, 2.9), ("GTX 1050 Ti", 4, 3.9), ("GTX 1060", 6, 5.9)),
        *(("GTX 1060 3GB", 3, 2.9), ("GTX 1070", 8, 7.9), ("GTX 1070 Ti", 8, 7.9), ("GTX 1080", 8, 7.9)),
        *(("GTX 1080 Ti", 11, 10.9), ("TITAN Xp", 12, 11.9), ("MX150", 2, 1.9), ("MX250", 2, 1.9)),
        *(("MX330", 2, 1.9), ("MX350", 2, 1.9), ("Quadro P400", 2, 1.9), ("Quadro P620", 2, 1.9)),
        *(("Quadro P1000", 4, 3.9), ("Quadro P2000", 5, 4.9), ("Quadro P4000", 8, 7.9)),
        *(("Quadro P5000", 16, 15.8), ("Quadro P6000", 24, 23.8), ("P4", 8, 7.4), ("P40", 24, 22.3)),
    ),
    (7, 0): (("V100", 16, 15.8), ("V100 32GB", 32, 31.7), ("TITAN V", 12, 11.7)),
    (7, 5): (
        *(("GTX 1650", 4, 3.8), ("GTX 1650 Ti", 4, 3.8), ("GTX 1650 Super", 4, 3.8), ("GTX 1660", 6, 5.8)),
        *(("GTX 1660 Ti", 6, 5.8), ("GTX 1660 Super", 6, 5.8), ("RTX 2060", 6, 5.8), ("RTX 2060 12GB", 12, 11.7)),
        *(("RTX 2060 Super", 8, 7.8), ("RTX 2070", 8, 7.8), ("RTX 2070 Super", 8, 7.8), ("RTX 2080", 8, 7.8)),
        *(("RTX 2080 Super", 8, 7.8), ("RTX 2080 Ti", 11, 10.7), ("TITAN RTX", 24, 23.6), ("MX450", 2, 1.9)),
        *(("MX550", 2, 1.9), ("T4", 16, 14.7), ("T400", 2, 1.9), ("T400 4GB", 4, 3.8), ("T600", 4, 3.8)),
        *(("T1000", 4, 3.8), ("T1000 8GB", 8, 7.7), ("T1200", 4, 3.8), ("T2000", 4, 3.8)),
        *(("Quadro RTX 3000", 6, 5.8), ("Quadro RTX 4000", 8, 7.8), ("Quadro RTX 5000", 16, 15.7)),
        *(("Quadro RTX 6000", 24, 23.6), ("Quadro RTX 8000", 48, 47.3)),
    ),
    (8, 0): (("A100", 40, 39.4), ("A100 80GB", 80, 79.1), ("A30", 24, 23.5)),
    (8, 6): (
        *(("RTX 2050 Laptop", 4, 3.8), ("RTX 3050", 8, 7.8), ("RTX 3050 6GB", 6, 5.8)),
        *(("RTX 3050 Laptop", 4, 3.8), ("RTX 3050 Laptop 6GB", 6, 5.8), ("RTX 3050 Ti Laptop", 4, 3.8)),
        *(("RTX 3060", 12, 11.8), ("RTX 3060 8GB", 8, 7.8), ("RTX 3060 Laptop", 6, 5.8), ("RTX 3060 Ti", 8, 7.8)),
        *(("RTX 3070", 8, 7.8), ("RTX 3070 Ti", 8, 7.8), ("RTX 3080", 10, 9.8), ("RTX 3080 12GB", 12, 11.7)),
        *(("RTX 3080 Laptop", 8, 7.8), ("RTX 3080 Laptop 16GB", 16, 15.7), ("RTX 3080 Ti", 12, 11.7)),
        *(("RTX 3080 Ti Laptop", 16, 15.7), ("RTX 3090", 24, 23.7), ("RTX 3090 Ti", 24, 23.6), ("MX570", 2, 1.9)),
        *(("RTX A1000", 8, 7.7), ("RTX A1000 Laptop", 4, 3.8), ("RTX A2000", 6, 5.7), ("RTX A2000 12GB", 12, 11.6)),
        *(("RTX A2000 Laptop", 4, 3.8), ("RTX A4000", 16, 15.7), ("RTX A4500", 20, 19.6), ("RTX A5000", 24, 23.6)),
        *(("RTX A5500", 24, 23.6), ("RTX A6000", 48, 47.4), ("A2", 16, 14.5), ("A10", 24, 22.2), ("A10G", 24, 22.0)),
        *(("A16", 16, 14.5), ("A40", 48, 44.3)),
    ),
    (8, 9): (
        *(("RTX 4050 Laptop", 6, 5.7), ("RTX 4060", 8, 7.7), ("RTX 4060 Ti", 8, 7.7), ("RTX 4060 Ti 16GB", 16, 15.6)),
        *(("RTX 4070", 12, 11.7), ("RTX 4070 Laptop", 8, 7.7), ("RTX 4070 Super", 12, 11.7)),
        *(("RTX 4070 Ti", 12, 11.7), ("RTX 4070 Ti Super", 16, 15.6), ("RTX 4080", 16, 15.6)),
        *(("RTX 4080 Super", 16, 15.6), ("RTX 4080 Laptop", 12, 11.7), ("RTX 4090", 24, 23.6)),
        *(("RTX 4090 Laptop", 16, 15.6), ("RTX 2000 Ada", 16, 15.6), ("RTX 4000 Ada", 20, 19.5)),
        *(("RTX 4500 Ada", 24, 23.5), ("RTX 5000 Ada", 32, 31.4), ("RTX 6000 Ada", 48, 47.3)),
        *(("L4", 24, 22.2), ("L40", 48, 44.3), ("L40S", 48, 44.3)),
    ),
    (9, 0): (("H100", 80, 79.2), ("H100 NVL", 94, 93.0), ("H200", 141, 139.7)),
    (10, 0): (("B200", 180, 177.0),),
    (12, 0): (
        *(("RTX 5050", 8, 7.6), ("RTX 5060", 8, 7.6), ("RTX 5060 Ti", 8, 7.6), ("RTX 5060 Ti 16GB", 16, 15.5)),
        *(("RTX 5070", 12, 11.5), ("RTX 5070 Laptop", 8, 7.6), ("RTX 5070 Ti", 16, 15.5)),
        *(("RTX 5070 Ti Laptop", 12, 11.5), ("RTX 5080", 16, 15.5), ("RTX 5090", 32, 31.3)),
        *(("RTX 5090 Laptop", 24, 23.4), ("RTX PRO 6000", 96, 94.5)),
    ),
}
KNOWN_GPUS = tuple(
    Gpu(name, int(gib * GIB), capability) for capability, cards in _CARDS.items() for name, _, gib in cards
)
_BOXES = tuple(gb for cards in _CARDS.values() for _, gb, _ in cards)
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
            f"--gpu {name}: PyTorch has no kernels for a card as old as this (compute capability below 5.0, that of a "
            "GTX 750). Train on the CPU, and plan for that with --memory_budget alone, for example 4GiB."
        )
    boxes = list(zip(KNOWN_GPUS, _BOXES, strict=True))
    named = [(gpu, gb) for way in _ways(wanted) for gpu, gb in boxes if _plain(gpu.name)[0] == way]
    for gpu, gb in named:
        if size in (None, gb):
            return gpu
    if named:
        sizes = " or ".join(f"{gb} GB" for gb in sorted({gb for _, gb in named}))
        raise UsageError(f"--gpu {name}: it is known with {sizes}. Give that, or --memory_budget, for example 8GiB.")
    names = {_plain(gpu.name)[0]: gpu.name for gpu in reversed(KNOWN_GPUS)}
    near = [names[one] for one in difflib.get_close_matches(wanted, names, n=4, cutoff=0.5)]
    examples = f"The nearest known are {', '.join(near)}" if near else "Known are cards such as GTX 980, RTX 3060 or T4"
    raise UsageError(
        f"--gpu {name} is not a card known here. {examples}. Or give --memory_budget with its memory, for example 8GiB."
    )


def _ways(plain: str) -> tuple[str, ...]:
    """A name, then what else it may mean: that of a laptop's card, or a laptop's that is like the one on a desk."""
    return plain, f"{plain}laptop", plain.removesuffix("laptop")


def _plain(name: str) -> tuple[str, int | None]:
    """The name as one lower-case word without its maker's words, and the GB that it names."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("notebook", "laptop").replace("mobile", "laptop")
    words = _SERIES.sub(" ", _MAKER.sub(" ", _SLIM.sub(" laptop ", words)))
    size = _SIZE.search(words)
    word = re.sub(r"\s+", "", _SIZE.sub(" ", words)).replace("laptoplaptop", "laptop")
    # Cards are told apart by their numbers: 3060 is RTX 3060, and A4000 RTX A4000.
    return re.sub(r"^(gtx(?=titan)|[rg]tx(?=a?\d))", "", word), int(size.group(1)) if size else None
