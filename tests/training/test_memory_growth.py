"""The benchmark of many steps counts every tensor, and reports growth."""

import dataclasses
import gc
import json

import pytest
import torch

from benchmarks.memory_growth import Moment, RandomGlobalBatches, follow_steps, summarize
from konkanivani.config import ModelConfig, TrainConfig
from konkanivani.data.batching import GlobalBatch
from konkanivani.models.architecture import architecture_of
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport
from tests.conftest import checked, run_script

CPU = torch.device("cpu")
SMALL = ModelConfig(d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=8)
SMALL_FLAGS = ("--d_model", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--attention_heads", "2")
GLOBAL_BATCHES = RandomGlobalBatches(seed=1, size=2, batch_size=1, shortest=0.5, longest=1.5)
REPORT = StepReport(1.0, 1.0, 1.0, 1.0, 1e-3, 1.0, is_skipped=False, splits=0)


def small_parts() -> StepParts:
    config = TrainConfig(model=SMALL)
    return build_step_parts(config, architecture_of(config, 1000), CPU, 100)


class LeakingGlobalBatches:
    """Global batches whose first tensor is never released."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __getitem__(self, number: int) -> GlobalBatch:
        global_batch = GLOBAL_BATCHES[number]
        self.kept.append(global_batch.micro_batches[0].tokens)
        return global_batch


def test_memory_growth_script_finds_no_growth():
    flags = ("--steps", "6", *SMALL_FLAGS, "--subsampling_channels", "8", "--shortest", "0.5", "--longest", "1.5")
    done = checked(run_script("benchmarks/memory_growth.py", "steps", *flags, "--json"))
    parsed = json.loads(done.stdout.splitlines()[-1])
    weights_and_moments = 3 * 4 * parsed["params"]
    assert weights_and_moments < parsed["live_first"] < weights_and_moments + 2**20
    assert parsed["live_first"] == parsed["live_most"] == parsed["live_last"]
    assert (parsed["steps"], parsed["splits"], parsed["skipped_steps"], parsed["settled_step"]) == (6, 0, 0, 3)
    assert 12 * 0.5 <= parsed["audio_seconds"] <= 12 * 1.5
    assert weights_and_moments / 2**20 < parsed["settled_mib"] <= parsed["largest_mib"]
    assert parsed["is_within"] == (parsed["growth_percent"] <= 5)


def test_tensor_leaked_by_a_global_batch_is_detected():
    global_batches = LeakingGlobalBatches()
    moments = follow_steps(small_parts(), global_batches, 4)
    sizes = [tensor.untyped_storage().nbytes() for tensor in global_batches.kept]
    grown = [moment.live - moments[0].live for moment in moments]
    assert grown == [sum(sizes[1:count]) for count in range(1, 5)] and grown[-1] > 0
    assert not summarize("minimal", 1, moments).is_within


def test_tensor_in_a_reference_cycle_is_detected():
    class WithCycles:
        def __getitem__(self, number: int) -> GlobalBatch:
            cycle = [torch.zeros(1000)] if number else []
            cycle.append(cycle)
            return GLOBAL_BATCHES[number]

    gc.disable()
    try:
        first, second = follow_steps(small_parts(), WithCycles(), 2)
    finally:
        gc.enable()
    assert second.live == first.live + 4000


@pytest.mark.parametrize(("end", "is_within"), [(104.9, True), (105.1, False)])
def test_resident_memory_may_grow_by_5_percent(end, is_within):
    settled = [Moment(live=7, resident_mib=100.0, seconds=0.1, audio_seconds=1.0, report=REPORT)] * 250
    drift = summarize("minimal", 1, settled + [dataclasses.replace(settled[0], resident_mib=end)] * 30)
    assert (drift.settled_step, drift.settled_mib, drift.end_mib) == (140, 100.0, end)
    assert drift.is_within is is_within


@pytest.mark.parametrize(("filled_after", "late"), [(100, 0.0), (1000, 0.5)])
def test_temporary_growth_is_distinguished_from_continued_growth(filled_after, late):
    first = Moment(live=7, resident_mib=100.0, seconds=0.1, audio_seconds=1.0, report=REPORT)
    moments = [
        dataclasses.replace(first, resident_mib=100 + 0.5 * max(0, min(step - 200, filled_after)))
        for step in range(850)
    ]
    drift = summarize("minimal", 1, moments)
    assert drift.late_growth_mib_per_step == pytest.approx(late)
    assert drift.growth_mib_per_step == pytest.approx(0.5 if late else (150 - drift.settled_mib) / 600, abs=1e-3)


def test_global_batch_is_a_function_of_its_number():
    again = dataclasses.replace(GLOBAL_BATCHES)
    for number in (0, 5):
        pairs = zip(GLOBAL_BATCHES[number].micro_batches, again[number].micro_batches, strict=True)
        for one, other in pairs:
            assert torch.equal(one.waveforms, other.waveforms) and torch.equal(one.tokens, other.tokens)
            assert one.augment_seeds == other.augment_seeds is not None
            assert 0.5 <= one.longest_seconds <= 1.5
    assert GLOBAL_BATCHES[0].audio_seconds != GLOBAL_BATCHES[1].audio_seconds
    assert dataclasses.replace(GLOBAL_BATCHES, distinct=2)[3].audio_seconds == GLOBAL_BATCHES[1].audio_seconds
