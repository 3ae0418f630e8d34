#!/usr/bin/env python3
"""Compare the planned peak memory of a step with the measured one by preset, duration, precision and recomputation.

    python3 benchmarks/plan_accuracy.py --full

Each plan and each measurement runs in its own process. On a CPU the plan is compared with the peak of live tensors
(within 2 %) and, including the workspaces, with the growth of the resident memory (at most 1.25 times the plan); on
CUDA with the peak of the allocator (never below it, and at most 1.10 times it plus 32 MiB). A step on 8 utterances of
20 s, one at a time in full precision, has its own limit: 1.0, 0.7, 0.5 GiB by preset. Values out of bounds are
reported; the exit code is 0 in any case, since this is a measurement.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import dataclasses
import itertools
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from benchmarks.measuring.common import (
    TOKENS_PER_SECOND,
    TOTAL_STEPS,
    VOCABULARY,
    random_example,
    wait_for_device,
    warm_up,
)
from konkanivani.command_line import read_flags, run_script
from konkanivani.config import PRESETS, MemoryConfig, RunConfig, TrainConfig
from konkanivani.console import GIB, MIB
from konkanivani.data.batching import GlobalBatch, collate
from konkanivani.data.text import OUR_TOKENS
from konkanivani.distributed import choose_device
from konkanivani.errors import ResourceError, UsageError
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.memory.monitor import reset_peak_resident, resident_mib, set_mmap_threshold
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.sizes import device_costs
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step

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


STEPS = 3  # steps over which the resident memory and CUDA's allocator are measured


def trace_plan(case: Case) -> Planned:
    """Return the memory plan of this case, computed as for `--memory_budget`."""
    costs = device_costs(choose_device(case.device))
    load = BatchShape(case.utterances, case.seconds, round(case.seconds * TOKENS_PER_SECOND))
    config = case.config()
    tracer = build_tracer(config, architecture_of(config, VOCABULARY), costs)
    peak = tracer.trace(load, RecomputePolicy(case.recompute))
    return Planned(peak.bytes, costs.workspace, costs.context)


def measure_live(case: Case) -> tuple[int, int]:
    """Return the peak of live bytes in the second step on a CPU, and the bytes of the waiting inputs.

    The peak includes weights, gradients, optimizer state, buffers of the front end and the input of one micro-batch.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    train_step(parts, global_batch, 0)  # allocates the optimizer state
    live = LiveBytes()
    live.count(parts.state_tensors())
    inputs = [batch.tensors() for batch in global_batch.micro_batches]
    live.count(tensor for tensors in inputs for tensor in tensors)
    with live:
        train_step(parts, global_batch, 1)
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in inputs]
    # The plan includes one input, the largest; the others of the global batch wait in host memory.
    waiting = sum(sizes) - max(sizes)
    return live.peak - waiting, waiting


def measure_resident(case: Case) -> int:
    """Return the growth in bytes from the resident memory before the model is built to the peak of a few steps."""
    set_mmap_threshold()  # as in a run with a memory budget: freed tensors leave no holes in the heap
    reset_peak_resident()
    before = resident_mib()
    parts, global_batch = build_parts(case), build_global_batch(case)
    for step in range(STEPS):
        train_step(parts, global_batch, step)
    return round((parts.monitor.overall_peak_mib() - before) * MIB)


def measure_cuda(case: Case) -> tuple[int, int, int]:
    """Return the peaks of allocated and reserved bytes, and the process's GPU memory outside of the allocator.

    The last value is correct only if no other process uses the GPU.
    """
    parts, global_batch = build_parts(case), build_global_batch(case)
    device = parts.forward.device
    warm_up(parts, global_batch)
    for step in range(1, STEPS):
        train_step(parts, global_batch, step)
    wait_for_device(device)
    free, total = torch.cuda.mem_get_info(device)
    # The monitor resets the allocator's peak at the end of each phase and keeps the largest value.
    allocated = round(max(parts.monitor.overall_peak_mib() * MIB, torch.cuda.max_memory_allocated(device)))
    reserved = torch.cuda.max_memory_reserved(device)
    return allocated, reserved, total - free - torch.cuda.memory_reserved(device)


def build_parts(case: Case) -> StepParts:
    """Return the step parts of this trainer for the case."""
    config, device = case.config(), choose_device(case.device)
    return build_step_parts(config, architecture_of(config, VOCABULARY), device, TOTAL_STEPS)


