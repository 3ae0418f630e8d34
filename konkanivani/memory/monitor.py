"""Memory of the device and the host: measured, available, and limited by a budget.

The NVML names are those in NVIDIA's package nvidia-ml-py, module pynvml.
"""

import ctypes
import dataclasses
import importlib
import os
import resource
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from konkanivani.console import GIB, MIB
from konkanivani.errors import ResourceError
from konkanivani.install.environment import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, is_malloc_set
from konkanivani.memory.devices import available_host_bytes

# --------------------
# Free memory of the GPU and the other processes that use it, as reported by the driver (NVML).


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
        amount = "an unknown amount of it" if self.bytes is None else f"{self.bytes / GIB:.2f} GiB of it"
        return f"{who} uses {amount}."


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
        visible = 0
        for size in (self.own, *(process.bytes for process in self.processes)):
            if size is None:
                return None
            visible += size
        return max(0, self.total - self.free - visible)

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
        processes = [CardProcess(pid, _read_name(nvml, pid), size) for pid, size in bytes_by_pid.items()]
        processes.sort(key=lambda process: (-(process.bytes or 0), process.pid))
        return Card(name, int(memory.total), int(memory.free), tuple(processes), own)
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
    bytes_by_pid: dict[int, int | None] = {}
    for name in PROCESS_LISTS:
        with suppress(Exception):  # an old driver lacks a list, a container may not read one: the others still count
            for process in getattr(nvml, name)(handle):
                known_sizes = [
                    size for size in (bytes_by_pid.get(process.pid), process.usedGpuMemory) if size is not None
                ]
                # Each list gives the total of the process, so that they are not summed.
                bytes_by_pid[process.pid] = max(known_sizes, default=None)
    return bytes_by_pid


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
    matrix = torch.ones(1, 1, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)
    card = _read_card_of(device, nvml)
    return None if card is None or not card.own else card.own - torch.cuda.memory_reserved(device)


def _read_card_of(device: torch.device, nvml: Any) -> Card | None:
    properties: Any = torch.cuda.get_device_properties(device)  # Any: torch's stubs lack the PCI numbers
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return read_card(str(properties.uuid), address, nvml)


# --------------------
# Available memory for training, and enforcement of a memory budget.


SHARE_OF_FREE = 0.9  # the rest is a reserve for other programs


def available_bytes(device: torch.device) -> int:
    """Return the default memory budget in bytes: 90 % of the memory that is free on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory cached by this process's allocator is free for training, too.
        return int(SHARE_OF_FREE * (free + torch.cuda.memory_reserved(device)))
    return int(SHARE_OF_FREE * available_host_bytes())


def enforce_budget(device: torch.device, budget: int, context: int) -> None:
    """Limit the CUDA allocator to `budget` bytes, the CUDA context included.

    On a CPU no limit can be enforced: the memory plan has to be right, and BudgetWatch reports an excess.

    Raises a ResourceError if the budget does not cover the context.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if budget <= context:
        raise ResourceError(
            f"The budget of {budget / 2**20:.0f} MiB is less than the CUDA context of this GPU, "
            f"{context / 2**20:.0f} MiB. Use a larger --memory_budget."
        )
    # The fraction limits the allocator only; the context is allocated by the driver outside of it.
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget - context) / total), device)


class BudgetWatch:
    """One-time warning for a CPU process that exceeds its budget, which cannot be enforced there; sizes in MiB."""

    def __init__(self, budget: float, resident_before: float) -> None:
        self._allowed = budget + resident_before
        self._before = resident_before
        self._has_told = False

    def look(self, peak: float) -> bool:
        """Return whether the peak resident memory exceeds the allowed size; print a warning the first time it does."""
        is_beyond = peak > self._allowed
        if is_beyond and not self._has_told:
            self._has_told = True
            tqdm.write(
                f"Training has used {peak - self._before:.0f} MiB, more than the budget of "
                f"{self._allowed - self._before:.0f} MiB, which cannot be enforced on a CPU. To reduce it, "
                "stop the run (it is saved) and resume with --resume auto --replan and a lower "
                "--memory_budget, or with --gradient_checkpointing auto."
            )
        return is_beyond


# --------------------
# Memory and time per training phase for the log, and the periodic release of cached memory.


