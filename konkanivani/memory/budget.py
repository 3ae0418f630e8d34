"""How much memory there is for training, and keeping to a budget."""

from pathlib import Path

import torch
from tqdm import tqdm

from konkanivani.base.errors import ResourceError

SHARE_OF_FREE = 0.9  # the rest is for what other programs come to need
CGROUP_LIMIT, CGROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: torch.device) -> int:
    """Bytes that training may take without anyone's word on it: nine tenths of what is free on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE_OF_FREE * (free + torch.cuda.memory_reserved(device)))
    return int(SHARE_OF_FREE * min(_system_available(), _cgroup_available()))


def enforce_budget(device: torch.device, budget: int, context: int) -> None:
    """Makes the allocator of a CUDA device refuse what goes beyond `budget` bytes, its context included.

    On a CPU nothing can be refused: there the plan protects, and the monitor watches.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if budget <= context:
        raise ResourceError(
            f"The budget of {budget / 2**20:.0f} MiB is less than the CUDA context of this GPU, "
            f"{context / 2**20:.0f} MiB. Use a larger --memory_budget."
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget - context) / total), device)


class BudgetWatch:
    """Says once when a process on a CPU has grown beyond its budget, where nothing refuses it memory; sizes in MiB."""

    def __init__(self, budget: float, resident_before: float) -> None:
        self._allowed, self._before, self._has_told = budget + resident_before, resident_before, False

    def look(self, peak: float) -> bool:
        """Whether the resident peak is beyond what is allowed; the first time it is, the person is told."""
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


def _system_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 4 * 2**30  # unknown: what a small machine has


def _cgroup_available() -> int:
    """What a container's limit leaves; without end where there is none."""
    try:
        return int(CGROUP_LIMIT.read_text()) - int(CGROUP_USE.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return 2**62
