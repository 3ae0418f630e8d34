"""The memory of a phase as it is logged, and how a logged field says where TensorBoard draws it."""

from dataclasses import MISSING, dataclass, field
from typing import Any


def tagged(tag: str, curve: str = "", default: Any = MISSING) -> Any:
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
    allocated_mib: float | None
    reserved_mib: float | None = tagged("4 memory/{phase}_mib", RESERVED)
    peak_mib: float | None = tagged("4 memory/{phase}_mib")
    resident_mib: float | None
    planned_mib: float | None = tagged("4 memory/{phase}_mib", PLANNED, default=None)
    fragmentation_mib: float | None = tagged("8 allocator/fragmentation_{phase}_mib", default=None)
    allocator_retries: int | None = tagged("8 allocator/retries_{phase}", default=None)
