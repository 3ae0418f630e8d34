"""Invariant 2: a global batch split 8x1 == 4x2 == 1x8, also the smaller last one; to 1e-9 in float64."""

import pytest
import torch

from konkanivani.config import ModelConfig
from konkanivani.data.batching import GlobalBatch
from konkanivani.models.asr import LossCounts
from konkanivani.training.step import StepParts, StepReport, forward_and_backward, train_step
from tests.conftest import mark_full
from tests.invariants.parts import KINDS, double_parts, global_batch, relative_difference, speeches

BOUND = 1e-9


pytestmark = pytest.mark.usefixtures("is_packed")


def gradients(parts: StepParts, full_batch: GlobalBatch) -> dict[str, torch.Tensor]:
    for batch in full_batch.micro_batches:
        forward_and_backward(parts, batch, LossCounts(full_batch.tokens, full_batch.utterances))
    return {name: p.grad.clone() for name, p in parts.model.named_parameters()}


def step_results(batch: GlobalBatch, model: ModelConfig) -> tuple[StepReport, dict[str, torch.Tensor]]:
    parts = double_parts(model)
    report = train_step(parts, batch, step=3)
    return report, dict(parts.model.named_parameters())


@pytest.mark.parametrize("kind", ["conformer", "transformer", "other parts"])
@pytest.mark.parametrize("utterances", [5, *mark_full(8)])
def test_any_split_gives_equal_gradient_loss_and_weights(utterances, kind):
    model = KINDS[kind]
    spoken = speeches(utterances)
    whole = gradients(double_parts(model), global_batch(spoken, 8))
    report, weights = step_results(global_batch(spoken, 8), model)
    for batch_size in (1, 2, 4):
        batch = global_batch(spoken, batch_size)
        for name, gradient in gradients(double_parts(model), batch).items():
            assert relative_difference(whole[name], gradient) < BOUND, name
        other, other_weights = step_results(batch, model)
        assert abs(report.loss - other.loss) < BOUND * abs(report.loss)
        assert abs(report.gradient_norm - other.gradient_norm) < BOUND * report.gradient_norm
        for name, weight in other_weights.items():
            assert relative_difference(weights[name], weight) < BOUND, name


def test_negative_control_mean_of_micro_batch_means_differs():
    spoken = speeches(8)
    whole = gradients(double_parts(), global_batch(spoken, 8))
    parts = double_parts()
    full_batch = global_batch(spoken, 2)
    for batch in full_batch.micro_batches:
        own = LossCounts(sum(batch.token_lengths) * 4, len(batch.utterance_ids) * 4)
        forward_and_backward(parts, batch, own)
    wrong = {name: p.grad for name, p in parts.model.named_parameters()}
    assert max(relative_difference(whole[name], wrong[name]) for name in whole) > 1e-3
