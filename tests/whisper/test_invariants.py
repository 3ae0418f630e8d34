"""The project's invariants on Whisper: trained whole, partly frozen, or with LoRA; transformers is not needed.

The invariants are described in tests/invariants; the planned peak and exact resume have test files of their own.
"""

import dataclasses
import functools
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from konkanivani.data.batching import Batch, GlobalBatch, order_for_concurrency
from konkanivani.data.text import OUR_TOKENS, GenerationRules
from konkanivani.inference.speech_model import digest_of
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.asr import LossCounts, LossSums
from konkanivani.models.decoder import FIRST_CAPACITY
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.ops import recompute
from konkanivani.training import step
from konkanivani.training.gradient import OrderedAccumulation
from konkanivani.training.step import StepParts, StepReport, train_step
from konkanivani.training.validation import RecognizedPortion
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, fail_at, failing_backward, failing_forward
from tests.invariants.parts import global_batch, relative_difference, speeches
from tests.pretrained_parts import (
    FAILING,
    MODES,
    are_equal,
    draw_lora_weights,
    gradients,
    largest_difference,
    recognize_greedily,
    state_of,
)
from tests.tracers import OperationCounter
from tests.whisper.parts import SHAPE, SPOKEN, is_trained, whisper_config, whisper_parts

BOUND = 1e-9
RECOMPUTED = ["never", "always"]
RAGGED = speeches(5)
FOUR = global_batch(SPOKEN, 2)
BLOCKS_BELOW = {"full": 0, "LoRA": 1, "one block": 2, "encoder": 3}  # number of blocks without trained parameters below
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_any_cut_gives_the_same_gradient(mode, recompute):
    parts = whisper_parts(mode, whisper_config(recompute))
    for spoken in (SPOKEN, RAGGED):
        whole = gradients(parts, global_batch(spoken, len(spoken)))
        assert whole.keys() == {name for name, _ in parts.model.named_parameters() if is_trained(name, mode)}
        assert all(gradient.norm() > 0 for gradient in whole.values())
        for size in (1, 2):
            assert largest_difference(whole, gradients(parts, global_batch(spoken, size))) < BOUND


@every_mode
def test_negative_control_averaging_the_micro_batches_means_is_another_gradient(mode):
    parts, cut = whisper_parts(mode), global_batch(SPOKEN, 1)
    whole = gradients(parts, cut)
    parts.model.zero_grad()
    for batch in cut.micro_batches:
        step.forward_and_backward(parts, batch, LossCounts(4 * sum(batch.token_lengths), 4))
    wrong = {name: p.grad for name, p in parts.model.named_parameters() if p.grad is not None}
    assert largest_difference(whole, wrong) > 1e-3


@pytest.mark.parametrize(("mode", "first"), parameter_grid(MODES, ("all", 1, 2, 4)))
def test_recomputed_blocks_give_the_same_gradient_bit_for_bit(mode, first):
    parts, flop = whisper_parts(mode), []
    policy = RecomputePolicy("always") if first == "all" else RecomputePolicy.first(first)
    found = []
    for tried in (parts, parts.recomputing(policy)):
        with FlopCounterMode(display=False) as counter:
            found.append(gradients(tried, FOUR))
        flop.append(counter.get_total_flops())
    assert are_equal(*found)
    # Below the trained blocks nothing is kept, so nothing is recomputed.
    assert (flop[1] > flop[0]) == (policy(1.0).count > BLOCKS_BELOW[mode])


@every_mode
def test_what_attention_gave_is_kept_where_a_block_is_recomputed(mode, monkeypatch):
    cut = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in SPOKEN], 2)
    attention, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.add.Tensor

    def calls(policy: str) -> tuple[int, int]:
        with OperationCounter() as found:
            gradients(whisper_parts(mode, dtype=torch.float32).recomputing(RecomputePolicy(policy)), cut)
        return found.counts[attention], found.counts[sum_]

    never, always = calls("never"), calls("always")
    assert never[0] == always[0] > 0 and never[1] < always[1]
    monkeypatch.setattr(recompute, "ATTENTION", [])
    assert calls("always")[0] > never[0]  # negative control


@functools.cache
def undisturbed_step(mode: str) -> tuple[StepReport, dict[str, torch.Tensor]]:
    parts = whisper_parts(mode)
    return train_step(parts, global_batch(SPOKEN, 2), 3), state_of(parts)


@pytest.mark.parametrize(("mode", "where", "when"), parameter_grid(MODES, ("forward", "backward"), FAILING))
def test_a_step_split_for_want_of_memory_is_the_same_step(mode, where, when):
    parts, (undisturbed, whole), when = whisper_parts(mode), undisturbed_step(mode), FAILING[when]
    half_way = SHAPE.encoder_layers + 1  # first block of the decoder: the second one has its gradient
    failing = (
        failing_forward(parts, when, ERRORS["cpu"])
        if where == "forward"
        else failing_backward(parts, when, ERRORS["cuda"], half_way)
    )
    report = train_step(failing, global_batch(SPOKEN, 2), 3)
    assert (undisturbed.splits, report.splits) == (0, 1) and not report.is_skipped
    for name in ("loss", "attention_loss", "gradient_norm"):
        assert getattr(report, name) == pytest.approx(getattr(undisturbed, name), rel=BOUND, abs=0)
    assert largest_difference(whole, state_of(parts)) < BOUND


