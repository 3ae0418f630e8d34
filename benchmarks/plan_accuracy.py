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
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.measuring.cells import (
    Case,
    CpuCell,
    CudaCell,
    Device,
    Planned,
    Precision,
    Preset,
    Recompute,
    full_grid,
    grid,
    table,
)
from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import ResourceError, UsageError

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
    planned, (live, waiting) = in_child(planned_of, case), in_child(live_of, case)
    return CpuCell(case, planned, live, waiting, in_child(resident_of, case))


def measure_on_cuda(case: Case) -> CudaCell:
    """Plan and measure the case, in two processes."""
    return CudaCell(case, in_child(planned_of, case), *in_child(cuda_of, case))


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


# Functions of the child processes. They import torch, so that usage errors do not have to wait for it.


def planned_of(case: Case) -> Planned:
    """Return `trace_plan` of planned_step.py."""
    from benchmarks.measuring.planned_step import trace_plan

    return trace_plan(case)


def live_of(case: Case) -> tuple[int, int]:
    """Return `measure_live` of planned_step.py."""
    from benchmarks.measuring.planned_step import measure_live

    return measure_live(case)


def resident_of(case: Case) -> int:
    """Return `measure_resident` of planned_step.py."""
    from benchmarks.measuring.planned_step import measure_resident

    return measure_resident(case)


def cuda_of(case: Case) -> tuple[int, int, int]:
    """Return `measure_cuda` of planned_step.py."""
    from benchmarks.measuring.planned_step import measure_cuda

    return measure_cuda(case)


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: compare(flags)))
