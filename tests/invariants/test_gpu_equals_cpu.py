"""Invariant: a step on a GPU equals the step on a CPU, to 1e-7 after three steps in float64, for every setting.

The settings are the project's model, NeMo's parts and Whisper; weights offloaded to host memory, prefetched or in half
precision; and a real out-of-memory error. Atomic additions on a GPU have no fixed order, so equality is not bitwise.
"""

import dataclasses

import pytest
import torch

from konkanivani.config import MemoryConfig, TrainConfig
from konkanivani.decoding.ctc import argmax_tokens
from konkanivani.models.architecture import architecture_of
from konkanivani.training.build_step import StateLayout, build_step_parts
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import (
    CPU,
    KINDS,
    MODEL,
    PLACEMENTS,
    double_parts,
    features_of,
    global_batch,
    max_relative_difference,
    relative_difference,
    speeches,
    weights_after,
)
from tests.pretrained_parts import MODES
from tests.whisper.parts import whisper_config, whisper_parts

pytestmark = pytest.mark.card
GPU = torch.device("cuda", 0)
BOUND = 1e-7
FULL_PRECISION_PLACEMENTS = ("card", "partly on host", "host", "prefetched")


@pytest.mark.parametrize("place", FULL_PRECISION_PLACEMENTS)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_of_native_model_equals_cpu(kind: str, recompute: str, place: str) -> None:
    on_cpu = weights_after(double_parts(KINDS[kind], recompute))
    on_gpu = weights_after(double_parts(KINDS[kind], recompute, placement=PLACEMENTS[place], device=GPU))
    assert max_relative_difference(on_cpu, on_gpu) < BOUND


@pytest.mark.parametrize("place", FULL_PRECISION_PLACEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_training_of_whisper_equals_cpu(mode: str, place: str) -> None:
    on_cpu = weights_after(whisper_parts(mode))
    on_gpu = weights_after(whisper_parts(mode, placement=PLACEMENTS[place], device=GPU))
    assert max_relative_difference(on_cpu, on_gpu) < BOUND


@pytest.mark.parametrize("kind", ["conformer", "other parts"])
def test_training_in_chunks_equals_cpu(kind: str) -> None:
    results = []
    for device in (CPU, GPU):
        parts = double_parts(KINDS[kind], "always", device=device)
        results.append(
            weights_after(dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=7)))
        )
    assert max_relative_difference(*results) < BOUND


def single_parts(kind: str, device: torch.device, place: str = "card", half: bool = False) -> StepParts:
    """Return step parts in fp32 or, on a GPU, fp16 with a loss scale that does not overflow at first."""
    memory = MemoryConfig(mixed_precision=half, gradient_checkpointing="always")
    config = TrainConfig(model=KINDS[kind], features=features_of(KINDS[kind]), memory=memory)
    layout = StateLayout(placement=PLACEMENTS[place])
    parts = build_step_parts(config, architecture_of(config, 40), device, 100, layout=layout)
    return dataclasses.replace(parts, scaler=torch.amp.GradScaler(device.type, init_scale=128.0, enabled=half))


@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("kind", ["conformer", "other parts"])
def test_fp16_loss_is_close_to_cpu_for_every_weight_placement(kind: str, place: str) -> None:
    on_cpu = weights_after(single_parts(kind, CPU), dtype=torch.float32)
    on_gpu = weights_after(single_parts(kind, GPU, place, half=True), dtype=torch.float32)
    assert float(on_gpu["loss"]) == pytest.approx(float(on_cpu["loss"]), rel=0.03)
    assert float(on_gpu["norm"]) == pytest.approx(float(on_cpu["norm"]), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_training_calls_no_cudnn_kernels(kind: str) -> None:
    """cuDNN searches a plan for each new length, which takes nine times as long as the step."""
    parts = single_parts(kind, GPU, half=True)
    with torch.profiler.profile() as recording:
        weights_after(parts, steps=1, dtype=torch.float32)
    names = {event.key for event in recording.key_averages()}
    assert "aten::convolution_backward" in names
    # _use_cudnn operators only check whether cuDNN is enabled.
    assert not [name for name in names if "cudnn" in name.lower() and "_use_cudnn" not in name]


@pytest.mark.parametrize("place", PLACEMENTS)
def test_whisper_fp16_loss_is_equal_for_every_weight_placement(place: str) -> None:
    config = whisper_config("always", half=True)
    placed, on_gpu = (
        dataclasses.replace(
            whisper_parts("full", config, torch.float32, placement=PLACEMENTS[name_of_placement], device=GPU),
            scaler=torch.amp.GradScaler("cuda", init_scale=128.0),
        )
        for name_of_placement in (place, "card")
    )
    one, other = (weights_after(parts, dtype=torch.float32) for parts in (on_gpu, placed))
    assert float(other["loss"]) == pytest.approx(float(one["loss"]), rel=1e-3)


@torch.no_grad()
def test_ctc_tokens_and_losses_equal_cpu() -> None:
    batch, tokens, losses = global_batch(speeches(6, augmented=False), 6).micro_batches[0], [], []
    for device in (CPU, GPU):
        forward = double_parts(MODEL, device=device).forward
        forward.model.eval()
        output, sums = forward(batch)
        tokens.append(argmax_tokens(forward.model, output.encoded).cpu())
        losses.append(torch.stack(sums).cpu())
    assert torch.equal(*tokens) and relative_difference(*losses) < BOUND


def step_with_memory_limit(limit: float | None) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the weights after one step within `limit` bytes of GPU memory, the number of splits and the peak."""
    spoken = [dataclasses.replace(speech, waveform=speech.waveform.repeat(12)) for speech in speeches(8)]
    parts = double_parts(dataclasses.replace(MODEL, d_model=64, subsampling_channels=32), device=GPU)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(GPU).total_memory)
    try:
        report = train_step(parts, global_batch(spoken, 8), 3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    weights = {name: weight.detach().cpu() for name, weight in parts.model.named_parameters()}
    return weights, report.splits, torch.cuda.max_memory_reserved()


def test_step_after_real_out_of_memory_error_equals_full_step() -> None:
    whole, no_splits, peak = step_with_memory_limit(None)
    split, splits, _ = step_with_memory_limit(0.6 * peak)
    assert no_splits == 0 < splits and max_relative_difference(whole, split) < BOUND


def test_negative_control_changed_weight_is_detected() -> None:
    """Change one tensor by a factor of 1 + 1e-5."""
    parts = double_parts(device=GPU)
    with torch.no_grad():
        next(parts.model.parameters()).mul_(1 + 1e-5)
    assert max_relative_difference(weights_after(double_parts()), weights_after(parts)) > BOUND
