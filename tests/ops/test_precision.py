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
WAYS = {
    "whole": (keep_activations, 1000),
    "recomputed in chunks": (lambda _number, block: functools.partial(run_recomputed, block), 10),
}


def gradients(half_forward: bool, half_backward: bool, way: str, utterances: int) -> dict[str, torch.Tensor]:
    """Return the gradients of every parameter for both losses, with either pass inside autocast or not."""
    torch.manual_seed(0)
    model, frames = KonkaniVaniASR(MODEL, 40, 80), (120, 104)[:utterances]
    optimize(model)
    features, tokens = torch.randn(utterances, 120, 80), torch.randint(4, 40, (utterances, 15))
    targets, (wrap_block, chunk) = torch.randint(4, 40, (utterances, 16)), WAYS[way]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half_forward):
        output = model(features, frames, targets, wrap_block, chunk)
        encoded = output.encoded, model.ctc_head, output.encoded_lengths
        loss = ChunkedLosses().ctc(*encoded, tokens, (15,) * utterances, chunk)
        loss = loss + ChunkedLosses().attention(output.decoded, model.decoder.output, targets, 0.1, chunk)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half_backward):
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unlike(half_forward: bool, way: str, utterances: int) -> list[str]:
    """Return the parameters whose gradient differs inside autocast."""
    outside, inside = (gradients(half_forward, half, way, utterances) for half in (False, True))
    return [name for name in outside if not torch.equal(outside[name], inside[name])]


@pytest.mark.parametrize("half_forward", [True, False], ids=["half", "full"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("utterances", [1, 2])
def test_backward_inside_of_autocast_is_backward_outside(half_forward, way, utterances):
    assert unlike(half_forward, way, utterances) == []


def test_negative_control_a_backward_that_heeds_what_surrounds_it_is_another(monkeypatch):
    heeding = products._Linear.backward.__wrapped__
    monkeypatch.setattr(products._Linear, "backward", staticmethod(heeding))
    assert len(unlike(False, "whole", 1)) > 30
