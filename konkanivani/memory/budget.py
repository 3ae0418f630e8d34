"""Available memory for training, and enforcement of a memory budget."""

from pathlib import Path

import torch
from tqdm import tqdm

from konkanivani.errors import ResourceError

SHARE_OF_FREE = 0.9  # the rest is a reserve for other programs
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USE = Path("/sys/fs/cgroup/memory.current")


def available_bytes(device: torch.device) -> int:
    """Return the default memory budget in bytes: 90 % of the memory that is free on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory cached by this process's allocator is free for training, too.
        return int(SHARE_OF_FREE * (free + torch.cuda.memory_reserved(device)))
    return int(SHARE_OF_FREE * min(_system_available(), _cgroup_available()))


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


def _system_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 4 * 2**30  # unknown: assume a small machine


def _cgroup_available() -> int:
    """Return the bytes left under the container's cgroup limit; 2**62 if there is no limit."""
    try:
        return int(CGROUP_LIMIT.read_text()) - int(CGROUP_USE.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return 2**62