HOLE_BYTES = 256 * 1024  # below one activation of an utterance: 500 KiB at 20 s and a width of 256


def logged_as(tag: str, curve: str = "", default: Any = MISSING) -> Any:
    """Return a dataclass field that TensorBoard draws in the chart `tag`.

    Curves that share a chart have a name, a colour and an event file each; the training curve has no name.
    """
    return field(default=default, metadata={"tag": tag, "curve": curve})


VALIDATION = "validation"
PLANNED = "planned"
RESERVED = "reserved"


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in MiB at the end of a phase: start, data, forward, backward, update, log, validation or save.

    `allocated_mib`, `reserved_mib` and `peak_mib` are CUDA's, `resident_mib` is the process's; on a CPU, `peak_mib` is
    the peak resident memory. Of several measurements in a phase, the one with the highest peak counts.
    `fragmentation_mib`, the largest reserved - allocated, is memory held by the allocator without a tensor in it.
    `allocator_retries` counts how often CUDA refused memory until the allocator had emptied its cache. None: not
    applicable on this device.
    """

    phase: str
    allocated_mib: float | None = None
    reserved_mib: float | None = logged_as("4 memory/{phase}_mib", RESERVED, default=None)
    peak_mib: float | None = logged_as("4 memory/{phase}_mib", default=None)
    resident_mib: float | None = None
    planned_mib: float | None = logged_as("4 memory/{phase}_mib", PLANNED, default=None)
    fragmentation_mib: float | None = logged_as("8 allocator/fragmentation_{phase}_mib", default=None)
    allocator_retries: int | None = logged_as("8 allocator/retries_{phase}", default=None)


def resident_mib() -> float:
    """Return the process's current resident memory in MiB."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    except (OSError, ValueError, IndexError):  # no /proc: the peak is the closest value
        return peak_resident_mib()


def peak_resident_mib() -> float:
    """Return the process's peak resident memory (VmHWM) in MiB since the last reset, or else since its start."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, ValueError, IndexError):  # no /proc: ru_maxrss, which a child inherits from a larger parent
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_resident() -> None:
    """Reset the process's VmHWM if the system supports it (Linux 4.0; proc(5), clear_refs); otherwise do nothing."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def set_mmap_threshold() -> None:
    """Make glibc map blocks of at least HOLE_BYTES separately, so that freed tensors leave no holes in its heap.

    For a CPU run with a memory plan, whose page faults cost up to a fifth of a step's time, and for live speech, which
    may continue for hours (docs/experiments.md). The user's own setting has priority, and other C libraries are left
    unchanged.
    """
    if is_malloc_set(os.environ, "mmap_threshold", "trim_threshold"):
        return
    with suppress(AttributeError, OSError):
        # A fixed threshold also disables glibc's dynamic one, which grows with freed blocks (mallopt(3)).
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, HOLE_BYTES)
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, HOLE_BYTES)


