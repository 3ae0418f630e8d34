"""Passes over the built model change no loss, gradient or parameter name: each alone, all but one, and all.

Masks of dropout are drawn per frame, so with dropout the batches have no padding, which packing would remove.
"""

import dataclasses
import functools

import pytest
import torch

from konkanivani.config import LossConfig, ModelConfig
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.conformer import ConformerBlock, Dropout, Encoder, FeedForward
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.ops import products
from konkanivani.ops import products as depthwise
from konkanivani.ops.passes import ALL_PASSES, NO_PASSES, Passes, optimize
from konkanivani.randomness import dropout_seed, seed_step
from konkanivani.training.step import forward_and_backward, loss_counts
from tests.invariants.parts import (
    KINDS,
    VOCAB_SIZE,
    double_parts,
    global_batch,
    relative_difference,
    speeches,
    with_dropout,
)

BOUND = 1e-9
NAMES = [field.name for field in dataclasses.fields(Passes)]
SINGLE = {name: dataclasses.replace(NO_PASSES, **{name: True}) for name in NAMES}
WITHOUT = {f"all but {name}": dataclasses.replace(ALL_PASSES, **{name: False}) for name in NAMES}
CHOICES = {**SINGLE, **WITHOUT, "all": ALL_PASSES}
HYBRID = [name for name in CHOICES if "attention" not in name and "vocabulary" not in name]
CHUNK_FRAMES = 9
WHISPER = WhisperShape(16, 2, 2, 2, 32, 8, VOCAB_SIZE, 20, 12)


def results(model: ModelConfig, passes: Passes, recompute: str = "never", utterances: int = 3) -> list[torch.Tensor]:
    """Return losses and gradients in float64 of micro-batches of `utterances`, computed in chunks of a few frames."""
    parts = double_parts(model, recompute, passes=passes)
    parts = dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, chunk_frames=CHUNK_FRAMES))
    full_batch = global_batch(speeches(3), utterances)
    seed_step(parts.seed, 5)
    parts.model.train()
    sums = []
    for number, batch in enumerate(full_batch.micro_batches):
        with dropout_seed(number):
            sums += forward_and_backward(parts, batch, loss_counts(full_batch))
    return [*sums, *(parameter.grad for parameter in parts.model.parameters())]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(relative_difference(a, b) for a, b in zip(one, other, strict=True))


plain_results = functools.cache(lambda kind: results(KINDS[kind], NO_PASSES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", HYBRID)
def test_pass_keeps_losses_and_gradients_of_padded_batch(choice, kind):
    assert difference(plain_results(kind), results(KINDS[kind], CHOICES[choice])) < BOUND


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("choice", ["masked_dropout", "fused_norms", "all but masked_dropout", "all"])
def test_pass_keeps_dropout_masks(choice, recompute):
    model = with_dropout(KINDS["conformer"], 0.3)
    plain = results(model, NO_PASSES, utterances=1)
    assert difference(plain, results(model, CHOICES[choice], recompute, utterances=1)) < BOUND
    assert difference(plain, results(KINDS["conformer"], NO_PASSES, utterances=1)) > 1e-3  # negative control


def test_passes_keep_loss_in_float32():
    results = []
    for passes in (NO_PASSES, ALL_PASSES):
        parts = double_parts(passes=passes)
        parts.model.float()
        parts.forward.front_end.float()
        spoken = [dataclasses.replace(one, waveform=one.waveform.float()) for one in speeches(3, augmented=False)]
        (batch,) = global_batch(spoken, 3).micro_batches
        results.append(torch.stack(parts.forward(batch)[1]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def test_negative_control_wrong_kernel_is_detected(monkeypatch):
    kernel_gradient = depthwise._kernel_gradient
    monkeypatch.setattr(depthwise, "_kernel_gradient", lambda *given: 1.001 * kernel_gradient(*given))
    model = KINDS["conformer"]
    assert difference(plain_results("conformer"), results(model, SINGLE["fast_depthwise"])) > BOUND
    assert difference(plain_results("conformer"), results(model, SINGLE["packing"])) < BOUND
    weight_gradient = products.weight_gradient
    monkeypatch.setattr(products, "weight_gradient", lambda *given: 1.001 * weight_gradient(*given))
    assert difference(plain_results("conformer"), results(model, SINGLE["fast_products"])) > BOUND
    assert difference(plain_results("conformer"), results(model, SINGLE["fused_norms"])) < BOUND


@pytest.mark.parametrize("passes", [NO_PASSES, ALL_PASSES], ids=["none", "all"])
def test_passes_keep_names_order_and_values_of_parameters(passes):
    for kind in KINDS.values():
        architecture = double_parts(kind).architecture
        torch.manual_seed(0)
        plain = architecture.build()
        torch.manual_seed(0)
        model = architecture.build()
        parameters = list(model.parameters())
        optimize(model, passes)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        state, other = plain.state_dict(), model.state_dict()
        assert list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


def test_model_without_passes_has_only_plain_modules():
    model = double_parts(passes=NO_PASSES).model
    project_types = {type(module) for module in model.modules() if type(module).__module__.startswith("konkanivani")}
    assert {ConformerBlock, Dropout, Encoder, FeedForward} < project_types
    assert not any(".ops." in kind.__module__ for kind in project_types)
    assert any(".ops." in type(module).__module__ for module in double_parts().model.modules())


def whisper_results(passes: Passes) -> list[torch.Tensor]:
    """Return the gradients of a small Whisper in float64, with all blocks recomputed, and of two micro-batches."""
    torch.manual_seed(0)
    architecture = WhisperArchitecture(WHISPER)
    model = architecture.build().double().train()
    optimize(model, passes)
    objective = architecture.objective(LossConfig())
    wrap_block = RecomputePolicy("always")(1.0)
    for batch in global_batch(speeches(4), 2).micro_batches:
        features = torch.randn(2, 2 * WHISPER.source_positions, WHISPER.mel_bins, dtype=torch.float64)
        output = model(features, (features.shape[1],) * 2, batch.decoder_tokens, wrap_block)
        sum(model.loss_sums(output, batch, objective, CHUNK_FRAMES)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("choice", CHOICES)
def test_pass_keeps_gradients_of_whisper(choice):
    assert difference(whisper_results(NO_PASSES), whisper_results(CHOICES[choice])) < BOUND
