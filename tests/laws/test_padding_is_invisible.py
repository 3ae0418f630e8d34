"""Law 3: an utterance's output is the same alone and in any batch, from the waveform on; to 1e-9 in float64."""

import dataclasses

import pytest
import torch

from konkanivani.training.step import StepParts
from tests.laws.parts import MODEL, double_parts, relative_difference, speeches, window

BOUND = 1e-9


def outputs(parts: StepParts, spoken: list, batch_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """CTC and attention logits of each utterance's valid positions."""
    found = {}
    with torch.no_grad():
        for batch in window(spoken, batch_size).micro_batches:
            output, _ = parts.forward(batch)
            for row, name in enumerate(batch.utterance_ids):
                frames, tokens = output.encoded_lengths[row], batch.token_lengths[row] + 1
                ctc, attention = parts.model.ctc_head(output.encoded), parts.model.decoder.output(output.decoded)
                found[name] = ctc[row, :frames], attention[row, :tokens]
    return found


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("encoder_type", ["conformer", "transformer"])
def test_alone_and_in_a_batch(encoder_type, augmented):
    parts = double_parts(dataclasses.replace(MODEL, encoder_type=encoder_type))
    spoken = speeches(7, augmented=augmented)
    alone, together = outputs(parts, spoken, 1), outputs(parts, spoken, 7)
    for name, pair in alone.items():
        for one, other in zip(pair, together[name], strict=True):
            assert one.shape == other.shape and one.abs().max() > 0
            assert relative_difference(one, other) < BOUND


def test_what_lies_in_the_padding_does_not_matter():
    parts = double_parts()
    batch = window(speeches(4), 4).micro_batches[0]
    filled = batch.waveforms.clone()
    for row, length in enumerate(batch.sample_lengths):
        filled[row, length:] = 1e3
    with torch.no_grad():
        _, clean = parts.forward(batch)
        _, dirty = parts.forward(dataclasses.replace(batch, waveforms=filled))
    assert relative_difference(clean.ctc, dirty.ctc) < BOUND
    assert relative_difference(clean.attention, dirty.attention) < BOUND


def test_negative_control_without_the_convolutions_mask_padding_shows(monkeypatch):
    parts = double_parts()
    spoken = speeches(7)
    alone = outputs(parts, spoken, 1)
    for block in parts.model.encoder.blocks:
        unmasked = block.convolution.forward
        monkeypatch.setattr(block.convolution, "forward", lambda x, padding, unmasked=unmasked: unmasked(x, None))
    together = outputs(parts, spoken, 7)
    assert max(relative_difference(alone[name][0], together[name][0]) for name in alone) > 1e-6
