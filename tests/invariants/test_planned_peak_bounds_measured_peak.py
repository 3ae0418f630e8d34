"""Invariant 6: a planned peak is a close bound on the measured one: live bytes on a CPU, allocated bytes on CUDA."""

import dataclasses

import pytest
import torch

from konkanivani.config import PRESETS, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS
from konkanivani.memory.devices import cuda_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.tracer import BatchShape
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step
from tests.conftest import mark_full, parameter_grid
from tests.invariants.parts import measured_peak
from tests.tracers import tracer_of

CPU = torch.device("cpu")
SMALL = ModelConfig(d_model=32, encoder_layers=2, decoder_layers=1, attention_heads=2, subsampling_channels=8)
POLICIES = {"never": RecomputePolicy("never"), "some": RecomputePolicy.first(2), "always": RecomputePolicy("always")}
OTHER = dataclasses.replace(SMALL, attention_positions="relative", convolution_norm="none", subsampling="striding")
MODELS = {"small": SMALL, "minimal": PRESETS["minimal"], "other parts": OTHER}


def config_of(model: ModelConfig, half: bool) -> TrainConfig:
    consecutive = DataConfig(concurrent_micro_batches=1)
    return TrainConfig(model=model, data=consecutive, memory=MemoryConfig(mixed_precision=half))


def parts_of(config: TrainConfig, policy: RecomputePolicy, device: torch.device = CPU) -> StepParts:
    parts = build_step_parts(config, architecture_of(config, 40), device, 100)
    return parts.recomputing(policy)


def global_batch_of(lengths: tuple[float, ...], batch_size: int) -> GlobalBatch:
    """Return a global batch of utterances of these lengths in seconds, ten tokens each."""
    spoken = [
        Example(str(number), torch.randn(round(16_000 * seconds)), list(range(4, 14)), augment_seed=None)
        for number, seconds in enumerate(lengths)
    ]
    return split_into_micro_batches(spoken, same_size(batch_size), OUR_TOKENS)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model, policy", parameter_grid(MODELS, POLICIES))
def test_traced_peak_of_global_batch_equals_measured_peak(model, policy, half):
    config = config_of(MODELS[model], half)
    global_batch = global_batch_of((1.0, 1.3, 2.4, 2.5), 2)
    measured = measured_peak(parts_of(config, POLICIES[policy]), global_batch)
    planned = tracer_of(config).trace_global_batch(global_batch, POLICIES[policy]).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [(3.0, 2.7), *mark_full(((6.0,),), ((2.0, 2.0, 2.0),))])
def test_planned_peak_of_batch_shape_bounds_measured_peak(lengths, policy):
    config = config_of(MODELS["minimal"], half=False)
    load = BatchShape(len(lengths), max(lengths), 10)
    measured = measured_peak(parts_of(config, POLICIES[policy]), global_batch_of(2 * lengths, len(lengths)))
    planned = tracer_of(config).trace(load, POLICIES[policy]).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured


@pytest.mark.parametrize("policy", ["always", "never", *mark_full("some")])
def test_plan_of_concurrent_micro_batches_bounds_measured_peak(policy, two_threads):
    """Use a looser bound: the peaks of concurrent micro-batches need not coincide."""
    config = config_of(MODELS["minimal"], half=False)
    parts = parts_of(config, POLICIES[policy])
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, concurrent_micro_batches=2))
    measured = measured_peak(parts, global_batch_of((6.0,) * 4, 1))
    traced = tracer_of(config).trace(BatchShape(1, 6.0, 10), POLICIES[policy])
    assert traced.bytes < measured <= 1.001 * traced.side_by_side(2).bytes <= 1.25 * measured


def test_negative_control_plan_of_other_shape_is_out_of_bounds():
    config = config_of(MODELS["minimal"], half=False)
    measured = measured_peak(parts_of(config, POLICIES["never"]), global_batch_of((6.0, 6.0), 1))
    tracer = tracer_of(config)
    for *size, policy in ((1, 5.0, 10, "never"), (1, 6.0, 10, "some"), (2, 6.0, 10, "never")):
        planned = tracer.trace(BatchShape(*size), POLICIES[policy]).bytes
        assert not 0.999 * measured <= planned <= 1.02 * measured


@pytest.mark.card
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_planned_peak_bounds_peak_of_cuda_allocator(policy, half):
    device, config = torch.device("cuda"), config_of(PRESETS["minimal"], half)
    costs = cuda_costs("this card", torch.cuda.get_device_capability())
    parts, global_batch = parts_of(config, POLICIES[policy], device), global_batch_of((8.0, 8.0), 1)
    train_step(parts, global_batch, 0)
    parts.monitor.report()
    train_step(parts, global_batch, 1)
    measured = max(phase.peak_mib for phase in parts.monitor.report()) * 2**20
    planned = tracer_of(config, costs).trace(BatchShape(1, 8.0, 10), POLICIES[policy]).bytes + costs.workspace
    assert measured <= planned <= 1.1 * measured + 32 * 2**20


def test_state_takes_sixteen_bytes_per_parameter():
    tracer = tracer_of(config_of(SMALL, half=False))
    parts = parts_of(config_of(SMALL, half=False), POLICIES["never"])
    assert tracer.state() == 16 * sum(parameter.numel() for parameter in parts.model.parameters())
