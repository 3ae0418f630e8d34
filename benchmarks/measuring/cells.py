"""The cells in which plan and measure are compared: what is compared, what was found, within which bars. No torch."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.config import PRESETS, MemoryConfig, RunConfig, TrainConfig
from konkanivani.base.units import GIB, MIB

LIVE_SHARE = 0.02  # of the live bytes, by which the plan may differ from them
RESIDENT_FACTOR = 1.25  # times the plan, workspaces included, that a process on a CPU may grow by
ALLOCATED_FACTOR, ALLOCATED_MORE = 1.10, 32 * MIB  # times what CUDA's allocator gave, and more, that may be planned
ROW_SECONDS, ROW_UTTERANCES = 20.0, 8
# Of live bytes for one step on 8 utterances of 20 s, one at a time, in full precision.
ROW_LIMITS = {"original": GIB, "optimized": int(0.7 * GIB), "minimal": int(0.5 * GIB)}

SEVERAL_SECONDS, SEVERAL_UTTERANCES = 10.0, 4  # of a case with several at once

Preset = Literal["original", "optimized", "minimal"]
Recompute = Literal["never", "always"]
Precision = Literal["fp32", "half"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Case:
    """A step on so many micro-batches of so many utterances of `seconds`; of several one is a tenth shorter."""

    preset: Preset
    seconds: float
    utterances: int
    micro_batches: int
    recompute: Recompute
    mixed_precision: bool
    device: Device

    def config(self) -> TrainConfig:
        """The trainer's settings for this step; its allocator keeps what it has, so that its largest size is seen."""
        memory = MemoryConfig(
            mixed_precision=self.mixed_precision, gradient_checkpointing=self.recompute, empty_cache_interval=0
        )
        run = RunConfig(preset=self.preset, device=self.device)
        return dataclasses.replace(TrainConfig(), run=run, model=PRESETS[self.preset], memory=memory)

    @property
    def limit(self) -> int | None:
        """Bytes that the whole step may take, where this is a row that has such a limit."""
        row = self.seconds, self.utterances, self.micro_batches, self.mixed_precision
        return ROW_LIMITS[self.preset] if row == (ROW_SECONDS, 1, ROW_UTTERANCES, False) else None

    def columns(self) -> tuple[str, ...]:
        """The case for a person, under CASE_COLUMNS."""
        half = "bf16" if self.device == "cpu" else "fp16"
        cut = f"{self.micro_batches} × {self.utterances}"
        return self.preset, f"{self.seconds:g}", cut, self.recompute, half if self.mixed_precision else "fp32"


CASE_COLUMNS = ("preset", "seconds", "cut", "recompute", "precision")
CPU_COLUMNS = ("planned", "live", "planned/live", "with workspace", "resident +", "resident/that", "outside")
CUDA_COLUMNS = ("planned", "allocated", "planned/allocated", "reserved", "context", "planned context", "outside")


@dataclass(frozen=True)
class Planned:
    """A plan in bytes: tensors, and beside them the workspaces and the context."""

    tensors: int
    workspace: int
    context: int


@dataclass(frozen=True)
class CpuCell:
    """A case on a CPU; bytes.

    `live` is the peak of live tensors with the input of one micro-batch, `waiting` that of the others, and
    `resident_growth` that of the resident memory from before the model is built to the process's largest.
    """

    case: Case
    planned: Planned
    live: int
    waiting: int
    resident_growth: int

    def faults(self) -> tuple[str, ...]:
        """The bars that this cell is outside of."""
        allowed = RESIDENT_FACTOR * (self.planned.tensors + self.planned.workspace)
        checks = (
            ("live", abs(self.live - self.planned.tensors) > LIVE_SHARE * self.live),
            ("resident", self.resident_growth > allowed),
            ("limit", self.case.limit is not None and self.live + self.waiting > self.case.limit),
        )
        return tuple(name for name, is_outside in checks if is_outside)

    def columns(self) -> tuple[str, ...]:
        """The cell for a person, under CASE_COLUMNS and CPU_COLUMNS; MiB."""
        whole = self.planned.tensors + self.planned.workspace
        return (
            *self.case.columns(),
            *(f"{self.planned.tensors / MIB:.1f}", f"{self.live / MIB:.1f}", f"{self.planned.tensors / self.live:.4f}"),
            *(f"{whole / MIB:.0f}", f"{self.resident_growth / MIB:.0f}", f"{self.resident_growth / whole:.2f}"),
            ", ".join(self.faults()),
        )


@dataclass(frozen=True)
class CudaCell:
    """A case on a CUDA card; bytes. `context` is what the process holds there beside what its allocator reserved."""

    case: Case
    planned: Planned
    allocated: int
    reserved: int
    context: int

    def faults(self) -> tuple[str, ...]:
        """The bars that this cell is outside of."""
        planned = self.planned.tensors + self.planned.workspace
        checks = (
            ("above the plan", self.allocated > planned),
            ("loose", planned > ALLOCATED_FACTOR * self.allocated + ALLOCATED_MORE),
            ("limit", self.case.limit is not None and self.allocated > self.case.limit),
        )
        return tuple(name for name, is_outside in checks if is_outside)

    def columns(self) -> tuple[str, ...]:
        """The cell for a person, under CASE_COLUMNS and CUDA_COLUMNS; MiB."""
        planned = self.planned.tensors + self.planned.workspace
        sizes = self.reserved, self.context, self.planned.context
        return (
            *self.case.columns(),
            *(f"{planned / MIB:.1f}", f"{self.allocated / MIB:.1f}", f"{planned / self.allocated:.4f}"),
            *(f"{size / MIB:.0f}" for size in sizes),
            ", ".join(self.faults()),
        )


def full_grid(device: Device) -> list[Case]:
    """Every cell: all presets and lengths, and one shape with several utterances at once."""
    whole = grid(tuple(PRESETS), (5.0, 20.0, 60.0), ("never", "always"), ("fp32", "half"), device)
    several = SEVERAL_SECONDS, SEVERAL_UTTERANCES, 2, "never"
    return [*whole, *(Case("optimized", *several, is_half, device) for is_half in (False, True))]


def grid(
    presets: tuple[Preset, ...],
    seconds: tuple[float, ...],
    recompute: tuple[Recompute, ...],
    precisions: tuple[Precision, ...],
    device: Device,
) -> list[Case]:
    """Cells of one utterance at a time: two of them, so that the second finds the first one's gradients.

    Where a number of them has a limit, it is as many.
    """
    cases = []
    for preset, length, policy, precision in itertools.product(presets, seconds, recompute, precisions):
        has_limit = length == ROW_SECONDS and precision == "fp32"
        micro_batches = ROW_UTTERANCES if has_limit else 2
        cases.append(Case(preset, length, 1, micro_batches, policy, precision == "half", device))
    return cases


def table(cells: list[CpuCell] | list[CudaCell]) -> str:
    """The cells as a table in Markdown, sizes in MiB."""
    head = (*CASE_COLUMNS, *(CPU_COLUMNS if isinstance(cells[0], CpuCell) else CUDA_COLUMNS))
    rows = [head, ("---",) * len(head), *(cell.columns() for cell in cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
