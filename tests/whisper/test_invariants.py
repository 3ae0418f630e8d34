"""The project's invariants on Whisper, trained fully, partly frozen, or with LoRA. Needs no transformers.

tests/invariants describes them. The planned peak and exact resume have their own test files.
"""

import dataclasses
import functools
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from konkanivani.data.batching import Batch, GlobalBatch, order_for_concurrency
from konkanivani.data.text import OUR_TOKENS, GenerationRules
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.asr import LossCounts, LossSums
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.ops import recompute
from konkanivani.training import step
from konkanivani.training.gradient import OrderedAccumulation
from konkanivani.training.step import StepParts, StepReport, train_step
from konkanivani.training.validation import RecognizedPortion
from tests.conftest import parameter_grid
from tests.invariants.failing import ERRORS, fail_at, failing_backward, failing_forward
from tests.invariants.parts import are_equal, global_batch, max_relative_difference, relative_difference, speeches
from tests.pretrained_parts import (
    FAILING,
    MODES,
    averaged_gradients,
    check_changed_weights,
    check_decoding_between_gradients,
    check_gradients_of_splits,
    check_split_step,
    draw_lora_weights,
    gradients,
    recognize_greedily,
    state_of,
)
from tests.tracers import OperationCounter
from tests.whisper.parts import FOUR_UTTERANCES, SHAPE, is_trained, whisper_config, whisper_parts

RECOMPUTED = ["never", "always"]
FIVE_UTTERANCES = speeches(5)
GLOBAL_BATCH = global_batch(FOUR_UTTERANCES, 2)
BLOCKS_BELOW = {"full": 0, "LoRA": 1, "one block": 2, "encoder": 3}  # number of frozen blocks at the bottom
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_gradients_do_not_depend_on_micro_batch_size(mode, recompute):
    parts = whisper_parts(mode, whisper_config(recompute))
    trained = {name for name, _ in parts.model.named_parameters() if is_trained(name, mode)}
    for utterances in (FOUR_UTTERANCES, FIVE_UTTERANCES):
        check_gradients_of_splits(parts, trained, utterances, global_batch)


@every_mode
def test_negative_control_average_of_micro_batch_means_differs(mode):
    parts, batch = whisper_parts(mode), global_batch(FOUR_UTTERANCES, 1)
    assert max_relative_difference(gradients(parts, batch), averaged_gradients(parts, batch)) > 1e-3


@pytest.mark.parametrize(("mode", "first"), parameter_grid(MODES, ("all", 1, 2, 4)))
def test_recomputation_gives_bit_identical_gradients(mode, first):
    parts, flop = whisper_parts(mode), []
    policy = RecomputePolicy("always") if first == "all" else RecomputePolicy.first(first)
    results = []
    for tried in (parts, parts.recomputing(policy)):
        with FlopCounterMode(display=False) as counter:
            results.append(gradients(tried, GLOBAL_BATCH))
        flop.append(counter.get_total_flops())
    assert are_equal(*results)
    # Below the trained blocks no activations are kept, so nothing is recomputed.
    assert (flop[1] > flop[0]) == (policy(1.0).count > BLOCKS_BELOW[mode])


@every_mode
def test_recomputed_blocks_keep_their_attention_output(mode, monkeypatch):
    batch = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in FOUR_UTTERANCES], 2)
    attention, sum_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.add.Tensor

    def calls(policy: str) -> tuple[int, int]:
        with OperationCounter() as result:
            gradients(whisper_parts(mode, dtype=torch.float32).recomputing(RecomputePolicy(policy)), batch)
        return result.counts[attention], result.counts[sum_]

    never, always = calls("never"), calls("always")
    assert never[0] == always[0] > 0 and never[1] < always[1]
    monkeypatch.setattr(recompute, "ATTENTION", [])
    assert calls("always")[0] > never[0]  # negative control


@functools.cache
def step_without_failure(mode: str) -> tuple[StepReport, dict[str, torch.Tensor]]:
    parts = whisper_parts(mode)
    return train_step(parts, global_batch(FOUR_UTTERANCES, 2), 3), state_of(parts)


@pytest.mark.parametrize(("mode", "where", "when"), parameter_grid(MODES, ("forward", "backward"), FAILING))
def test_step_split_after_out_of_memory_equals_unsplit_step(mode, where, when):
    parts, when = whisper_parts(mode), FAILING[when]
    decoder_block = SHAPE.encoder_layers + 1  # the first one; the second one already has its gradients
    failing = (
        failing_forward(parts, when, ERRORS["cpu"])
        if where == "forward"
        else failing_backward(parts, when, ERRORS["cuda"], decoder_block)
    )
    check_split_step(failing, global_batch(FOUR_UTTERANCES, 2), *step_without_failure(mode))