def trim_heap() -> None:
    """Return the heap's free pages to the system if the C library supports it (glibc; malloc_trim(3))."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class CacheClearing:
    """Number of releases of cached GPU memory, and their time in seconds."""

    count: int = 0
    seconds: float = 0.0

    def __add__(self, other: "CacheClearing") -> "CacheClearing":
        return CacheClearing(self.count + other.count, self.seconds + other.seconds)


class MemoryMonitor:
    """Peak memory and time per phase: the allocator's statistics on CUDA, the resident memory on a CPU.

    Each phase resets the system's peak; `overall_peak_mib` is the maximum over all phases.
    """

    def __init__(self, device: torch.device, empty_cache_interval: int) -> None:
        self.device = device
        self.empty_cache_interval = empty_cache_interval
        self.peak_mib = 0.0
        self._planned: Mapping[str, float] = {}
        self._phases: dict[str, PhaseMemory] = {}  # since the last report
        self._phases_of_run: dict[str, PhaseMemory] = {}
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self._micro_batches = self._retries = 0
        self._booking = threading.Lock()  # concurrent micro-batches end their phases in different threads
        self._clearing = self._clearing_of_run = CacheClearing()

    def expect(self, planned: Mapping[str, float]) -> None:
        """Set the planned peak of each phase in MiB, which is logged next to the measured one."""
        self._planned = planned

    def end_phase(self, phase: str) -> None:
        """Attribute memory and time since the last call to `phase`; of concurrent phases, to the first to end."""
        with self._booking:
            now = self._measure_cuda(phase) if self.device.type == "cuda" else self._measure_resident(phase)
            self.peak_mib = max(self.peak_mib, now.peak_mib or 0.0)
            for phases in (self._phases, self._phases_of_run):
                phases[phase] = _merge(phases[phase], now) if phase in phases else now
            ended = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - self._since
            self._since = ended

    def report(self) -> tuple[PhaseMemory, ...]:
        """Return the peak measurement of each phase since the last report."""
        phases = tuple(self._phases.values())
        self._phases = {}
        return phases

    def report_run(self) -> tuple[PhaseMemory, ...]:
        """Return the peak measurement of each phase since the start of the run."""
        return tuple(self._phases_of_run.values())

    def seconds_of(self, phase: str) -> float:
        """Return the wall time in seconds of a phase; on CUDA, the update includes the wait for all kernels."""
        return self._seconds.get(phase, 0.0)

    def maybe_empty_cache(self) -> None:
        """Count a micro-batch; after every `empty_cache_interval`, release cached GPU memory to the driver.

        On a CPU, free heap pages are returned to the system: mixed lengths fragment the heap more and more.
        """
        self._micro_batches += 1
        is_due = self.empty_cache_interval and self._micro_batches % self.empty_cache_interval == 0
        if is_due and self.device.type == "cpu":
            trim_heap()
        if is_due and self.device.type == "cuda":
            # The driver waits for all kernels before it releases memory: synchronise first, to exclude that from the
            # time.
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            torch.cuda.empty_cache()
            clearing = CacheClearing(1, time.perf_counter() - started)
            self._clearing += clearing
            self._clearing_of_run += clearing

    def report_clearing(self) -> CacheClearing | None:
        """Return the cost of `maybe_empty_cache` since the last report; None on a CPU.

        The cost of allocating the memory again is not included: the next micro-batch pays for it.
        """
        clearing = self._clearing
        self._clearing = CacheClearing()
        return clearing if self.device.type == "cuda" else None

    def report_clearing_of_run(self) -> CacheClearing | None:
        """Return the cost of `maybe_empty_cache` since the start of the run; None on a CPU."""
        return self._clearing_of_run if self.device.type == "cuda" else None

    def overall_peak_mib(self) -> float:
        """Return the run's peak in MiB: allocated memory on CUDA, resident memory on a CPU."""
        return self.peak_mib if self.device.type == "cuda" else max(self.peak_mib, peak_resident_mib())

    def _measure_cuda(self, phase: str) -> PhaseMemory:
        # A single call: each of torch.cuda's functions would read all statistics.
        stats = torch.cuda.memory_stats(self.device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        retries = stats.get("num_alloc_retries", 0)
        new_retries = retries - self._retries
        self._retries = retries
        torch.cuda.reset_peak_memory_stats(self.device)
        return PhaseMemory(
            phase=phase,
            allocated_mib=allocated / MIB,
            reserved_mib=reserved / MIB,
            peak_mib=stats.get("allocated_bytes.all.peak", 0) / MIB,
            planned_mib=self._planned.get(phase),
            fragmentation_mib=(reserved - allocated) / MIB,
            allocator_retries=new_retries,
        )

    def _measure_resident(self, phase: str) -> PhaseMemory:
        resident = resident_mib()
        peak = peak_resident_mib()
        reset_peak_resident()
        return PhaseMemory(phase=phase, peak_mib=peak, resident_mib=resident, planned_mib=self._planned.get(phase))


def _merge(before: PhaseMemory, now: PhaseMemory) -> PhaseMemory:
    """Merge two measurements of a phase: the larger peak, the sum of retries, the larger fragmentation."""
    larger = max(now, before, key=lambda moment: (moment.peak_mib, moment.resident_mib or 0.0))
    if now.allocator_retries is None:
        return larger
    return dataclasses.replace(
        larger,
        allocator_retries=(before.allocator_retries or 0) + now.allocator_retries,
        fragmentation_mib=max(before.fragmentation_mib or 0.0, now.fragmentation_mib or 0.0),
    )
