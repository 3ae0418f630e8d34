"""The comparison of plan and measurement measures each cell separately, and reports cells outside the bounds."""

import json
from dataclasses import replace

import pytest

from benchmarks.plan_accuracy import (
    GIB,
    MIB,
    Case,
    CpuCell,
    CudaCell,
    Planned,
    build_global_batch,
    full_grid,
    grid,
    table,
)
from tests.conftest import checked, run_script

CASE = Case("minimal", 20.0, 1, 8, "never", False, "cpu")
PLANNED = Planned(100 * MIB, 200 * MIB, 0)
CPU_CELL = CpuCell(CASE, PLANNED, live=100 * MIB, waiting=9 * MIB, resident_growth=375 * MIB)
CUDA_CELL = CudaCell(replace(CASE, device="cuda"), PLANNED, 300 * MIB, reserved=310 * MIB, context=400 * MIB)


@pytest.mark.full
def test_cell_is_planned_and_measured():
    flags = ("--seconds", "2", "--recompute", "never", "--precisions", "fp32", "--json")
    done = checked(run_script("benchmarks/plan_accuracy.py", *flags))
    parsed = json.loads(done.stdout.splitlines()[-1])
    (cell,) = parsed["cells"]
    assert (cell["case"]["preset"], cell["case"]["seconds"], cell["limit"]) == ("minimal", 2.0, None)
    state = 16 * 3_649_296  # weights, gradients and two moments in fp32
    assert state < cell["live"] < cell["resident_growth"] < GIB
    assert 0 < cell["waiting"] < 2**18  # one waveform of 2 s and its tokens
    # Two concurrent micro-batches: the overlap of their peaks depends on the machine.
    assert cell["planned"]["tensors"] == pytest.approx(cell["live"], rel=0.1)
    assert set(cell["outside"]) <= {"live"} and parsed["outside"] == len(cell["outside"])


def test_full_grid_has_all_cases():
    cases = full_grid("cpu")
    assert len(set(cases)) == len(cases) == 3 * 3 * 2 * 2 + 2
    limits = {(case.preset, case.recompute): case.limit for case in cases if case.limit}
    assert len(limits) == 6
    assert limits["original", "never"] == limits["original", "always"] == GIB
    assert limits["optimized", "never"] / GIB == pytest.approx(0.7)
    assert limits["minimal", "never"] / GIB == pytest.approx(0.5)
    assert all((case.micro_batches, case.utterances, case.seconds) == (8, 1, 20.0) for case in cases if case.limit)
    assert {case.utterances for case in cases} == {1, 4}


def test_global_batch_follows_its_case():
    one = build_global_batch(CASE)
    assert [batch.sample_lengths for batch in one.micro_batches] == [(320_000,)] * 8
    assert (one.utterances, one.tokens, one.audio_seconds) == (8, 8 * 80, 160.0)
    several = build_global_batch(replace(CASE, seconds=2.0, utterances=3, micro_batches=2))
    assert [batch.sample_lengths for batch in several.micro_batches] == [(32_000, 32_000, 28_800)] * 2
    assert all(batch.augment_seeds is not None for batch in (*one.micro_batches, *several.micro_batches))
    storages = {batch.waveforms.untyped_storage().data_ptr() for batch in one.micro_batches}
    assert len(storages) == 8  # as the loader returns them


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, ()),
        ({"live": 103 * MIB}, ("live",)),
        ({"live": 97 * MIB}, ("live",)),
        ({"resident_growth": 375 * MIB + 1}, ("resident",)),
        ({"waiting": 413 * MIB}, ("limit",)),
        ({"waiting": 413 * MIB, "case": replace(CASE, preset="original")}, ()),
        ({"waiting": 413 * MIB, "case": replace(CASE, micro_batches=2)}, ()),
    ],
)
def test_cpu_cell_reports_values_outside_the_bounds(changed, faults):
    assert replace(CPU_CELL, **changed).faults() == faults


@pytest.mark.parametrize(
    ("allocated", "planned", "faults"),
    [
        (300 * MIB, 100 * MIB, ()),
        (300 * MIB + 1, 100 * MIB, ("above the plan",)),
        (300 * MIB, 161 * MIB, ()),
        (300 * MIB, 163 * MIB, ("loose",)),
        (513 * MIB, 330 * MIB, ("limit",)),
    ],
)
def test_cuda_cell_reports_values_outside_the_bounds(allocated, planned, faults):
    cell = replace(CUDA_CELL, allocated=allocated, planned=replace(PLANNED, tensors=planned))
    assert cell.faults() == faults


@pytest.mark.parametrize("cell", [CPU_CELL, CUDA_CELL], ids=["cpu", "cuda"])
def test_table_has_a_value_in_every_column(cell):
    head, rule, row = table([cell]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "| minimal | 20 | 8 × 1 | never | fp32 |" in row


def test_case_sets_precision_and_recomputation_of_the_step():
    (half, full) = grid(("minimal",), (5.0,), ("always",), ("half", "fp32"), "cpu")
    assert half.config().memory.mixed_precision and not full.config().memory.mixed_precision
    assert half.config().memory.gradient_checkpointing == "always"
