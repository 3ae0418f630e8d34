"""Cases in which the memory plan is compared with the measured memory, the results, and their limits.

This module does not import torch.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Literal

from konkanivani.base.config import PRESETS, MemoryConfig, RunConfig, TrainConfig
from konkanivani.base.units import GIB, MIB

LIVE_SHARE = 0.02  # largest deviation of the plan, as a share of the live bytes
RESIDENT_FACTOR = 1.25  # largest growth of a process on a CPU, as a multiple of the plan with workspaces
# Largest plan on CUDA: the allocated bytes times the factor, plus a constant.
ALLOCATED_FACTOR, ALLOCATED_MORE = 1.10, 32 * MIB
ROW_SECONDS, ROW_UTTERANCES = 20.0, 8
# Limits of the live bytes in one step on 8 utterances of 20 s, micro-batches of one, full precision.
ROW_LIMITS = {"original": GIB, "optimized": int(0.7 * GIB), "minimal": int(0.5 * GIB)}

SEVERAL_SECONDS, SEVERAL_UTTERANCES = 10.0, 4  # case with several utterances per micro-batch

Preset = Literal["original", "optimized", "minimal"]
Recompute = Literal["never", "always"]
Precision = Literal["fp32", "half"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Case:
    """One training step: `micro_batches` micro-batches of `utterances` utterances of `seconds` seconds.

    If a micro-batch has several utterances, one is a tenth shorter, so that it contains padding.
    """

    preset: Preset
    seconds: float
    utterances: int
    micro_batches: int
    recompute: Recompute
    mixed_precision: bool
    device: Device

    def config(self) -> TrainConfig:
        """Return the training configuration of this step."""
        # The allocator's cache is never emptied, so that its largest size stays visible after the step.
        memory = MemoryConfig(
            mixed_precision=self.mixed_precision, gradient_checkpointing=self.recompute, empty_cache_interval=0
        )
        run = RunConfig(preset=self.preset, device=self.device)
        return dataclasses.replace(TrainConfig(), run=run, model=PRESETS[self.preset], memory=memory)

    @property
    def limit(self) -> int | None:
        """Limit of the whole step's live bytes, or None if the case has none."""
        row = self.seconds, self.utterances, self.micro_batches, self.mixed_precision
        return ROW_LIMITS[self.preset] if row == (ROW_SECONDS, 1, ROW_UTTERANCES, False) else None

    def columns(self) -> tuple[str, ...]:
        """Return the table cells of CASE_COLUMNS."""
        half = "bf16" if self.device == "cpu" else "fp16"
        cut = f"{self.micro_batches} × {self.utterances}"
        return self.preset, f"{self.seconds:g}", cut, self.recompute, half if self.mixed_precision else "fp32"


CASE_COLUMNS = ("preset", "seconds", "cut", "recompute", "precision")
CPU_COLUMNS = ("planned", "live", "planned/live", "with workspace", "resident +", "resident/that", "outside")
CUDA_COLUMNS = ("planned", "allocated", "planned/allocated", "reserved", "context", "planned context", "outside")


@dataclass(frozen=True)
class Planned:
    """Memory plan in bytes: tensors, workspaces of kernels, CUDA context."""

    tensors: int
    workspace: int
    context: int


@dataclass(frozen=True)
class CpuCell:
    """Result of a case on a CPU, in bytes.

    `live` is the peak of live tensors, including the input of one micro-batch; `waiting` is the size of the other
    inputs. `resident_growth` is the process's peak resident memory minus that before the model is built.
    """

    case: Case
    planned: Planned
    live: int
    waiting: int
    resident_growth: int

    def faults(self) -> tuple[str, ...]:
        """Return the names of the limits that the result exceeds."""
        allowed = RESIDENT_FACTOR * (self.planned.tensors + self.planned.workspace)
        checks = (
            ("live", abs(self.live - self.planned.tensors) > LIVE_SHARE * self.live),
            ("resident", self.resident_growth > allowed),
            ("limit", self.case.limit is not None and self.live + self.waiting > self.case.limit),
        )
        return tuple(name for name, is_outside in checks if is_outside)

    def columns(self) -> tuple[str, ...]:
        """Return the table cells of CASE_COLUMNS and CPU_COLUMNS, sizes in MiB."""
        whole = self.planned.tensors + self.planned.workspace
        return (
            *self.case.columns(),
            *(f"{self.planned.tensors / MIB:.1f}", f"{self.live / MIB:.1f}", f"{self.planned.tensors / self.live:.4f}"),
            *(f"{whole / MIB:.0f}", f"{self.resident_growth / MIB:.0f}", f"{self.resident_growth / whole:.2f}"),
            ", ".join(self.faults()),
        )


@dataclass(frozen=True)
class CudaCell:
    """Result of a case on a CUDA GPU, in bytes; `context` is the process's GPU memory outside of the allocator."""

    case: Case
    planned: Planned
    allocated: int
    reserved: int
    context: int

    def faults(self) -> tuple[str, ...]:
        """Return the names of the limits that the result exceeds."""
        planned = self.planned.tensors + self.planned.workspace
        checks = (
            # A plan that is too small fails at run time; one that is far too large wastes memory.
            ("above the plan", self.allocated > planned),
            ("loose", planned > ALLOCATED_FACTOR * self.allocated + ALLOCATED_MORE),
            ("limit", self.case.limit is not None and self.allocated > self.case.limit),
        )
        return tuple(name for name, is_outside in checks if is_outside)

    def columns(self) -> tuple[str, ...]:
        """Return the table cells of CASE_COLUMNS and CUDA_COLUMNS, sizes in MiB."""
        planned = self.planned.tensors + self.planned.workspace
        sizes = self.reserved, self.context, self.planned.context
        return (
            *self.case.columns(),
            *(f"{planned / MIB:.1f}", f"{self.allocated / MIB:.1f}", f"{planned / self.allocated:.4f}"),
            *(f"{size / MIB:.0f}" for size in sizes),
            ", ".join(self.faults()),
        )


def full_grid(device: Device) -> list[Case]:
    """Return all cases: every preset and length, and one case with several utterances per micro-batch."""
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
    """Return cases with one utterance per micro-batch."""
    cases = []
    for preset, length, policy, precision in itertools.product(presets, seconds, recompute, precisions):
        has_limit = length == ROW_SECONDS and precision == "fp32"
        # At least two micro-batches: the peak is in the second one, in which gradients already exist.
        micro_batches = ROW_UTTERANCES if has_limit else 2
        cases.append(Case(preset, length, 1, micro_batches, policy, precision == "half", device))
    return cases


def table(cells: list[CpuCell] | list[CudaCell]) -> str:
    """Return the results as a Markdown table, sizes in MiB."""
    head = (*CASE_COLUMNS, *(CPU_COLUMNS if isinstance(cells[0], CpuCell) else CUDA_COLUMNS))
    rows = [head, ("---",) * len(head), *(cell.columns() for cell in cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
