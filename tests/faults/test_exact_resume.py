"""A run killed anywhere and resumed equals the undisturbed run; benchmarks/faults.py --parts resumes has all cases."""

import dataclasses

import pytest

from tests.conftest import mark_full
from tests.faults.resumed_runs import (
    STEPS,
    ResumeBench,
    Settings,
    checkpoint_differences,
    control_cases,
    last_checkpoint,
    resplit_cases,
    resume_cases,
)

CASES = {case.name + case.settings.precision: case for case in resume_cases()}
SAMPLE = "after global batch 12, fp16 steps skipped beforefp16"


@pytest.mark.parametrize("name", [SAMPLE, *mark_full("twice in one epochbf16")])
def test_resumed_run_equals_the_undisturbed_run_bit_for_bit(bench: ResumeBench, name, tmp_path):
    assert bench.differences(CASES[name], tmp_path / "run") == []


def test_resume_with_other_micro_batches_keeps_order_and_float64_weights(bench, tmp_path):
    case = next(case for case in resplit_cases() if case.settings.precision == "fp64")
    assert bench.resplit_differences(case, tmp_path / "run") == []


def test_negative_control_another_seed_of_one_step_is_detected(bench, tmp_path):
    case = next(case for case in control_cases() if case.name == "one step's seed")
    result = bench.differences(case, tmp_path / "run")
    assert any(difference.startswith("log.jsonl step 10: loss") for difference in result)
    assert any(difference.startswith("model/") for difference in result)


def test_48_resume_cases_cover_all_precisions_sources_and_worker_counts():
    cases = resume_cases()
    assert len(cases) >= 48 and len({(case.name, case.settings) for case in cases}) == len(cases)
    assert {workers for case in cases for workers in case.workers} == {0, 1, 2, 4}
    assert {case.settings.precision for case in cases} == {"fp32", "bf16", "fp16"}
    assert {case.settings.source for case in cases} == {"files", "shards", "surrounded", "poisoned"}


def test_comparison_detects_one_changed_bit_and_a_missing_state(bench):
    one = last_checkpoint(bench.undisturbed(Settings(precision="fp16")))
    other = last_checkpoint(bench.undisturbed(Settings(precision="fp16")))
    # Global batches of three epochs, some skipped.
    assert one.step == 3 * 7 - one.states["progress"]["skipped_steps"] < STEPS
    assert checkpoint_differences(one, other) == []
    name = next(iter(other.states["model"]))
    other.states["model"][name].view(-1)[5] += 1e-7
    other.states["scaler"]["_growth_tracker"] += 1
    assert sorted(checkpoint_differences(one, other)) == [f"model/{name}", "scaler/_growth_tracker"]
    without = {part: state for part, state in one.states.items() if part != "splits"}
    assert checkpoint_differences(one, dataclasses.replace(one, states=without)) == [
        "only one of them has the state splits"
    ]
