"""Free memory of the GPU and the other processes that use it, as reported by the driver (NVML).

The NVML names are those in NVIDIA's package nvidia-ml-py, module pynvml.
"""

import importlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from konkanivani.console import GIB

# Memory that no listed process holds is reported if it exceeds the driver's own use: a few hundred MiB, more on large
# GPUs.
MIN_UNSEEN = GIB // 4
UNSEEN_SHARE = 1 / 20
# A process that computes and renders is on two of these lists.
PROCESS_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)


@dataclass(frozen=True)
class CardProcess:
    """Another process on the GPU; `name` is "" and `bytes` is None if the driver does not report them."""

    pid: int
    name: str
    bytes: int | None

    def sentence(self) -> str:
        """Return a sentence about the process for the user."""
        who = f"Process {self.pid} ({self.name})" if self.name else f"Process {self.pid}"
        held = "an unknown amount of it" if self.bytes is None else f"{self.bytes / GIB:.2f} GiB of it"
        return f"{who} uses {held}."


@dataclass(frozen=True)
class Card:
    """Memory of a GPU in bytes; `processes` are the other processes on it, in descending order of memory.

    `own` is the memory of this process, None if unknown.
    """

    name: str
    total: int
    free: int
    processes: tuple[CardProcess, ...]
    own: int | None = None

    @property
    def unseen(self) -> int | None:
        """Bytes that no listed process holds, the driver's use included; None if a process's memory is unknown."""
        held = 0
        for size in (self.own, *(process.bytes for process in self.processes)):
            if size is None:
                return None
            held += size
        return max(0, self.total - self.free - held)

    def sentences(self) -> str:
        """Return sentences for the user: the free memory, then the use by each other process."""
        parts = [f"{self.name}: {self.free / GIB:.2f} of {self.total / GIB:.2f} GiB free."]
        parts += [process.sentence() for process in self.processes]
        # In a container the processes outside it are not listed.
        if self.unseen is not None and self.unseen > max(MIN_UNSEEN, UNSEEN_SHARE * self.total):
            parts.append(f"Another {self.unseen / GIB:.2f} GiB is used by processes that are not visible here.")
        return " ".join(parts)


def read_card(uuid: str, pci_bus_id: str, nvml: Any = None) -> Card | None:
    """Return the GPU with this UUID (without "GPU-") or else this PCI address ("00000000:01:00.0"); None without NVML.

    An index would be ambiguous: NVML counts all GPUs, CUDA only those in CUDA_VISIBLE_DEVICES, and in another order.
    `nvml` is the module to query, pynvml by default.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver or no permission: the report is optional
        return None
    try:
        handle = _find(nvml, uuid, pci_bus_id)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = _text(nvml.nvmlDeviceGetName(handle))
        bytes_by_pid = _read_bytes(nvml, handle)
        own = bytes_by_pid.pop(os.getpid(), 0)
        found = [CardProcess(pid, _read_name(nvml, pid), held) for pid, held in bytes_by_pid.items()]
        found.sort(key=lambda process: (-(process.bytes or 0), process.pid))
        return Card(name, int(memory.total), int(memory.free), tuple(found), own)
    except Exception:  # the driver lacks a query, or its answer does not match the package
        return None
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _find(nvml: Any, uuid: str, pci_bus_id: str) -> Any:
    """Return the NVML handle of the GPU or MIG slice with this UUID, or else this PCI address."""
    for prefix in ("GPU-", "MIG-"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
    return nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)


def _read_bytes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Return the bytes of each process on the GPU by PID; None if unavailable (containers, WSL on Windows)."""
    held: dict[int, int | None] = {}
    for name in PROCESS_LISTS:
        with suppress(Exception):  # an old driver lacks a list, a container may not read one: the others still count
            for process in getattr(nvml, name)(handle):
                known = [size for size in (held.get(process.pid), process.usedGpuMemory) if size is not None]
                # Each list gives the total of the process, so that they are not summed.
                held[process.pid] = max(known, default=None)
    return held


def _read_name(nvml: Any, pid: int) -> str:
    """Return the file name of the process's program; "" if it cannot be read."""
    try:
        command = _text(nvml.nvmlSystemGetProcessName(pid))
    except Exception:  # the process has ended, belongs to another user, or its name is not text
        return ""
    words = command.split()  # newer drivers give the whole command line
    return words[0].rsplit("/", 1)[-1] if words else ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def announce_card(device: torch.device, nvml: Any = None) -> Card | None:
    """Print and return the current state of the GPU at the start of a run; None on a CPU.

    The other processes are only reported. `nvml` is passed to `read_card`; without NVML, PyTorch still reports free
    bytes.
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
    """Return the bytes that this process holds on a CUDA device outside of PyTorch's allocator; None if not reported.

    Runs a first matrix product, so that the context and the cuBLAS kernels are loaded.
    """
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)
    torch.cuda.synchronize(device)
    card = _read_card_of(device, nvml)
    return None if card is None or not card.own else card.own - torch.cuda.memory_reserved(device)


def _read_card_of(device: torch.device, nvml: Any) -> Card | None:
    known: Any = torch.cuda.get_device_properties(device)  # Any: torch's stubs lack the PCI numbers
    address = f"{known.pci_domain_id:08x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    return read_card(str(known.uuid), address, nvml)
