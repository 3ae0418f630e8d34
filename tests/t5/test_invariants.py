"""The project's invariants on T5: trained whole, partly frozen, or with LoRA; transformers is not needed."""

import dataclasses
import functools
import gc

import pytest
import torch

from konkanivani.config import PretrainedConfig, TrainConfig
from konkanivani.data.text import GenerationRules
from konkanivani.inference.speech_model import digest_of
from konkanivani.memory.devices import DeviceCosts, cuda_costs
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.memory.weights import Placement
from konkanivani.models import decoder
from konkanivani.models.asr import LossCounts
from konkanivani.models.decoder import FIRST_CAPACITY, DecoderCache
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
from tests.invariants.parts import PLACEMENTS, measured_peak, relative_difference
from tests.pretrained_parts import (
    FAILING,
    MODES,
    are_equal,
    gradients,
    largest_difference,
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

BOUND = 1e-9
TRAINED = [*parameter_grid(MODES, ("1.1",)), ("full", "1.0"), ("LoRA", "1.0")]
every_mode = pytest.mark.parametrize("mode", MODES)
every_model = pytest.mark.parametrize(("mode", "variant"), TRAINED)
SAID = pairs(4)
ONLY_TENSORS = DeviceCosts("a CPU", is_cuda=False, rounding=1, workspace=0, context=0)


@every_model
def test_any_cut_gives_the_same_gradient(mode, variant):
    parts = t5_parts(mode, variant=variant)
    for said in (SAID, pairs(5, seed=1)):
        whole = gradients(parts, global_batch(said, len(said)))
        assert whole.keys() == {name for name, _ in parts.model.named_parameters() if is_trained(name, mode)}
        assert all(gradient.norm() > 0 for gradient in whole.values())
        for size in (1, 2):
            assert largest_difference(whole, gradients(parts, global_batch(said, size))) < BOUND


@every_mode
def test_negative_control_averaging_the_micro_batches_means_is_another_gradient(mode):
    parts, cut = t5_parts(mode), global_batch(SAID, 1)
    whole = gradients(parts, cut)
    parts.model.zero_grad()
    for batch in cut.micro_batches:
        step.forward_and_backward(parts, batch, LossCounts(4 * sum(batch.token_lengths), 4))
    wrong = {name: p.grad for name, p in parts.model.named_parameters() if p.grad is not None}
    assert largest_difference(whole, wrong) > 1e-3


def test_padding_is_invisible():
    parts = t5_parts()
    (batch,) = global_batch(SAID, 4).micro_batches
    with torch.no_grad():
        together, lengths = parts.model.encode(batch.waveforms, batch.sample_lengths)
        for row, (ids, length) in enumerate(zip(batch.waveforms, lengths, strict=True)):
            alone, _ = parts.model.encode(ids[None, :length], (length,))
            assert relative_difference(alone[0], together[row, :length]) < BOUND
        other = batch.waveforms.clone()
        for row, length in enumerate(lengths):
            other[row, length:] = 7  # what stands in the padding does not matter
        again, _ = parts.model.encode(other, batch.sample_lengths)
        assert all(torch.equal(again[row, :n], together[row, :n]) for row, n in enumerate(lengths))
        unmasked, _ = parts.model.encode(other, (other.shape[1],) * 4)  # negative control
        assert relative_difference(unmasked[0, : lengths[0]], together[0, : lengths[0]]) > 1e-3


@pytest.mark.parametrize(("mode", "first"), parameter_grid(MODES, ("all", 2, 4)))
def test_recomputed_blocks_give_the_same_gradient_bit_for_bit(mode, first):
    parts, cut = t5_parts(mode), global_batch(SAID, 2)
    policy = RecomputePolicy("always") if first == "all" else RecomputePolicy.first(first)
    assert are_equal(gradients(parts, cut), gradients(parts.recomputing(policy), cut))


@functools.cache
def undisturbed_step(mode: str) -> tuple[StepReport, dict[str, torch.Tensor]]:
    parts = t5_parts(mode)
    return train_step(parts, global_batch(SAID, 2), 3), state_of(parts)


@pytest.mark.parametrize(("mode", "where", "when"), parameter_grid(("full", "LoRA"), ("forward", "backward"), FAILING))
def test_a_step_split_for_want_of_memory_is_the_same_step(mode, where, when):
    parts, (undisturbed, whole), when = t5_parts(mode), undisturbed_step(mode), FAILING[when]
    if where == "forward":
        failing = failing_forward(parts, when, ERRORS["cpu"])
    else:
        failing = failing_backward(parts, when, ERRORS["cuda"], SHAPE.encoder_layers + 1)
    report = train_step(failing, global_batch(SAID, 2), 3)
    assert (undisturbed.splits, report.splits) == (0, 1) and not report.is_skipped
    assert report.loss == pytest.approx(undisturbed.loss, rel=BOUND)
    assert largest_difference(whole, state_of(parts)) < BOUND


@pytest.mark.parametrize(
    ("mode", "place"), parameter_grid(MODES, [place for place in PLACEMENTS if "hal" not in place])
)
def test_where_weights_lie_changes_no_number(mode, place):
    on_card, elsewhere = t5_parts(mode), t5_parts(mode, placement=PLACEMENTS[place])
    for number in range(2):
        reports = [train_step(parts, global_batch(SAID, 2), number) for parts in (on_card, elsewhere)]
        assert reports[0].loss == reports[1].loss
    assert are_equal(state_of(on_card), state_of(elsewhere))
    assert validated(on_card) == validated(elsewhere)


@every_mode
def test_after_twenty_steps_what_is_frozen_has_its_digest_and_nothing_else_has(mode):
    parts, cut = t5_parts(mode, t5_config(rate=1e-2), torch.float32), global_batch(pairs(2), 2)
    before = {name: digest_of({name: one}) for name, one in parts.model.state_dict().items()}
    losses = [train_step(parts, cut, number).loss for number in range(20)]
    assert losses[-1] < 0.98 * losses[0]
    kept = {name for name, one in parts.model.state_dict().items() if digest_of({name: one}) == before[name]}
    assert kept == {name for name in before if not is_trained(name, mode)} and kept < before.keys()


def test_merged_low_rank_products_are_the_same_model():
    (batch,) = global_batch(SAID, 4).micro_batches
    tuned = t5_parts("LoRA").model
    plain, weights = T5Architecture(SHAPE, MODES["LoRA"]).plain(tuned.state_dict())
    merged = plain.build().double()
    merged.load_state_dict(weights)

    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model.decoder.output(model(batch.waveforms, batch.sample_lengths, batch.decoder_tokens).decoded)

    assert relative_difference(logits(tuned), logits(merged)) < BOUND
    assert relative_difference(logits(tuned), logits(t5_parts().model)) > 1e-3  # negative control


def validated(parts: StepParts, most: int = 40) -> RecognizedPortion:
    """Return each input's likeliest tokens from cached decoding, up to the maximum length."""
    return recognize_greedily(parts, global_batch(SAID, 3), SPECIAL, rules_of(most))


def rules_of(most: int) -> GenerationRules:
    """Return rules under which a search has exactly `most` tokens."""
    return GenerationRules(suppressed=(SPECIAL.end,), most_tokens=most)


@every_mode
def test_generation_between_two_gradients_changes_neither(mode):
    parts, cut = t5_parts(mode), global_batch(SAID, 2)
    alone, said = gradients(parts, cut), []
    for _ in range(2):
        said.append(validated(parts))
        assert are_equal(gradients(parts, cut), alone)
    assert said[0] == said[1] and max(len(one.hypothesis.split()) for one in said[0].scored) > FIRST_CAPACITY
    train_step(parts, cut, 0)
    assert validated(parts) != said[0] and not are_equal(gradients(parts, cut), alone)  # negative control


def caches() -> int:
    """Return the number of key-value caches that exist."""
    gc.collect()
    return sum(isinstance(one, DecoderCache) for one in gc.get_objects())


def test_no_cache_exists_during_training(monkeypatch):
    made, in_pass = [], []

    class Counted(DecoderCache):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(len(self.self_kv))

    monkeypatch.setattr("konkanivani.models.t5.model.DecoderCache", Counted)
    parts = t5_parts()
    validated(parts)
    assert made and caches() == 0  # the search's caches are gone with it
    made.clear()
    forward_and_backward = step.forward_and_backward

    def watched(*arguments: object, **named: object) -> tuple[torch.Tensor, ...]:
        found = forward_and_backward(*arguments, **named)
        in_pass.append(caches())
        return found

    monkeypatch.setattr(step, "forward_and_backward", watched)
    train_step(parts, global_batch(SAID, 2), 0)
    assert (made, in_pass) == ([], [0, 0])
    # Negative control: with a cache in the forward pass, both counts see it.
    kept = []
    forward = type(parts.model.decoder).forward

    def caching(self, vectors, encoded, *others):
        kept.append(self.begin(encoded, (encoded.shape[1],) * len(encoded), 1))
        return forward(self, vectors, encoded, *others)

    monkeypatch.setattr(type(parts.model.decoder), "forward", caching)
    train_step(parts, global_batch(SAID, 2), 1)
    assert len(made) == 2 and in_pass[2:] == [1, 2] and decoder.DecoderCache is DecoderCache


LARGER = T5Shape(64, 16, 4, 3, 3, 128, 300)
POLICIES = {"never": RecomputePolicy("never"), "some": RecomputePolicy.first(3), "always": RecomputePolicy("always")}


@pytest.mark.parametrize(("mode", "policy"), [("full", "never"), ("full", "always"), ("LoRA", "some")])
def test_a_step_takes_what_is_planned_for_its_size(mode, policy):
    architecture = T5Architecture(LARGER, MODES[mode])
    said = [dataclasses.replace(one, waveform=torch.arange(2, 130 - n), tokens=[9] * 100) for n, one in enumerate(SAID)]
    parts = build_step_parts(t5_config(), architecture, CPU, 100).recomputing(POLICIES[policy])
    measured = measured_peak(parts, global_batch(said, 2))
    tracer = build_tracer(t5_config(), architecture, ONLY_TENSORS)
    planned = tracer.trace(BatchShape(2, 128.0, 100), POLICIES[policy]).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured
    smaller = tracer.trace(BatchShape(2, 64.0, 100), POLICIES[policy]).bytes  # negative control
    assert smaller < 0.999 * measured


def test_the_search_takes_what_is_planned_with_its_cache():
    architecture = T5Architecture(dataclasses.replace(LARGER, variant=VARIANTS["1.0"]))
    parts = build_step_parts(t5_config(), architecture, CPU, 100)
    said = [dataclasses.replace(one, waveform=torch.arange(2, 66), tokens=[9] * 20) for one in SAID]
    found = []
    with LiveBytes() as live:
        live.count(parts.state_tensors())
        live.restart_peak()
        recognize_greedily(parts, global_batch(said, 4), SPECIAL, rules_of(80))
        found.append(live.restart_peak())
    tracer = build_tracer(t5_config(), architecture, ONLY_TENSORS)
    planned = tracer.trace_validation(BatchShape(4, 64.0, 80))
    assert found[0] <= planned <= 1.5 * found[0]
    assert tracer.trace_validation(BatchShape(4, 64.0, 20)) < found[0]  # negative control: a cache of 20 tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_beyond_fp16_do_not_overflow(variant):
    torch.manual_seed(0)
    module = FeedForward(dataclasses.replace(SHAPE, variant=VARIANTS[variant]))
    with torch.no_grad():
        module.expand.weight.mul_(3_000)
        module.contract.weight.mul_(100)
    x = torch.randn(2, 5, SHAPE.d_model)
    expected = module(x)
    with torch.autocast("cpu", dtype=torch.float16):
        found = module(x)
    assert found.isfinite().all() and relative_difference(expected, found) < 0.01
    assert expected.abs().max() > 65_504  # negative control: fp16 has no such numbers


def test_a_plan_counts_tokens_up_to_the_limits(tmp_path):
    texts = PretrainedConfig(str(write_folder(tmp_path / "base")), max_input_tokens=196, max_target_tokens=384)
    request = PlanRequest(TrainConfig(pretrained=texts), ONLY_TENSORS, 2**30, "always")
    assert request.lengths == [25, 49, 98, 196] and request.window == 196
    assert (request.tokens(196), request.tokens(1)) == (384, 2)


def traced_on_the_host(layers: int, placement: Placement, mode: str = "full") -> Peak:
    """Return the peaks of a step of a decoder with this number of blocks, traced for a card and its host."""
    shape = dataclasses.replace(LARGER, encoder_layers=layers, decoder_layers=1)
    architecture = T5Architecture(shape, MODES[mode])
    tracer = build_tracer(t5_config(), architecture, cuda_costs("a card", (7, 5)), placement)
    return tracer.trace(BatchShape(4, 128.0, 8), POLICIES["always"])


def test_inputs_of_fetched_blocks_wait_on_the_host_for_their_recomputation():
    host, ahead = Placement(offloaded_blocks=99), Placement(offloaded_blocks=99, prefetch=True)
    an_input = 4 * 128 * LARGER.d_model * 4  # bytes of one block's input, in fp32
    fewer, more = traced_on_the_host(4, host), traced_on_the_host(12, host)
    assert more.backward - fewer.backward < an_input
    a_block = 4 * sum(p.numel() for p in T5Architecture(LARGER).build_without_values().encoder.blocks[0].parameters())
    # Weights and AdamW's moments; the gradients are allocated before the peak, too.
    assert more.host - fewer.host == pytest.approx(8 * (4 * a_block + an_input), rel=0.01)
    # Negative control: with a prefetch, inputs stay on the card.
    fewer, more = traced_on_the_host(4, ahead), traced_on_the_host(12, ahead)
    assert more.backward - fewer.backward >= 8 * an_input
    # Below the first trained block nothing is recomputed, so that nothing waits.
    frozen = [traced_on_the_host(count, host, "encoder").host for count in (4, 12)]
    assert frozen[1] - frozen[0] == pytest.approx(8 * a_block, rel=0.01)
