"""Helpers for the tests of pretrained models, Whisper and T5."""

from collections.abc import Callable

import pytest
import torch

from konkanivani.config import TuningConfig
from konkanivani.data.batching import Example, GlobalBatch
from konkanivani.data.index import Utterance
from konkanivani.data.text import GenerationRules, SpecialTokens
from konkanivani.decoding.decode import BeamDecode
from konkanivani.inference.speech_model import digest_of
from konkanivani.models.asr import LossCounts
from konkanivani.models.decoder import FIRST_CAPACITY
from konkanivani.training.optimizer_state import OptimizerState
from konkanivani.training.step import StepParts, StepReport, forward_and_backward, loss_counts, train_step
from konkanivani.training.validation import RecognizedPortion, recognize_all
from tests.invariants.failing import fail_above, fail_at
from tests.invariants.parts import are_equal, max_relative_difference

MODES = {
    "full": TuningConfig(),
    "encoder": TuningConfig(freeze="encoder"),
    "one block": TuningConfig(freeze=1),
    "LoRA": TuningConfig(lora_rank=2, lora_targets=("query", "value", "expand")),
}
BOUND = 1e-9  # relative difference of gradients in float64 that counts as equal
FAILING = {"the first": fail_at(0), "the second": fail_at(1), "every pair": fail_above(1)}


def draw_lora_weights(model: torch.nn.Module) -> None:
    """Set the LoRA up-projections to random values, as after some steps: at zero, half of the gradients are zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("low_rank.up"):
            torch.nn.init.normal_(parameter, std=0.1)


def gradients(parts: StepParts, full_batch: GlobalBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of a global batch."""
    parts.model.train()
    parts.model.zero_grad()
    for batch in full_batch.micro_batches:
        forward_and_backward(parts, batch, loss_counts(full_batch))
    return {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}


def check_gradients_of_splits(
    parts: StepParts, trained: set[str], examples: list[Example], split: Callable[[list[Example], int], GlobalBatch]
) -> None:
    """Check that exactly the `trained` parameters have gradients, equal for micro-batches of one, two and all examples.

    `split` makes a global batch with micro-batches of a given size.
    """
    whole = gradients(parts, split(examples, len(examples)))
    assert whole.keys() == trained
    assert all(gradient.norm() > 0 for gradient in whole.values())
    for size in (1, 2):
        assert max_relative_difference(whole, gradients(parts, split(examples, size))) < BOUND


def averaged_gradients(parts: StepParts, full_batch: GlobalBatch) -> dict[str, torch.Tensor]:
    """Return the average of the micro-batches' mean gradients, which weights tokens of short micro-batches more."""
    parts.model.train()
    parts.model.zero_grad()
    count = len(full_batch.micro_batches)
    for batch in full_batch.micro_batches:
        forward_and_backward(parts, batch, LossCounts(count * sum(batch.token_lengths), count * batch.size))
    return {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}


def state_of(parts: StepParts) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state."""
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    return weights | OptimizerState(parts.model, parts.optimizer).state_dict()


class TokenIdDecoder:
    """Tokenizer that decodes a hypothesis into its token ids."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def recognize_greedily(
    parts: StepParts, full_batch: GlobalBatch, special: SpecialTokens, rules: GenerationRules
) -> RecognizedPortion:
    """Return the most likely tokens of each input, as text, from cached decoding."""
    batches = [(batch, [Utterance(n, n, 1.0, "") for n in batch.utterance_ids]) for batch in full_batch.micro_batches]
    return recognize_all(parts.forward, batches, TokenIdDecoder(), BeamDecode(1, 0.0, 0.0, None, 0.0, special, rules))


def check_split_step(
    failing: StepParts, batch: GlobalBatch, expected: StepReport, state: dict[str, torch.Tensor]
) -> None:
    """Check that a step that runs out of memory once is the step without the failure."""
    report = train_step(failing, batch, 3)
    assert (expected.splits, report.splits) == (0, 1) and not report.is_skipped
    for name in ("loss", "attention_loss", "gradient_norm"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=BOUND, abs=0)
    assert max_relative_difference(state, state_of(failing)) < BOUND


def check_changed_weights(parts: StepParts, batch: GlobalBatch, is_trained: Callable[[str], bool], steps: int) -> None:
    """Check that the loss falls, and that exactly the trained weights change."""
    before = {name: digest_of({name: one}) for name, one in parts.model.state_dict().items()}
    losses = [train_step(parts, batch, number).loss for number in range(steps)]
    assert losses[-1] < 0.98 * losses[0]
    kept = {name for name, one in parts.model.state_dict().items() if digest_of({name: one}) == before[name]}
    assert kept == {name for name in before if not is_trained(name)} and kept < before.keys()


def check_decoding_between_gradients(
    parts: StepParts, batch: GlobalBatch, decode: Callable[[StepParts], RecognizedPortion]
) -> None:
    """Check that decoding and gradients do not affect each other."""
    alone = gradients(parts, batch)
    results = []
    for _ in range(2):
        results.append(decode(parts))
        assert are_equal(gradients(parts, batch), alone)
    assert results[0] == results[1]
    assert max(len(one.hypothesis.split()) for one in results[0].scored) > FIRST_CAPACITY
    # Negative control: after a step, both differ.
    train_step(parts, batch, 0)
    assert decode(parts) != results[0] and not are_equal(gradients(parts, batch), alone)
