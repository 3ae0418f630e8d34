"""Invariant 6 on Whisper: planned peaks match measured ones, in training and validation, in every training mode."""

import dataclasses
import functools

import pytest
import torch

from konkanivani.data.batching import Example, GlobalBatch, same_size, split_into_micro_batches
from konkanivani.data.text import OUR_TOKENS, GenerationRules
from konkanivani.decoding.decode import BeamDecode
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape, StepTracer
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts
from konkanivani.training.validation import recognize
from tests.conftest import mark_full, parameter_grid
from tests.invariants.parts import measured_peak
from tests.pretrained_parts import MODES
from tests.tracers import ONLY_TENSORS
from tests.whisper.parts import CPU, whisper_config

# Wide and deep enough for the saved activations to exceed the front end's peak.
SHAPE = WhisperShape(64, 4, 4, 2, 256, 80, 200, source_positions=100, target_positions=44)
POLICIES = {"never": RecomputePolicy("never"), "some": RecomputePolicy.first(3), "always": RecomputePolicy("always")}
LOAD = BatchShape(3, 2.0, 20)
every_mode = pytest.mark.parametrize("mode", MODES)


@functools.cache
def tracer_of(mode: str, half: bool = False, shape: WhisperShape = SHAPE) -> StepTracer:
    return build_tracer(whisper_config(half=half), WhisperArchitecture(shape, MODES[mode]), ONLY_TENSORS)


@functools.cache
def traced(mode: str, policy: str = "never", load: BatchShape = LOAD, half: bool = False, shape: WhisperShape = SHAPE):
    return tracer_of(mode, half, shape).trace(load, POLICIES[policy])


def parts_of(mode: str, policy: str, half: bool = False, shape: WhisperShape = SHAPE) -> StepParts:
    architecture = WhisperArchitecture(shape, MODES[mode])
    return build_step_parts(whisper_config(half=half), architecture, CPU, 100).recomputing(POLICIES[policy])


def global_batch_of(*lengths: float, batch_size: int) -> GlobalBatch:
    """Return a global batch of utterances of these lengths in seconds, with 20 tokens each."""
    utterances = [Example(str(n), torch.randn(round(16_000 * each)), [9] * 20, None) for n, each in enumerate(lengths)]
    return split_into_micro_batches(utterances, same_size(batch_size), OUR_TOKENS)


@pytest.mark.parametrize(("mode", "policy", "half"), parameter_grid(MODES, POLICIES, (False, True)))
def test_planned_step_peak_is_within_2_percent_of_measured(mode, policy, half):
    """Peak memory does not depend on the share of speech in the window."""
    measured = measured_peak(parts_of(mode, policy, half), global_batch_of(2.0, 2.0, 1.9, 1.0, 0.5, 2.0, batch_size=3))
    planned = traced(mode, policy, half=half).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured


@every_mode
def test_plan_bounds_peak_of_concurrent_micro_batches(mode, two_threads):
    parts = parts_of(mode, "never")
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, concurrent_micro_batches=2))
    measured = measured_peak(parts, global_batch_of(*(4 * (2.0,)), batch_size=1))
    planned = traced(mode, load=BatchShape(1, 2.0, 20)).side_by_side(2).bytes
    assert measured <= 1.001 * planned <= 1.3 * measured


@every_mode
def test_negative_control_plans_of_other_sizes_or_modes_do_not_match(mode):
    measured = measured_peak(parts_of(mode, "never"), global_batch_of(*(6 * (2.0,)), batch_size=3))
    fewer = BatchShape(2, 2.0, 20)
    others = [(mode, "never", fewer)] + [(other, "never", LOAD) for other in MODES if other != mode]
    for other in others + ([("full", "always", LOAD)] if mode == "full" else []):
        assert not 0.999 * measured <= traced(*other).bytes <= 1.02 * measured


def test_no_activations_are_kept_below_trained_layers():
    deep = dataclasses.replace(SHAPE, encoder_layers=2 * SHAPE.encoder_layers)

    def activations(mode: str, shape: WhisperShape) -> int:
        planned = traced(mode, shape=shape)
        return planned.backward - planned.state

    for mode, grows in (("full", True), ("one block", True), ("LoRA", True), ("encoder", False)):
        more = activations(mode, deep) - activations(mode, SHAPE)
        assert more > 0.5 * activations("full", SHAPE) if grows else more == 0
    assert activations("encoder", SHAPE) < activations("one block", SHAPE) < activations("full", SHAPE)
    assert activations("encoder", deep) < 0.4 * activations("full", deep)


SHAPES = {
    "large encoder": SHAPE,
    "large cache": dataclasses.replace(SHAPE, decoder_layers=6),
    "large vocabulary": dataclasses.replace(SHAPE, vocab_size=20_000),
    "more tokens than frames": dataclasses.replace(SHAPE, decoder_layers=6, source_positions=50, target_positions=80),
}
VALIDATED = [("full", False, shape) for shape in SHAPES]
VALIDATED += [("full", True, "large cache"), ("LoRA", False, "large cache")]
VALIDATED += mark_full(("full", True, "large encoder"))
VALIDATED += mark_full(*((mode, False, "large cache") for mode in ("encoder", "one block")))


def measure_validation_peak(parts: StepParts, seconds: float) -> int:
    """Return the peak of live bytes while three utterances are decoded up to the maximum length."""
    prompt = (4, 5, 6, 7)
    most = parts.architecture.most_tokens - len(prompt)
    rules = GenerationRules(prompt, suppressed=(OUR_TOKENS.end,), most_tokens=most)
    (batch,) = global_batch_of(seconds, seconds, seconds - 0.02, batch_size=3).micro_batches
    live = LiveBytes()
    live.count(parts.state_tensors())
    parts.model.eval()
    with torch.no_grad(), live:
        result = recognize(parts.forward, batch, BeamDecode(1, 0.0, 0.0, None, 0.0, OUR_TOKENS, rules))
    assert all(len(hypothesis) == most for hypothesis in result.hypotheses)
    return live.peak


@pytest.mark.parametrize(("mode", "half", "shape"), VALIDATED)
def test_planned_validation_peak_matches_measured_peak(mode, half, shape):
    dimensions = SHAPES[shape]
    measured = measure_validation_peak(parts_of(mode, "never", half, dimensions), dimensions.window_seconds)
    tracer = tracer_of(mode, half, dimensions)
    planned = tracer.trace_validation(BatchShape(3, dimensions.window_seconds, 20))
    # The state of the search, some numbers per hypothesis, is in host memory.
    assert 0.997 * measured <= planned <= 1.1 * measured
    assert tracer.trace_validation(BatchShape(2, dimensions.window_seconds, 20)) < measured  # negative control
