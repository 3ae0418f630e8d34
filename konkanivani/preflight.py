"""What is checked before training starts, so that a mistake costs seconds and not hours."""

from collections.abc import Callable
from typing import Any

import torch

from konkanivani.base.console import count
from konkanivani.base.distributed import Topology, only_first_speaks, read_topology
from konkanivani.base.errors import UsageError
from konkanivani.base.process_group import joined
from konkanivani.memory.gpu import Card, read_card


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