@every_mode
def test_negative_control_gradients_of_failed_attempt_change_the_step(mode, monkeypatch):
    parts = whisper_parts(mode)
    monkeypatch.setattr(parts.optimizer, "zero_grad", lambda: None)
    assert (
        train_step(failing_forward(parts, fail_at(1), ERRORS["cpu"]), global_batch(FOUR_UTTERANCES, 2), 3).splits == 1
    )
    assert max_relative_difference(step_without_failure(mode)[1], state_of(parts)) > 1e-3


def global_batch_of_five() -> GlobalBatch:
    """Return five fp32 micro-batches of one utterance, which two threads cannot share evenly, in concurrent order."""
    batch = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in FIVE_UTTERANCES], 1)
    return dataclasses.replace(batch, micro_batches=order_for_concurrency(batch.micro_batches, 2))


def train_two_steps(mode: str, concurrent_micro_batches: int, recompute: str = "never") -> dict[str, torch.Tensor]:
    """Return the weights, optimizer state and losses after two steps."""
    torch.set_num_threads(2)
    parts = whisper_parts(
        mode, whisper_config(recompute, concurrent_micro_batches=concurrent_micro_batches), torch.float32
    )
    torch.set_num_threads(concurrent_micro_batches)  # one thread per micro-batch
    reports = [train_step(parts, global_batch_of_five(), number) for number in range(2)]
    assert parts.forward.concurrent_micro_batches == concurrent_micro_batches and all(
        isinstance(report, StepReport) for report in reports
    )
    return state_of(parts) | {"losses": torch.tensor([[report.loss, report.gradient_norm] for report in reports])}


def delay_first_micro_batch(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay the start of the first micro-batch."""
    (late, *_), forward_and_backward = global_batch_of_five().micro_batches, step.forward_and_backward

    def delayed(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        time.sleep(seconds if batch.utterance_ids == late.utterance_ids else 0.0)
        return forward_and_backward(parts, batch, counts)

    monkeypatch.setattr(step, "forward_and_backward", delayed)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_concurrent_micro_batches_equal_sequential_at_any_timing(mode, recompute, monkeypatch, two_threads):
    expected = train_two_steps(mode, 1, recompute)
    assert are_equal(train_two_steps(mode, 2, recompute), expected)
    delay_first_micro_batch(monkeypatch, 0.1)
    assert are_equal(train_two_steps(mode, 2, recompute), expected)


def test_negative_control_without_ordering_results_depend_on_timing(monkeypatch, two_threads):
    expected = train_two_steps("LoRA", 1)
    monkeypatch.setattr(OrderedAccumulation, "_wait", lambda self, index, gradient=None: None)
    delay_first_micro_batch(monkeypatch, 1.0)
    assert not are_equal(train_two_steps("LoRA", 2), expected)


@every_mode
def test_only_trained_weights_change_in_40_steps(mode):
    parts = whisper_parts(mode, dtype=torch.float32)
    batch = global_batch([dataclasses.replace(one, waveform=one.waveform.float()) for one in speeches(2)], 2)
    check_changed_weights(parts, batch, lambda name: is_trained(name, mode), 40)


def test_new_lora_equals_base_and_merging_keeps_the_logits():
    (batch,) = global_batch(
        [dataclasses.replace(one, waveform=one.waveform.float()) for one in FOUR_UTTERANCES], 4
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


def decode_greedily(parts: StepParts) -> RecognizedPortion:
    """Return each utterance's likeliest tokens from cached decoding, up to the maximum length."""
    rules = GenerationRules(prompt=(4, 5), suppressed=(OUR_TOKENS.end,), most_tokens=SHAPE.target_positions - 3)
    return recognize_greedily(parts, global_batch(FOUR_UTTERANCES, 3), OUR_TOKENS, rules)


@pytest.mark.parametrize(("mode", "recompute"), parameter_grid(MODES, RECOMPUTED))
def test_decoding_and_gradients_do_not_affect_each_other(mode, recompute):
    check_decoding_between_gradients(whisper_parts(mode, whisper_config(recompute)), GLOBAL_BATCH, decode_greedily)