@every_mode
def test_negative_control_what_the_failed_attempt_added_up_is_another_step(mode, monkeypatch):
    parts = whisper_parts(mode)
    monkeypatch.setattr(parts.optimizer, "zero_grad", lambda: None)
    assert train_step(failing_forward(parts, fail_at(1), ERRORS["cpu"]), global_batch(SPOKEN, 2), 3).splits == 1
    assert largest_difference(undisturbed_step(mode)[1], state_of(parts)) > 1e-3


def global_batch_of_five() -> GlobalBatch:
    """Return five fp32 micro-batches of one, an uneven split over two threads, in concurrent order."""
    cut = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in RAGGED], 1)
    return dataclasses.replace(cut, micro_batches=order_for_concurrency(cut.micro_batches, 2))


def trained(mode: str, concurrent_micro_batches: int, recompute: str = "never") -> dict[str, torch.Tensor]:
    """Return the weights, optimizer state and losses after two steps."""
    torch.set_num_threads(2)
    parts = whisper_parts(
        mode, whisper_config(recompute, concurrent_micro_batches=concurrent_micro_batches), torch.float32
    )
    torch.set_num_threads(concurrent_micro_batches)  # one thread per product
    reports = [train_step(parts, global_batch_of_five(), number) for number in range(2)]
    assert parts.forward.concurrent_micro_batches == concurrent_micro_batches and all(
        isinstance(report, StepReport) for report in reports
    )
    return state_of(parts) | {"losses": torch.tensor([[report.loss, report.gradient_norm] for report in reports])}


def held_up(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay the start of the first micro-batch."""
    (late, *_), forward_and_backward = global_batch_of_five().micro_batches, step.forward_and_backward

    def held(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        time.sleep(seconds if batch.utterance_ids == late.utterance_ids else 0.0)
        return forward_and_backward(parts, batch, counts)

    monkeypatch.setattr(step, "forward_and_backward", held)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_side_by_side_is_one_after_another_whoever_is_late(mode, recompute, monkeypatch, two_threads):
    expected = trained(mode, 1, recompute)
    assert are_equal(trained(mode, 2, recompute), expected)
    held_up(monkeypatch, 0.1)
    assert are_equal(trained(mode, 2, recompute), expected)


def test_negative_control_without_turns_it_matters_who_is_late(monkeypatch, two_threads):
    expected = trained("LoRA", 1)
    monkeypatch.setattr(OrderedAccumulation, "_wait", lambda self, index, gradient=None: None)
    held_up(monkeypatch, 1.0)
    assert not are_equal(trained("LoRA", 2), expected)


@every_mode
def test_after_forty_steps_what_is_frozen_has_its_digest_and_nothing_else_has(mode):
    parts = whisper_parts(mode, dtype=torch.float32)
    cut = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in speeches(2)], 2)
    before = {name: digest_of({name: one}) for name, one in parts.model.state_dict().items()}
    losses = [train_step(parts, cut, number).loss for number in range(40)]
    assert losses[-1] < 0.98 * losses[0]
    kept = {name for name, one in parts.model.state_dict().items() if digest_of({name: one}) == before[name]}
    assert kept == {name for name in before if not is_trained(name, mode)} and kept < before.keys()


def test_low_rank_products_begin_as_nothing_and_merged_they_are_the_same_model():
    (batch,) = global_batch(
        [dataclasses.replace(one, waveform=one.waveform.float()) for one in SPOKEN], 4
    ).micro_batches

    def logits(model: torch.nn.Module) -> torch.Tensor:
        front_end = WhisperArchitecture(SHAPE).build_front_end(whisper_config().augment)
        features, lengths = front_end(batch.waveforms, batch.sample_lengths, None)
        return model.decoder.output(model(features, lengths, batch.decoder_tokens).decoded)

    architecture = WhisperArchitecture(SHAPE, MODES["LoRA"])
    tuned, base = architecture.build(), WhisperArchitecture(SHAPE).build()
    tuned.load_state_dict(base.state_dict(), strict=False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(logits(tuned), logits(base))
    draw_lora_weights(tuned)
    plain, weights = architecture.plain(tuned.state_dict())
    merged = plain.build()
    merged.load_state_dict(weights)
    assert relative_difference(logits(tuned), logits(merged)) < 1e-6
    assert relative_difference(logits(tuned), logits(base)) > 1e-3  # negative control


def validated(parts: StepParts) -> RecognizedPortion:
    """Return each utterance's likeliest tokens from cached decoding, up to the maximum length."""
    rules = GenerationRules(prompt=(4, 5), suppressed=(OUR_TOKENS.end,), most_tokens=SHAPE.target_positions - 3)
    return recognize_greedily(parts, global_batch(SPOKEN, 3), OUR_TOKENS, rules)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_generation_between_two_gradients_changes_neither(mode, recompute):
    parts = whisper_parts(mode, whisper_config(recompute))
    alone, said = gradients(parts, FOUR), []
    for _ in range(2):
        said.append(validated(parts))
        assert are_equal(gradients(parts, FOUR), alone)
    assert said[0] == said[1] and max(len(one.hypothesis.split()) for one in said[0].scored) > FIRST_CAPACITY
    train_step(parts, global_batch(SPOKEN, 2), 0)
    assert validated(parts) != said[0] and not are_equal(gradients(parts, FOUR), alone)  # negative control
