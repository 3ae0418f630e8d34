"""The project's invariants on T5, trained fully, partly frozen, or with LoRA. Needs no transformers."""

import dataclasses
import functools
import gc

import pytest
import torch

from konkanivani.config import PretrainedConfig, TrainConfig
from konkanivani.data.text import GenerationRules
from konkanivani.memory.devices import DeviceCosts, cuda_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import Placement
from konkanivani.models import decoder
from konkanivani.models.decoder import DecoderCache
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.model import FeedForward, T5Shape
from konkanivani.planning.report import PlanRequest
from konkanivani.planning.tensors import LiveBytes
from konkanivani.planning.tracer import BatchShape, Peak
from konkanivani.planning.traces import build_tracer
from konkanivani.training import step
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, StepReport, train_step
from konkanivani.training.validation import RecognizedPortion
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, failing_backward, failing_forward
from tests.invariants.parts import PLACEMENTS, are_equal, max_relative_difference, measured_peak, relative_difference
from tests.pretrained_parts import (
    BOUND,
    FAILING,
    MODES,
    averaged_gradients,
    check_changed_weights,
    check_decoding_between_gradients,
    check_gradients_of_splits,
    check_split_step,
    gradients,
    recognize_greedily,
    state_of,
)
from tests.t5.parts import (
    CPU,
    SHAPE,
    SPECIAL,
    VARIANTS,
    global_batch,
    is_trained,
    pairs,
    t5_config,
    t5_parts,
    write_folder,
)

TRAINED = [*parameter_grid(MODES, ("1.1",)), ("full", "1.0"), ("LoRA", "1.0")]
every_mode = pytest.mark.parametrize("mode", MODES)
every_model = pytest.mark.parametrize(("mode", "variant"), TRAINED)
FOUR_PAIRS = pairs(4)
ONLY_TENSORS = DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=0, context=0)


@every_model
def test_gradients_do_not_depend_on_micro_batch_size(mode, variant):
    parts = t5_parts(mode, variant=variant)
    trained = {name for name, _ in parts.model.named_parameters() if is_trained(name, mode)}
    for examples in (FOUR_PAIRS, pairs(5, seed=1)):
        check_gradients_of_splits(parts, trained, examples, global_batch)


@every_mode
def test_negative_control_average_of_micro_batch_means_differs(mode):
    parts, batch = t5_parts(mode), global_batch(FOUR_PAIRS, 1)
    assert max_relative_difference(gradients(parts, batch), averaged_gradients(parts, batch)) > 1e-3


def test_padding_does_not_affect_encoder_output():
    parts = t5_parts()
    (batch,) = global_batch(FOUR_PAIRS, 4).micro_batches
    with torch.no_grad():
        together, lengths = parts.model.encode(batch.waveforms, batch.sample_lengths)
        for row, (ids, length) in enumerate(zip(batch.waveforms, lengths, strict=True)):
            alone, _ = parts.model.encode(ids[None, :length], (length,))
            assert relative_difference(alone[0], together[row, :length]) < BOUND
        other = batch.waveforms.clone()
        for row, length in enumerate(lengths):
            other[row, length:] = 7  # the ids in the padding must not matter
        again, _ = parts.model.encode(other, batch.sample_lengths)
        assert all(torch.equal(again[row, :n], together[row, :n]) for row, n in enumerate(lengths))
        unmasked, _ = parts.model.encode(other, (other.shape[1],) * 4)  # negative control
        assert relative_difference(unmasked[0, : lengths[0]], together[0, : lengths[0]]) > 1e-3


@pytest.mark.parametrize(("mode", "first"), parameter_grid(MODES, ("all", 2, 4)))
def test_recomputation_gives_bit_identical_gradients(mode, first):
    parts, batch = t5_parts(mode), global_batch(FOUR_PAIRS, 2)
    policy = RecomputePolicy("always") if first == "all" else RecomputePolicy.first(first)
    assert are_equal(gradients(parts, batch), gradients(parts.recomputing(policy), batch))


@functools.cache
def step_without_failure(mode: str) -> tuple[StepReport, dict[str, torch.Tensor]]:
    parts = t5_parts(mode)
    return train_step(parts, global_batch(FOUR_PAIRS, 2), 3), state_of(parts)


@pytest.mark.parametrize(("mode", "where", "when"), parameter_grid(("full", "LoRA"), ("forward", "backward"), FAILING))
def test_step_split_after_out_of_memory_equals_unsplit_step(mode, where, when):
    parts, when = t5_parts(mode), FAILING[when]
    if where == "forward":
        failing = failing_forward(parts, when, ERRORS["cpu"])
    else:
        failing = failing_backward(parts, when, ERRORS["cuda"], SHAPE.encoder_layers + 1)
    check_split_step(failing, global_batch(FOUR_PAIRS, 2), *step_without_failure(mode))


