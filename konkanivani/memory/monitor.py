"""How much memory each phase of training takes, and the periodic return of cached GPU memory."""

import resource
from pathlib import Path

import torch

from konkanivani.records import PhaseMemory

MIB = 2**20


def resident_mib() -> float:
    """The process's resident memory now, in MiB."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    except (OSError, ValueError, IndexError):  # no /proc: the peak is the next best
        return peak_resident_mib()


def peak_resident_mib() -> float:
    """The process's largest resident memory so far (VmHWM), in MiB."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, ValueError, IndexError):  # no /proc: a figure that a larger parent process passes on to its child
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class MemoryMonitor:
    """Peaks per phase since the last report. On CUDA the allocator's figures, on a CPU the resident memory."""

    def __init__(self, device: torch.device, empty_cache_interval: int) -> None:
        self.device, self.empty_cache_interval = device, empty_cache_interval
        self.peak_mib = 0.0
        self._phases: dict[str, PhaseMemory] = {}
        self._micro_batches = 0

    def end_phase(self, phase: str) -> None:
        """Books what has happened since the last call under `phase`."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / MIB
            now = PhaseMemory(
                phase=phase,
                allocated_mib=torch.cuda.memory_allocated(self.device) / MIB,
                reserved_mib=torch.cuda.memory_reserved(self.device) / MIB,
                peak_mib=peak,
                resident_mib=None,
            )
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            resident, peak = resident_mib(), peak_resident_mib()
            now = PhaseMemory(phase=phase, allocated_mib=None, reserved_mib=None, peak_mib=peak, resident_mib=resident)
        self.peak_mib = max(self.peak_mib, peak)
        before = self._phases.get(phase)
        self._phases[phase] = now if before is None else _larger(before, now)

    def report(self) -> tuple[PhaseMemory, ...]:
        """The largest of each phase since the last report."""
        phases, self._phases = tuple(self._phases.values()), {}
        return phases

    def tend_cache(self) -> None:
        """Counts a micro-batch; every `empty_cache_interval` of them, cached GPU memory is returned to the driver."""
        self._micro_batches += 1
        is_due = self.empty_cache_interval and self._micro_batches % self.empty_cache_interval == 0
        if is_due and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def overall_peak_mib(self) -> float:
        """The run's peak: allocated on CUDA, VmHWM on a CPU."""
        return self.peak_mib if self.device.type == "cuda" else peak_resident_mib()


def _larger(before: PhaseMemory, now: PhaseMemory) -> PhaseMemory:
    """Of two moments of a phase, the one that took more."""
    use = [m.resident_mib if m.resident_mib is not None else m.peak_mib for m in (before, now)]
    return now if use[1] >= use[0] else before
