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
    PLACES,
    double_parts,
    features_of,
    global_batch,
    relative_difference,
    speeches,
    weights_after,
)
from tests.pretrained_parts import MODES
from tests.whisper.parts import whisper_config, whisper_parts

pytestmark = pytest.mark.card
CARD = torch.device("cuda", 0)
BOUND = 1e-7
IN_FULL = ("card", "some on the host", "host", "ahead")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(relative_difference(one[name], other[name]) for name in one)


@pytest.mark.parametrize("place", IN_FULL)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_our_own_step(kind: str, recompute: str, place: str) -> None:
    on_cpu = weights_after(double_parts(KINDS[kind], recompute))
    on_card = weights_after(double_parts(KINDS[kind], recompute, placement=PLACES[place], device=CARD))
    assert largest_difference(on_cpu, on_card) < BOUND


@pytest.mark.parametrize("place", IN_FULL)
@pytest.mark.parametrize("mode", MODES)
def test_whispers_step(mode: str, place: str) -> None:
    on_cpu = weights_after(whisper_parts(mode))
    on_card = weights_after(whisper_parts(mode, placement=PLACES[place], device=CARD))
    assert largest_difference(on_cpu, on_card) < BOUND


@pytest.mark.parametrize("kind", ["conformer", "other parts"])
def test_in_chunks(kind: str) -> None:
    found = []
    for device in (CPU, CARD):
        parts = double_parts(KINDS[kind], "always", device=device)
        found.append(
            weights_after(dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=7)))
        )
    assert largest_difference(*found) < BOUND


def single_parts(kind: str, device: torch.device, place: str = "card", half: bool = False) -> StepParts:
    """Return step parts in fp32 or, on a GPU, fp16 with a loss scale that does not overflow at first."""
    memory = MemoryConfig(mixed_precision=half, gradient_checkpointing="always")
    config = TrainConfig(model=KINDS[kind], features=features_of(KINDS[kind]), memory=memory)
    layout = StateLayout(placement=PLACES[place])
    parts = build_step_parts(config, architecture_of(config, 40), device, 100, layout=layout)
    return dataclasses.replace(parts, scaler=torch.amp.GradScaler(device.type, init_scale=128.0, enabled=half))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["conformer", "other parts"])
def test_in_half_precision_it_is_near_and_weights_may_lie_anywhere(kind: str, place: str) -> None:
    on_cpu = weights_after(single_parts(kind, CPU), dtype=torch.float32)
    on_card = weights_after(single_parts(kind, CARD, place, half=True), dtype=torch.float32)
    assert float(on_card["loss"]) == pytest.approx(float(on_cpu["loss"]), rel=0.03)
    assert float(on_card["norm"]) == pytest.approx(float(on_cpu["norm"]), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_of_cudnn(kind: str) -> None:
    """Check that cuDNN is unused: it plans for each new length, which takes nine times the time of the step."""
    parts = single_parts(kind, CARD, half=True)
    with torch.profiler.profile() as seen:
        weights_after(parts, steps=1, dtype=torch.float32)
    names = {event.key for event in seen.key_averages()}
    assert "aten::convolution_backward" in names
    # Only checks whether cuDNN is enabled.
    assert not [name for name in names if "cudnn" in name.lower() and "_use_cudnn" not in name]


@pytest.mark.parametrize("place", PLACES)
def test_whisper_in_half_precision(place: str) -> None:
    config = whisper_config("always", half=True)
    placed, on_card = (
        dataclasses.replace(
            whisper_parts("full", config, torch.float32, placement=PLACES[where], device=CARD),
            scaler=torch.amp.GradScaler("cuda", init_scale=128.0),
        )
        for where in (place, "card")
    )
    one, other = (weights_after(parts, dtype=torch.float32) for parts in (on_card, placed))
    assert float(other["loss"]) == pytest.approx(float(one["loss"]), rel=1e-3)


@torch.no_grad()
def test_it_hears_the_same() -> None:
    batch, heard, losses = global_batch(speeches(6, augmented=False), 6).micro_batches[0], [], []
    for device in (CPU, CARD):
        forward = double_parts(MODEL, device=device).forward
        forward.model.eval()
        output, sums = forward(batch)
        heard.append(argmax_tokens(forward.model, output.encoded).cpu())
        losses.append(torch.stack(sums).cpu())
    assert torch.equal(*heard) and relative_difference(*losses) < BOUND


def step_within(limit: float | None) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the weights after one step within `limit` bytes of GPU memory, the number of splits and the peak."""
    spoken = [dataclasses.replace(speech, waveform=speech.waveform.repeat(12)) for speech in speeches(8)]
    parts = double_parts(dataclasses.replace(MODEL, d_model=64, subsampling_channels=32), device=CARD)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(CARD).total_memory)
    try:
        report = train_step(parts, global_batch(spoken, 8), 3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    weights = {name: weight.detach().cpu() for name, weight in parts.model.named_parameters()}
    return weights, report.splits, torch.cuda.max_memory_reserved()


def test_a_step_whose_memory_truly_runs_out_is_the_same_step() -> None:
    whole, no_splits, peak = step_within(None)
    split, splits, _ = step_within(0.6 * peak)
    assert no_splits == 0 < splits and largest_difference(whole, split) < BOUND


def test_a_step_of_other_weights_is_seen() -> None:
    """Negative control: detect a step with other weights."""
    parts = double_parts(device=CARD)
    with torch.no_grad():
        next(parts.model.parameters()).mul_(1 + 1e-5)
    assert largest_difference(weights_after(double_parts()), weights_after(parts)) > BOUND