@pytest.mark.parametrize(
    ("mode", "place"), parameter_grid(MODES, [place for place in PLACEMENTS if "hal" not in place])
)
def test_offloaded_weights_give_identical_results(mode, place):
    on_card, elsewhere = t5_parts(mode), t5_parts(mode, placement=PLACEMENTS[place])
    for number in range(2):
        reports = [train_step(parts, global_batch(FOUR_PAIRS, 2), number) for parts in (on_card, elsewhere)]
        assert reports[0].loss == reports[1].loss
    assert are_equal(state_of(on_card), state_of(elsewhere))
    assert decode_greedily(on_card) == decode_greedily(elsewhere)


@every_mode
def test_only_trained_weights_change_in_20_steps(mode):
    parts, batch = t5_parts(mode, t5_config(rate=1e-2), torch.float32), global_batch(pairs(2), 2)
    check_changed_weights(parts, batch, lambda name: is_trained(name, mode), 20)


def test_merged_lora_products_give_the_same_logits():
    (batch,) = global_batch(FOUR_PAIRS, 4).micro_batches
    tuned = t5_parts("LoRA").model
    plain, weights = T5Architecture(SHAPE, MODES["LoRA"]).plain(tuned.state_dict())
    merged = plain.build().double()
    merged.load_state_dict(weights)

    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model.decoder.output(model(batch.waveforms, batch.sample_lengths, batch.decoder_tokens).decoded)

    assert relative_difference(logits(tuned), logits(merged)) < BOUND
    assert relative_difference(logits(tuned), logits(t5_parts().model)) > 1e-3  # negative control


def decode_greedily(parts: StepParts, most: int = 40) -> RecognizedPortion:
    """Return each input's likeliest tokens from cached decoding, up to the maximum length."""
    return recognize_greedily(parts, global_batch(FOUR_PAIRS, 3), SPECIAL, rules_with_length(most))


def rules_with_length(most: int) -> GenerationRules:
    """Return rules with which every hypothesis has exactly `most` tokens."""
    return GenerationRules(suppressed=(SPECIAL.end,), most_tokens=most)


@every_mode
def test_decoding_and_gradients_do_not_affect_each_other(mode):
    check_decoding_between_gradients(t5_parts(mode), global_batch(FOUR_PAIRS, 2), decode_greedily)


def count_caches() -> int:
    """Return the number of key-value caches in memory."""
    gc.collect()
    return sum(isinstance(one, DecoderCache) for one in gc.get_objects())


def test_no_cache_exists_during_training(monkeypatch):
    made, in_pass = [], []

    class CountedCache(DecoderCache):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(len(self.self_kv))

    monkeypatch.setattr("konkanivani.models.t5.model.DecoderCache", CountedCache)
    parts = t5_parts()
    decode_greedily(parts)
    assert made and count_caches() == 0  # the caches are freed after the search
    made.clear()
    forward_and_backward = step.forward_and_backward

    def count_in_pass(*arguments: object, **named: object) -> tuple[torch.Tensor, ...]:
        result = forward_and_backward(*arguments, **named)
        in_pass.append(count_caches())
        return result

    monkeypatch.setattr(step, "forward_and_backward", count_in_pass)
    train_step(parts, global_batch(FOUR_PAIRS, 2), 0)
    assert (made, in_pass) == ([], [0, 0])
    # Negative control: a cache in the forward pass is found by both counts.
    kept = []
    forward = type(parts.model.decoder).forward

    def caching(self, vectors, encoded, *others):
        kept.append(self.begin(encoded, (encoded.shape[1],) * len(encoded), 1))
        return forward(self, vectors, encoded, *others)

    monkeypatch.setattr(type(parts.model.decoder), "forward", caching)
    train_step(parts, global_batch(FOUR_PAIRS, 2), 1)
    assert len(made) == 2 and in_pass[2:] == [1, 2] and decoder.DecoderCache is DecoderCache


LARGER = T5Shape(64, 16, 4, 3, 3, 128, 300)
POLICIES = {"never": RecomputePolicy("never"), "some": RecomputePolicy.first(3), "always": RecomputePolicy("always")}


