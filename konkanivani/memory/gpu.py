"""Who else is on the card: its free memory, and the other processes that hold some, as the driver (NVML) tells.

The names of NVML are those of NVIDIA's package nvidia-ml-py, module pynvml.
"""

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from konkanivani.base.units import GIB

# What no listed process holds is worth a word above the driver's own share: a few hundred MiB, more on large cards.
MIN_UNSEEN, UNSEEN_SHARE = GIB // 4, 1 / 20
# A process that computes and draws is on two of these lists.
PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


@dataclass(frozen=True)
class CardProcess:
    """Another process on the card; `name` is "" and `bytes` None where the driver does not tell."""

    pid: int
    name: str
    bytes: int | None

    def sentence(self) -> str:
        """The process for a person."""
        who = f"Process {self.pid} ({self.name})" if self.name else f"Process {self.pid}"
        held = "an unknown amount of it" if self.bytes is None else f"{self.bytes / GIB:.2f} GiB of it"
        return f"{who} uses {held}."


@dataclass(frozen=True)
class Card:
    """A card's memory in bytes; `processes` are the others on it, who hold most first.

    `own` is what this process holds, None where that is not known.
    """

    name: str
    total: int
    free: int
    processes: tuple[CardProcess, ...]
    own: int | None = None

    @property
    def unseen(self) -> int | None:
        """Bytes that no process listed holds, the driver's share included; None where a process's share is unknown."""
        held = [self.own, *(process.bytes for process in self.processes)]
        return None if None in held else max(0, self.total - self.free - sum(held))

    def sentences(self) -> str:
        """The card for a person: what is free, then who else holds what."""
        parts = [f"{self.name}: {self.free / GIB:.2f} of {self.total / GIB:.2f} GiB free."]
        parts += [process.sentence() for process in self.processes]
        # In a container the processes outside it are not listed.
        if self.unseen is not None and self.unseen > max(MIN_UNSEEN, UNSEEN_SHARE * self.total):
            parts.append(f"Another {self.unseen / GIB:.2f} GiB is used by processes that are not visible here.")
        return " ".join(parts)


def read_card(uuid: str, pci_bus_id: str, nvml: Any = None) -> Card | None:
    """The card of this UUID (without "GPU-") or, failing that, PCI address ("00000000:01:00.0"); None without NVML.

    Its index would not do: NVML counts all cards, CUDA only those of CUDA_VISIBLE_DEVICES, and in another order.
    `nvml` is the module to ask, pynvml where none is given.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: training does not depend on knowing
        return None
    try:
        handle = _find(nvml, uuid, pci_bus_id)
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), _text(nvml.nvmlDeviceGetName(handle))
        bytes_by_pid = _read_bytes(nvml, handle)
        own = bytes_by_pid.pop(os.getpid(), 0)
        found = [CardProcess(pid, _read_name(nvml, pid), held) for pid, held in bytes_by_pid.items()]
        found.sort(key=lambda process: (-(process.bytes or 0), process.pid))
        return Card(name, int(memory.total), int(memory.free), tuple(found), own)
    except Exception:  # a driver that cannot tell, or whose answers are not what its package expects
        return None
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _find(nvml: Any, uuid: str, pci_bus_id: str) -> Any:
    """NVML's handle of the card, or of the slice of one (MIG) that has this UUID."""
    for prefix in ("GPU-", "MIG-"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
    return nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)


def _read_bytes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """What each process on the card holds, by its pid; None where that cannot be had (containers, Windows' WSL)."""
    held: dict[int, int | None] = {}
    for name in PROCESS_LISTS:
        with suppress(Exception):  # an old driver lacks a list, a container may not read one: the others still count
            for process in getattr(nvml, name)(handle):
                known = [size for size in (held.get(process.pid), process.usedGpuMemory) if size is not None]
                held[process.pid] = max(known, default=None)  # both lists give the process's whole share
    return held


def _read_name(nvml: Any, pid: int) -> str:
    """The file name of the process's program; "" where it cannot be read."""
    try:
        command = _text(nvml.nvmlSystemGetProcessName(pid))
    except Exception:  # it has ended, is another user's, or its name is no text
        return ""
    words = command.split()  # newer drivers give the whole command line
    return words[0].rsplit("/", 1)[-1] if words else ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


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