def build_global_batch(case: Case) -> GlobalBatch:
    """Return a global batch of noise with the case's durations and random tokens, equal on every machine."""
    shorter = 1 if case.utterances > 1 else 0
    seconds = [case.seconds] * (case.utterances - shorter) + [0.9 * case.seconds] * shorter
    generator = torch.Generator().manual_seed(0)
    pieces = [[random_example(length, VOCABULARY, generator) for length in seconds] for _ in range(case.micro_batches)]
    batches = tuple(collate(piece, OUR_TOKENS) for piece in pieces)
    samples = sum(len(speech.waveform) for piece in pieces for speech in piece)
    return GlobalBatch(
        micro_batches=batches,
        tokens=sum(len(speech.tokens) for piece in pieces for speech in piece),
        utterances=case.micro_batches * case.utterances,
        audio_seconds=samples / SAMPLE_RATE,
        padding_share=1 - samples / sum(batch.waveforms.numel() for batch in batches),
    )


MIN_SECONDS, MAX_SECONDS = 1.0, 600.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    full: bool = False
    """The whole grid: all presets, 5, 20 and 60 s, and one case with several utterances at a time."""
    presets: tuple[Preset, ...] = ("minimal",)
    """Model shapes."""
    seconds: tuple[float, ...] = (5.0, 20.0)
    """Durations of an utterance."""
    recompute: tuple[Recompute, ...] = ("never", "always")
    """Keep every block's activations, or recompute them."""
    precisions: tuple[Precision, ...] = ("fp32", "half")
    """Full precision, and autocast: bf16 on a CPU, fp16 with loss scaling on CUDA."""
    device: Device = "cpu"
    """Device to measure on."""
    json: bool = False
    """Print one line of JSON, sizes in bytes, instead of a table in MiB."""


def compare(flags: Flags) -> str:
    """Plan and measure every cell; return the report."""
    if not flags.seconds or not all(MIN_SECONDS <= seconds <= MAX_SECONDS for seconds in flags.seconds):
        raise UsageError(f"--seconds must be one or more lengths from {MIN_SECONDS:g} to {MAX_SECONDS:g}.")
    if not (flags.presets and flags.recompute and flags.precisions):
        raise UsageError("--presets, --recompute and --precisions must each name one or more.")
    asked = grid(flags.presets, flags.seconds, flags.recompute, flags.precisions, flags.device)
    cells = []
    for case in full_grid(flags.device) if flags.full else asked:
        cells.append(measure_on_cuda(case) if case.device == "cuda" else measure_on_cpu(case))
        print(" ".join(cells[-1].columns()), file=sys.stderr, flush=True)
    outside = sum(bool(cell.faults()) for cell in cells)
    if flags.json:
        told = [{**dataclasses.asdict(cell), "limit": cell.case.limit, "outside": cell.faults()} for cell in cells]
        return json.dumps({"device": flags.device, "cells": told, "outside": outside})
    return f"{table(cells)}\n{outside} of {len(cells)} cells are outside the bars."


def measure_on_cpu(case: Case) -> CpuCell:
    """Plan and measure the case, in three processes."""
    planned = Planned(*in_child(planned_of, case))
    live, waiting = in_child(measure_live, case)
    return CpuCell(case, planned, live, waiting, in_child(measure_resident, case))


def measure_on_cuda(case: Case) -> CudaCell:
    """Plan and measure the case, in two processes."""
    return CudaCell(case, Planned(*in_child(planned_of, case)), *in_child(measure_cuda, case))


def in_child(measure: Callable[[Case], Result], case: Case) -> Result:
    """Return measure(case), called in a new process; raise ResourceError if that process is killed."""
    # spawn: a forked child would start with the parent's resident memory.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, case).result()
        except BrokenProcessPool:
            raise ResourceError(
                f"The process that measured {' '.join(case.columns())} did not end well: most often the system had no "
                "more memory for it. Give fewer --seconds or smaller --presets."
            ) from None


def planned_of(case: Case) -> tuple[int, int, int]:
    """Return `trace_plan` as a tuple."""
    # A class of this script would be pickled as `__mp_main__.Planned`, which the parent process need not know.
    return dataclasses.astuple(trace_plan(case))


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
