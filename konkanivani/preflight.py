"""What is checked before training starts, so that a mistake costs seconds and not hours."""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from konkanivani.config import MemoryConfig
from konkanivani.distributed import Topology, only_first_speaks, read_topology
from konkanivani.errors import ResourceError, UsageError
from konkanivani.memory.card import Card, read_card
from konkanivani.process_group import joined
from konkanivani.wording import count

TORCH_RANGE = ">=2.10,<2.12"  # that of setup.cfg; a test holds the two together
OLDEST_OF_DEFAULT_BUILD = (7, 5)  # CUDA 13 ends below Turing; the CUDA 12.6 build reaches back to Maxwell
OLDEST_OF_ALL_BUILDS = (5, 0)


def choose_device(asked: str) -> torch.device:
    """The device to train on; a ResourceError or UsageError says why the asked one cannot be had."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise UsageError(
            "--device cuda: PyTorch finds no usable NVIDIA GPU here. Train with --device cpu, or mend the driver."
        )
    if asked == "cpu" or not has_cuda:
        return torch.device("cpu")
    check_gpu_architecture(
        torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.__version__
    )
    torch.set_float32_matmul_precision("high")  # TF32 where the card has it
    return torch.device("cuda")


def take_card(topology: Topology) -> None:
    """Makes each rank's own card the current one; a UsageError where its machine has cards, but fewer than ranks.

    Nothing where there is no card, or one process trains alone.
    """
    cards = torch.cuda.device_count()
    if topology.is_alone or cards == 0:
        return
    if cards < topology.local_world:
        raise UsageError(
            f"There are {topology.local_world} ranks on this machine and only {count(cards, 'card')}. Give torchrun "
            f"--nproc_per_node {cards}, or train with --device cpu and CUDA_VISIBLE_DEVICES= (empty)."
        )
    torch.cuda.set_device(topology.local_rank)


def run_in_ranks(action: Callable[[Topology], str], timeout: float = 600.0) -> str:
    """What `action` returns on the first rank, nothing on the others, which say nothing either.

    Each rank that torchrun has started calls it, with a card of its own where there are cards, and waits at most
    `timeout` seconds for the others; one process alone just does. An error ends all, and is told once.
    """
    topology = read_topology()
    with joined(topology, timeout), only_first_speaks(topology):
        take_card(topology)
        result = action(topology)
    return result if topology.is_first else ""


def announce_card(device: torch.device, nvml: Any = None) -> Card | None:
    """The card as it is now, told to the person who starts a run; None on a CPU. Who else is on it is left alone.

    `nvml` is for read_card. Without NVML PyTorch still knows the free bytes.
    """
    if device.type != "cuda":
        return None
    card = _read_card_of(device, nvml)
    if card is None:
        free, total = torch.cuda.mem_get_info(device)
        card = Card(torch.cuda.get_device_properties(device).name, total, free, processes=())
    print(card.sentences(), flush=True)
    return card


def measure_context(device: torch.device, nvml: Any = None) -> int | None:
    """Bytes that this process holds on a CUDA device beside its tensors' memory; None where the driver does not tell.

    After a first product, so that the context and cuBLAS's kernels are there.
    """
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)
    torch.cuda.synchronize(device)
    card = _read_card_of(device, nvml)
    return None if card is None or not card.own else card.own - torch.cuda.memory_reserved(device)


def _read_card_of(device: torch.device, nvml: Any) -> Card | None:
    known = torch.cuda.get_device_properties(device)
    address = f"{known.pci_domain_id:08x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    return read_card(str(known.uuid), address, nvml)


def choose_precision(config: MemoryConfig, device: torch.device) -> torch.dtype | None:
    """The autocast format, None for full precision."""
    if not config.mixed_precision:
        return None
    if device.type == "cpu":
        return torch.bfloat16
    # torch.cuda.is_bf16_supported() is also true where PyTorch only emulates it.
    if config.amp_dtype == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError(
            f"--amp_dtype bf16: {torch.cuda.get_device_name(device)} has no bf16 (architecture below 8.0). Use fp16."
        )
    return torch.bfloat16 if config.amp_dtype == "bf16" else torch.float16


def check_gpu_architecture(
    name: str, capability: tuple[int, int], architectures: list[str], torch_version: str
) -> None:
    """Raises ResourceError if the installed PyTorch holds no code that runs on this card.

    `capability` and `architectures` are what torch.cuda.get_device_capability() and torch.cuda.get_arch_list() return.
    Without this check the first kernel fails with "no kernel image is available", and says not what to do.
    """
    if any(_runs_on(architecture, capability) for architecture in architectures):
        return
    held = " ".join(architectures) or "no GPU code at all"
    what = f"{name} has architecture sm_{capability[0]}{capability[1]}; PyTorch {torch_version} here holds {held}."
    raise ResourceError(f"{what} {_remedy(capability)}")


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for e.g. "sm_86", "sm_90a" or "compute_120" runs on a card.

    A binary (sm) runs within its major version on its own or a later minor one, PTX (compute) on all later ones;
    code ending in "a" runs on its own architecture only.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if parts is None:
        return False
    kind, built_for, suffix = parts[1], (int(parts[2]), int(parts[3])), parts[4]
    if suffix == "a":
        return capability == built_for
    is_later = built_for <= capability
    return is_later and (built_for[0] == capability[0] or (kind == "compute" and not suffix))


def _remedy(capability: tuple[int, int]) -> str:
    """What to do about it, with the exact command."""
    if capability < OLDEST_OF_ALL_BUILDS:
        return "No build of PyTorch supports this card any more: train with --device cpu, or on another card."
    install = f'{sys.executable} -m pip install --force-reinstall "torch{TORCH_RANGE}" "torchaudio{TORCH_RANGE}"'
    if capability < OLDEST_OF_DEFAULT_BUILD:
        return f"Install the build for older cards: {install} --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"Install the default build, which is for newer cards and needs NVIDIA driver 580 or newer: {install}. "
        "If that build lacks the card as well, it is newer than this release of KonkaniVani: train with --device cpu."
    )
