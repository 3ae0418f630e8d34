"""Chunks of any size give the losses and gradients of one piece (1e-9, float64) with less memory."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.config import DataConfig, ModelConfig, TrainConfig
from konkanivani.data.batching import GlobalBatch
from konkanivani.lengths import CHUNK_FRAMES
from konkanivani.memory.devices import cpu_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import LossCounts
from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import Subsampling
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.planning.tracer import BatchShape, StepTracer
from konkanivani.planning.traces import build_tracer
from konkanivani.randomness import seed_step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, forward_and_backward
from tests.conftest import mark_full, parameter_grid
from tests.invariants.parts import (
    KINDS,
    double_parts,
    global_batch,
    max_relative_difference,
    measured_peak,
    relative_difference,
    speeches,
    with_dropout,
)

BOUND = 1e-9


def in_chunks(parts: StepParts, chunk_frames: int) -> StepParts:
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=chunk_frames))


def losses_and_gradients(parts: StepParts, full_batch: GlobalBatch) -> dict[str, torch.Tensor]:
    seed_step(parts.seed, 0)
    parts.model.train()
    counts = LossCounts(full_batch.tokens, full_batch.utterances)
    sums = [forward_and_backward(parts, batch, counts) for batch in full_batch.micro_batches]
    values = {name: p.grad for name, p in parts.model.named_parameters()}
    return values | {"ctc": sum(s[0].detach() for s in sums), "attention": sum(s[1].detach() for s in sums)}


@settings(max_examples=12, deadline=None)
@given(
    chunk_frames=st.integers(1, 60),
    utterances=st.integers(1, 4),
    seed=st.integers(0, 99),
    kind=st.sampled_from([name for name in KINDS if "8" not in name]),
    recompute=st.sampled_from(["always", "never"]),
    dropout=st.sampled_from([0.0, 0.3]),
)
def test_any_chunk_size_gives_equal_losses_and_gradients(chunk_frames, utterances, seed, kind, recompute, dropout):
    model = with_dropout(KINDS[kind], dropout)
    batch = global_batch(speeches(utterances, seed), utterances)
    whole = losses_and_gradients(double_parts(model), batch)
    chunked = losses_and_gradients(in_chunks(double_parts(model, recompute), chunk_frames), batch)
    assert max_relative_difference(whole, chunked) < BOUND


def test_negative_control_chunks_without_context_change_gradient(monkeypatch):
    parts, batch = double_parts(), global_batch(speeches(2), 2)
    whole = losses_and_gradients(double_parts(), batch)
    one_piece = Subsampling.forward

    def without_the_last_three(self: Subsampling, features: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        return one_piece(self, torch.cat([features[:, :-3], torch.zeros_like(features[:, -3:])], dim=1), layout)

    monkeypatch.setattr(Subsampling, "forward", without_the_last_three)
    assert max_relative_difference(whole, losses_and_gradients(in_chunks(parts, 9), batch)) > 1e-3


@pytest.mark.parametrize("frames", [7, 8, 9, 10, 11, 23, 24, 25, 26])
@pytest.mark.parametrize("chunk_frames", [1, 2, 3, 5])
def test_chunked_subsampling_equals_whole_at_any_length(frames, chunk_frames):
    subsampling = double_parts().model.encoder.subsampling
    features = torch.randn(2, frames, 80, dtype=torch.float64)
    whole = subsampling(features)
    assert relative_difference(whole, subsampling(features, SequenceLayout(chunk_frames=chunk_frames))) < BOUND


def test_one_minute_is_not_chunked(monkeypatch):
    """Up to CHUNK_FRAMES, no chunk is recomputed."""
    monkeypatch.setattr("konkanivani.ops.chunks.run_recomputed", None)
    parts = double_parts()
    spoken = dataclasses.replace(speeches(1)[0], waveform=torch.randn(60 * 16_000, dtype=torch.float64))
    losses_and_gradients(parts, global_batch([spoken], 1))
    with pytest.raises(TypeError):
        losses_and_gradients(in_chunks(parts, CHUNK_FRAMES - 10), global_batch([spoken], 1))


@pytest.mark.parametrize("mode, model", parameter_grid(["never", "always"], ["rotary", "relative"]))
def test_traced_peak_in_chunks_equals_measured_peak(mode, model):
    config, cpu = TrainConfig(model=MODELS[model], data=DataConfig(concurrent_micro_batches=1)), torch.device("cpu")
    spoken = [dataclasses.replace(s, waveform=s.waveform.float()) for s in speeches(4, augmented=False)]

    def build(front_end: FeatureExtractor) -> StepParts:
        return in_chunks(build_step_parts(config, architecture_of(config, 40), cpu, 1, front_end), 9)

    front_end = architecture_of(config, 40).build_front_end(config.augment)
    parts = build(front_end)
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, recompute=RecomputePolicy(mode)))
    measured = measured_peak(parts, global_batch(spoken, 2))
    tracer = StepTracer(build, front_end, cpu_costs())
    traced = tracer.trace_global_batch(global_batch(spoken, 2), RecomputePolicy(mode)).bytes
    assert abs(traced - measured) <= 0.02 * measured


SMALL = ModelConfig(d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=16)


MODELS = {"rotary": SMALL, "relative": dataclasses.replace(SMALL, attention_positions="relative")}


@pytest.mark.parametrize("minutes", [(1, 5, 10), *mark_full(((1, 10, 20),))])
@pytest.mark.parametrize("mode, model", parameter_grid(["always", "never"], MODELS))
def test_traced_peak_grows_linearly_with_length(mode, model, minutes):
    """Compare the growth above the state between the three lengths, at 15 tokens per second."""
    config = TrainConfig(model=MODELS[model])
    tracer = build_tracer(config, architecture_of(config, 1000), cpu_costs())
    one, second, twice = (
        tracer.trace(BatchShape(1, seconds, 15 * seconds), RecomputePolicy(mode)).bytes - tracer.state()
        for seconds in (60 * minute for minute in minutes)
    )
    assert second < 1.05 * minutes[1] * one and twice < 2.2 * second
