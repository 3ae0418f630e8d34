"""A backward pass inside autocast equals one outside, bit for bit."""

import pytest
import torch

from konkanivani.base.config import ModelConfig
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.blocks import run_directly
from konkanivani.model.kernels import products
from konkanivani.model.kernels.recompute import run_recomputed
from konkanivani.model.losses import attention_loss_sum, ctc_loss_sum

MODEL = ModelConfig(
    d_model=64, encoder_layers=1, decoder_layers=1, attention_heads=2, subsampling_channels=8, dropout=0.0
)
WAYS = {"whole": (run_directly, 1000), "recomputed in chunks": (run_recomputed, 10)}


def gradients(half_forward: bool, half_backward: bool, way: str, utterances: int) -> dict[str, torch.Tensor]:
    """Return the gradients of every parameter for both losses, with either pass inside autocast or not."""
    torch.manual_seed(0)
    model, frames = KonkaniVaniASR(MODEL, 40, 80), (120, 104)[:utterances]
    features, tokens = torch.randn(utterances, 120, 80), torch.randint(4, 40, (utterances, 15))
    targets, (run_block, chunk) = torch.randint(4, 40, (utterances, 16)), WAYS[way]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half_forward):
        output = model(features, frames, targets, run_block, chunk)
        encoded = output.encoded, model.ctc_head, output.encoded_lengths
        loss = ctc_loss_sum(*encoded, tokens, (15,) * utterances, chunk)
        loss = loss + attention_loss_sum(output.decoded, model.decoder.output, targets, 0.1, chunk)
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
