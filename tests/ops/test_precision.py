"""A backward pass inside autocast equals one outside, bit for bit."""

import functools

import pytest
import torch

from konkanivani.config import ModelConfig
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.conformer import keep_activations
from konkanivani.ops import products
from konkanivani.ops.chunks import ChunkedLosses
from konkanivani.ops.passes import optimize
from konkanivani.ops.recompute import run_recomputed

MODEL = ModelConfig(
    d_model=64, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=8, dropout=0.0
)
MODES = {
    "whole": (keep_activations, 1000),
    "recomputed in chunks": (lambda _number, block: functools.partial(run_recomputed, block), 10),
}


def gradients(half_forward: bool, half_backward: bool, mode: str, utterances: int) -> dict[str, torch.Tensor]:
    """Return the gradients of every parameter for both losses, with either pass inside autocast or not."""
    torch.manual_seed(0)
    model, frames = KonkaniVaniASR(MODEL, 40, 80), (120, 104)[:utterances]
    optimize(model)
    features, tokens = torch.randn(utterances, 120, 80), torch.randint(4, 40, (utterances, 15))
    targets, (wrap_block, chunk) = torch.randint(4, 40, (utterances, 16)), MODES[mode]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half_forward):
        output = model(features, frames, targets, wrap_block, chunk)
        encoded = output.encoded, model.ctc_head, output.encoded_lengths
        loss = ChunkedLosses().ctc(*encoded, tokens, (15,) * utterances, chunk)
        loss = loss + ChunkedLosses().attention(output.decoded, model.decoder.output, targets, 0.1, chunk)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half_backward):
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def different_gradients(half_forward: bool, mode: str, utterances: int) -> list[str]:
    """Return the parameters whose gradient differs inside autocast."""
    outside, inside = (gradients(half_forward, half, mode, utterances) for half in (False, True))
    return [name for name in outside if not torch.equal(outside[name], inside[name])]


@pytest.mark.parametrize("half_forward", [True, False], ids=["half", "full"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("utterances", [1, 2])
def test_backward_inside_autocast_equals_backward_outside(half_forward, mode, utterances):
    assert different_gradients(half_forward, mode, utterances) == []


def test_negative_control_unprotected_backward_depends_on_autocast(monkeypatch):
    unprotected = products._Linear.backward.__wrapped__
    monkeypatch.setattr(products._Linear, "backward", staticmethod(unprotected))
    assert len(different_gradients(False, "whole", 1)) > 30
