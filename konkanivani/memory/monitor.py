"""How much memory and time each phase of training takes, as it is logged, and the periodic return of cached memory."""

import ctypes
import dataclasses
import os
import re
import resource
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch

from konkanivani.base.units import MIB

HOLE_BYTES = 256 * 1024  # below an utterance's activations, which at 20 s and a width of 256 take 500 KiB each


def logged_as(tag: str, curve: str = "", default: Any = MISSING) -> Any:
    """A dataclass field drawn by TensorBoard in the chart `tag`.

    Each of the curves that share a chart has a name, a colour and an event file of its own; training's has no name.
    """
    return field(default=default, metadata={"tag": tag, "curve": curve})


VALIDATION, PLANNED, RESERVED = "validation", "planned", "reserved"


@dataclass(frozen=True)
class PhaseMemory:
    """Memory in MiB at the end of a phase ("start", "data", "forward", "backward", "update", "log", "validation",
    "save").

    None = does not apply here. allocated, reserved and peak are the accelerator's; resident is the process's. On a CPU,
    peak is the peak resident. Of a phase's moments the one of highest peak counts; of fragmentation = reserved -
    allocated, what the allocator holds and no tensor is in, the largest.
    `allocator_retries` counts how often CUDA refused memory until the allocator had emptied its cache.
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
    """The process's resident memory now, in MiB."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    except (OSError, ValueError, IndexError):  # no /proc: the peak is the next best
        return peak_resident_mib()


def peak_resident_mib() -> float:
    """The process's largest resident memory since the last reset, else since it began (VmHWM), in MiB."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, ValueError, IndexError):  # no /proc: a figure that a larger parent process passes on to its child
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_resident() -> None:
    """Begins the process's VmHWM anew where the system lets it (Linux 4.0; proc(5), clear_refs); else nothing."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def set_mmap_threshold() -> None:
    """Has glibc map blocks of HOLE_BYTES and more one by one, so that freed tensors leave no holes in its heap.

    For a CPU run with a memory plan; page faults cost up to a fifth of a step's time (docs/experiments.md).
    A user's own setting stays, and elsewhere than on glibc nothing happens.
    """
    is_set = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"))
    if is_set or re.search(r"glibc\.malloc\.(mmap|trim)_threshold", os.environ.get("GLIBC_TUNABLES", "")):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(m_trim_threshold, HOLE_BYTES)
        ctypes.CDLL(None).mallopt(m_mmap_threshold, HOLE_BYTES)


def trim_heap() -> None:
    """Returns the C heap's free pages to the system, where the C library can (glibc; malloc_trim(3))."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class CacheClearing:
    """How often cached GPU memory was returned, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0

    def __add__(self, other: "CacheClearing") -> "CacheClearing":
        return CacheClearing(self.count + other.count, self.seconds + other.seconds)


class MemoryMonitor:
    """Peaks per phase. On CUDA the allocator's figures, on a CPU the resident memory.

    Each phase begins the system's peak anew; `overall_peak_mib` keeps the largest of all.
    """

    def __init__(self, device: torch.device, empty_cache_interval: int) -> None:
        self.device, self.empty_cache_interval = device, empty_cache_interval
        self.peak_mib = 0.0
        self._planned: Mapping[str, float] = {}
        self._phases: dict[str, PhaseMemory] = {}  # since the last report
        self._phases_of_run: dict[str, PhaseMemory] = {}
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self._micro_batches = self._retries = 0
        self._booking = threading.Lock()
        self._clearing = self._clearing_of_run = CacheClearing()

    def expect(self, planned: Mapping[str, float]) -> None:
        """Shows the MiB planned for each phase beside its measured peak from now on, in place of what was expected."""
        self._planned = planned

    def end_phase(self, phase: str) -> None:
        """Books what has happened since the last call under `phase`; of phases side by side, under the first to end."""
        with self._booking:
            now = self._measure_cuda(phase) if self.device.type == "cuda" else self._measure_resident(phase)
            self.peak_mib = max(self.peak_mib, now.peak_mib)
            for phases in (self._phases, self._phases_of_run):
                phases[phase] = _joined(phases[phase], now) if phase in phases else now
            ended = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - self._since
            self._since = ended

    def report(self) -> tuple[PhaseMemory, ...]:
        """The largest of each phase since the last report."""
        phases, self._phases = tuple(self._phases.values()), {}
        return phases

    def report_run(self) -> tuple[PhaseMemory, ...]:
        """The largest of each phase since the monitor was made."""
        return tuple(self._phases_of_run.values())

    def seconds_of(self, phase: str) -> float:
        """The wall time of all moments of a phase. On CUDA a kernel's is where the step waits for it: in its update."""
        return self._seconds.get(phase, 0.0)

    def maybe_empty_cache(self) -> None:
        """Counts a micro-batch; every `empty_cache_interval` of them, cached GPU memory is returned to the driver.

        On a CPU the free pages of the heap go back to the system: mixed lengths leave ever more holes there.
        """
        self._micro_batches += 1
        is_due = self.empty_cache_interval and self._micro_batches % self.empty_cache_interval == 0
        if is_due and self.device.type == "cpu":
            trim_heap()
        if is_due and self.device.type == "cuda":
            # The driver waits for all kernels before it takes memory back. Waiting here keeps that out of the figure.
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            torch.cuda.empty_cache()
            clearing = CacheClearing(1, time.perf_counter() - started)
            self._clearing += clearing
            self._clearing_of_run += clearing

    def report_clearing(self) -> CacheClearing | None:
        """What `maybe_empty_cache` has cost since the last such report; None on a CPU.

        Asking the driver for the memory again is not in it: the next micro-batch pays for that.
        """
        clearing, self._clearing = self._clearing, CacheClearing()
        return clearing if self.device.type == "cuda" else None

    def report_clearing_of_run(self) -> CacheClearing | None:
        """What `maybe_empty_cache` has cost since the monitor was made; None on a CPU."""
        return self._clearing_of_run if self.device.type == "cuda" else None

    def overall_peak_mib(self) -> float:
        """The run's peak: allocated on CUDA, resident on a CPU."""
        return self.peak_mib if self.device.type == "cuda" else max(self.peak_mib, peak_resident_mib())

    def _measure_cuda(self, phase: str) -> PhaseMemory:
        stats = torch.cuda.memory_stats(self.device)  # all of it at once: each named function reads it anew
        allocated, reserved = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        retries = stats.get("num_alloc_retries", 0)
        new_retries, self._retries = retries - self._retries, retries
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
        resident, peak = resident_mib(), peak_resident_mib()
        reset_peak_resident()
        return PhaseMemory(phase=phase, peak_mib=peak, resident_mib=resident, planned_mib=self._planned.get(phase))


def _joined(before: PhaseMemory, now: PhaseMemory) -> PhaseMemory:
    """Of two moments of a phase the one that took more, with the retries of both and the larger fragmentation."""
    larger = max(now, before, key=lambda moment: (moment.peak_mib, moment.resident_mib or 0.0))
    if now.allocator_retries is None:
        return larger
    return dataclasses.replace(
        larger,
        allocator_retries=before.allocator_retries + now.allocator_retries,
        fragmentation_mib=max(before.fragmentation_mib, now.fragmentation_mib),
    )
