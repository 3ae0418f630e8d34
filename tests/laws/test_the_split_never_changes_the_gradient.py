"""Law 2: one window as 8x1 == 4x2 == 1x8, a ragged last window included; to 1e-9 in float64."""

import pytest
import torch

from konkanivani.base.config import ModelConfig
from konkanivani.data.batch import Window
from konkanivani.model.losses import LossCounts
from konkanivani.training.step import StepParts, StepReport, forward_and_backward, train_step
from tests.laws.parts import KINDS, double_parts, relative_difference, speeches, window

BOUND = 1e-9


pytestmark = pytest.mark.usefixtures("is_packed")


def gradients(parts: StepParts, cut: Window) -> dict[str, torch.Tensor]:
    for batch in cut.micro_batches:
        forward_and_backward(parts, batch, LossCounts(cut.tokens, cut.utterances))
    return {name: p.grad.clone() for name, p in parts.model.named_parameters()}


def stepped(cut: Window, model: ModelConfig) -> tuple[StepReport, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The report, the gradient before it is clipped, and the weights after it."""
    parts, clip, gradient = double_parts(model), torch.nn.utils.clip_grad_norm_, {}

    def note_and_clip(*given, **named):
        gradient.update((name, p.grad.clone()) for name, p in parts.model.named_parameters())
        return clip(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", note_and_clip)
        report = train_step(parts, cut, step=3)
    assert gradient
    return report, gradient, dict(parts.model.named_parameters())


@pytest.mark.parametrize("kind", ["conformer", "transformer", "other parts"])
@pytest.mark.parametrize("utterances", [8, 5])
def test_any_cut_gives_the_same_gradient_loss_and_weights(utterances, kind):
    spoken = speeches(utterances)
    report, whole, weights = stepped(window(spoken, 8), KINDS[kind])
    for batch_size in (1, 2, 4):
        other, gradient, other_weights = stepped(window(spoken, batch_size), KINDS[kind])
        for name, tensor in gradient.items():
            assert relative_difference(whole[name], tensor) < BOUND, name
        assert abs(report.loss - other.loss) < BOUND * abs(report.loss)
        assert abs(report.gradient_norm - other.gradient_norm) < BOUND * report.gradient_norm
        for name, weight in other_weights.items():
            assert relative_difference(weights[name], weight) < BOUND, name


def test_negative_control_averaging_the_micro_batches_means_is_another_gradient():
    spoken = speeches(8)
    whole = gradients(double_parts(), window(spoken, 8))
    parts = double_parts()
    cut = window(spoken, 2)
    for batch in cut.micro_batches:
        own = LossCounts(sum(batch.token_lengths) * 4, len(batch.utterance_ids) * 4)
        forward_and_backward(parts, batch, own)
    wrong = {name: p.grad for name, p in parts.model.named_parameters()}
    assert max(relative_difference(whole[name], wrong[name]) for name in whole) > 1e-3
