"""Killed anywhere and resumed, a run is the same; benchmarks/faults.py --parts resumes --full has all cases."""

import dataclasses

import pytest

from tests.conftest import mark_full
from tests.faults.resuming import (
    STEPS,
    ResumeBench,
    Settings,
    checkpoint_differences,
    control_cases,
    last_checkpoint,
    recut_cases,
    resume_cases,
)

CASES = {case.name + case.settings.precision: case for case in resume_cases()}
SAMPLE = "after window 12, fp16 steps skipped beforefp16"


@pytest.mark.parametrize("name", [SAMPLE, *mark_full("twice in one epochbf16")])
def test_it_is_the_same_bit_for_bit(bench: ResumeBench, name, tmp_path):
    assert bench.differences(CASES[name], tmp_path / "run") == []


def test_in_another_cut_of_the_window_it_is_the_same_order_and_in_float64_the_same_weights(bench, tmp_path):
    case = next(case for case in recut_cases() if case.settings.precision == "fp64")
    assert bench.recut_differences(case, tmp_path / "run") == []


def test_negative_control_one_steps_seed_is_seen(bench, tmp_path):
    case = next(case for case in control_cases() if case.name == "one step's seed")
    found = bench.differences(case, tmp_path / "run")
    assert any(difference.startswith("log.jsonl step 10: loss") for difference in found)
    assert any(difference.startswith("model/") for difference in found)


def test_there_are_48_cases_of_every_kind_that_is_promised():
    cases = resume_cases()
    assert len(cases) >= 48 and len({(case.name, case.settings) for case in cases}) == len(cases)
    assert {workers for case in cases for workers in case.workers} == {0, 1, 2, 4}
    assert {case.settings.precision for case in cases} == {"fp32", "bf16", "fp16"}
    assert {case.settings.source for case in cases} == {"files", "shards", "surrounded", "poisoned"}


def test_a_difference_of_one_bit_or_kind_is_seen(bench):
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