@pytest.mark.parametrize(("mode", "policy"), [("full", "never"), ("full", "always"), ("LoRA", "some")])
def test_planned_step_peak_is_within_2_percent_of_measured(mode, policy):
    architecture = T5Architecture(LARGER, MODES[mode])
    long = [
        dataclasses.replace(one, waveform=torch.arange(2, 130 - n), tokens=[9] * 100)
        for n, one in enumerate(FOUR_PAIRS)
    ]
    parts = build_step_parts(t5_config(), architecture, CPU, 100).recomputing(POLICIES[policy])
    measured = measured_peak(parts, global_batch(long, 2))
    tracer = build_tracer(t5_config(), architecture, ONLY_TENSORS)
    planned = tracer.trace(BatchShape(2, 128.0, 100), POLICIES[policy]).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured
    smaller = tracer.trace(BatchShape(2, 64.0, 100), POLICIES[policy]).bytes  # negative control
    assert smaller < 0.999 * measured


def test_planned_decoding_peak_bounds_measured_peak():
    architecture = T5Architecture(dataclasses.replace(LARGER, variant=VARIANTS["1.0"]))
    parts = build_step_parts(t5_config(), architecture, CPU, 100)
    long = [dataclasses.replace(one, waveform=torch.arange(2, 66), tokens=[9] * 20) for one in FOUR_PAIRS]
    results = []
    with LiveBytes() as live:
        live.count(parts.state_tensors())
        live.restart_peak()
        recognize_greedily(parts, global_batch(long, 4), SPECIAL, rules_with_length(80))
        results.append(live.restart_peak())
    tracer = build_tracer(t5_config(), architecture, ONLY_TENSORS)
    planned = tracer.trace_validation(BatchShape(4, 64.0, 80))
    assert results[0] <= planned <= 1.5 * results[0]
    assert tracer.trace_validation(BatchShape(4, 64.0, 20)) < results[0]  # negative control: a cache of 20 tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_beyond_fp16_range_do_not_overflow(variant):
    torch.manual_seed(0)
    module = FeedForward(dataclasses.replace(SHAPE, variant=VARIANTS[variant]))
    with torch.no_grad():
        module.expand.weight.mul_(3_000)
        module.contract.weight.mul_(100)
    x = torch.randn(2, 5, SHAPE.d_model)
    expected = module(x)
    with torch.autocast("cpu", dtype=torch.float16):
        actual = module(x)
    assert actual.isfinite().all() and relative_difference(expected, actual) < 0.01
    assert expected.abs().max() > 65_504  # negative control: fp16 cannot represent it


def test_plan_request_counts_tokens_up_to_the_limits(tmp_path):
    texts = PretrainedConfig(str(write_folder(tmp_path / "base")), max_input_tokens=196, max_target_tokens=384)
    request = PlanRequest(TrainConfig(pretrained=texts), ONLY_TENSORS, 2**30, "always")
    assert request.lengths == [25, 49, 98, 196] and request.window == 196
    assert (request.tokens(196), request.tokens(1)) == (384, 2)


def trace_for_gpu_and_host(layers: int, placement: Placement, mode: str = "full") -> Peak:
    """Return the peaks on GPU and host of a step with this number of encoder blocks and one decoder block."""
    shape = dataclasses.replace(LARGER, encoder_layers=layers, decoder_layers=1)
    architecture = T5Architecture(shape, MODES[mode])
    tracer = build_tracer(t5_config(), architecture, cuda_costs("a card", (7, 5)), placement)
    return tracer.trace(BatchShape(4, 128.0, 8), POLICIES["always"])


def test_inputs_of_offloaded_blocks_are_kept_on_the_host():
    host, ahead = Placement(offloaded_blocks=99), Placement(offloaded_blocks=99, prefetch=True)
    an_input = 4 * 128 * LARGER.d_model * 4  # bytes of one block's input, in fp32
    fewer, more = trace_for_gpu_and_host(4, host), trace_for_gpu_and_host(12, host)
    assert more.backward - fewer.backward < an_input
    a_block = 4 * sum(p.numel() for p in T5Architecture(LARGER).build_without_values().encoder.blocks[0].parameters())
    # Weights and AdamW's moments. The gradients are already allocated at the peak.
    assert more.host - fewer.host == pytest.approx(8 * (4 * a_block + an_input), rel=0.01)
    # Negative control: with prefetching, the inputs stay on the GPU.
    fewer, more = trace_for_gpu_and_host(4, ahead), trace_for_gpu_and_host(12, ahead)
    assert more.backward - fewer.backward >= 8 * an_input
    # Below the first trained block nothing is recomputed, so no inputs are kept.
    frozen = [trace_for_gpu_and_host(count, host, "encoder").host for count in (4, 12)]
    assert frozen[1] - frozen[0] == pytest.approx(8 * a_block, rel=0.01)
