"""The traced peak against the real step's, and the plan from the command line."""

import json

import pytest
import torch

from konkanivani.assembly import build_front_end, build_step_parts
from konkanivani.config import PRESETS, ModelConfig, TrainConfig
from konkanivani.data.batching import cut_window
from konkanivani.errors import ResourceError, UsageError
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.live_bytes import LiveBytes
from konkanivani.memory.planner import Load, StepTracer, parse_budget, plan_memory
from konkanivani.training.step import train_step
from tests.conftest import TINY_MODEL, run_script
from tests.laws.parts import speeches

CPU = torch.device("cpu")
SMALL = ModelConfig(d_model=32, encoder_layers=2, decoder_layers=1, attention_heads=2, subsampling_channels=8)


def tracer_of(model: ModelConfig) -> StepTracer:
    config = TrainConfig(model=model)
    return StepTracer(lambda front: build_step_parts(config, 40, CPU, 1, front), build_front_end(config, CPU))


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("model", [SMALL, PRESETS["minimal"]], ids=["small", "minimal"])
def test_the_traced_peak_is_the_real_steps_peak(model, mode):
    config, policy = TrainConfig(model=model), RecomputePolicy(mode)
    spoken = [s for s in speeches(4, augmented=False)]
    window = cut_window([type(s)(s.utterance_id, s.waveform.float(), s.tokens, None) for s in spoken], 2, 2, 3)
    parts = build_step_parts(config, 40, CPU, 1, build_front_end(config, CPU))
    object.__setattr__(parts.forward, "recompute", policy)
    live = LiveBytes()
    live.count([*parts.model.parameters(), *parts.model.buffers()])
    live.count(tensor for state in parts.optimizer.state.values() for tensor in state.values())
    with live:
        train_step(parts, window, 0)
    traced = tracer_of(model).trace_window(window, policy).peak
    assert live.peak > live.live > 0
    assert abs(traced - live.peak) <= 0.02 * live.peak


def test_recomputing_needs_less_and_more_audio_needs_more():
    tracer = tracer_of(PRESETS["minimal"])
    never, always = RecomputePolicy("never"), RecomputePolicy("always")
    assert tracer.trace(Load(2, 5.0), always).peak < 0.8 * tracer.trace(Load(2, 5.0), never).peak
    assert tracer.trace(Load(2, 5.0), never).peak < tracer.trace(Load(4, 5.0), never).peak


def test_every_answer_fits_and_one_utterance_more_does_not():
    tracer, policy, budget = tracer_of(SMALL), RecomputePolicy("never"), parse_budget("48MiB")
    plan = plan_memory(tracer, budget, policy, (2.0, 8.0))
    for bucket in plan.buckets:
        assert bucket.utterances > 1
        assert tracer.trace(Load(bucket.utterances, bucket.seconds), policy).peak == bucket.peak <= budget
        assert tracer.trace(Load(bucket.utterances + 1, bucket.seconds), policy).peak > budget
    assert tracer.trace(Load(1, plan.longest_seconds), policy).peak <= budget
    assert tracer.trace(Load(1, 1.1 * plan.longest_seconds), policy).peak > budget


def test_a_budget_below_the_models_state_is_refused_with_a_preset_that_fits():
    with pytest.raises(ResourceError, match="1.. MiB.*budget is 60 MiB.*--preset minimal"):
        plan_memory(tracer_of(PRESETS["optimized"]), parse_budget("60MiB"), RecomputePolicy("never"), (2.0,))


@pytest.mark.parametrize("text", ["4", "4 gigs", "0GiB", "-1GiB", "99999GiB", "", "1e3MiB"])
def test_an_absurd_budget_is_refused(text):
    with pytest.raises(UsageError, match="--memory_budget"):
        parse_budget(text)


def test_budgets_have_binary_and_decimal_units():
    assert (parse_budget("4GiB"), parse_budget("1.5 MiB"), parse_budget("2GB")) == (2**32, 3 * 2**19, 2 * 10**9)


def test_the_plan_from_the_command_line():
    flags = ("--memory_budget", "24MiB", *TINY_MODEL, "--json")
    done = run_script("training_scripts/plan_memory.py", *flags)
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert [plan["recompute"] for plan in plans] == ["never", "always"]
    pairs = zip(plans[0]["buckets"], plans[1]["buckets"], strict=True)
    assert all(0 < never["utterances"] < always["utterances"] for never, always in pairs)
    assert run_script("training_scripts/plan_memory.py", "--memory_budget", "4").returncode == 2
