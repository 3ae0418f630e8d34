"""A DC offset changes neither the pieces of a recording nor the pauses between them."""

import math

import pytest
import torch

from konkanivani.inference import segmentation
from konkanivani.inference.segmentation import build_segmentation, segment_audio, step_powers
from konkanivani.lengths import SAMPLE_RATE


def recording() -> torch.Tensor:
    """Return three tones of 1 s with 1 s of quiet noise around each."""
    generator = torch.Generator().manual_seed(1)
    pause = torch.zeros(SAMPLE_RATE)
    tone = 0.1 * torch.sin(torch.arange(SAMPLE_RATE) * (2 * math.pi * 300 / SAMPLE_RATE))
    spoken = torch.cat([pause, tone, pause, tone, pause, tone, pause])
    return spoken + 0.0003 * torch.randn(len(spoken), generator=generator)


def times(waveform: torch.Tensor) -> list[tuple[float, float]]:
    pieces = segment_audio(waveform.split(4_000), build_segmentation(20.0, 0.5))
    return [(piece.start, piece.end) for piece in pieces]


@pytest.mark.parametrize("offset", [-0.2, 0.005, 0.05])
def test_dc_offset_does_not_change_pieces(offset, monkeypatch):
    usual = times(recording())
    assert len(usual) == 3
    assert times(recording() + offset) == usual
    monkeypatch.setattr(segmentation, "step_powers", lambda steps: steps.square().mean(dim=1))
    assert times(recording()) == usual
    if abs(offset) > 0.01:  # negative control: the mean square treats the offset as sound
        assert times(recording() + offset) != usual


def test_step_powers_equal_the_variance_of_each_step():
    steps = recording()[: 100 * 160].view(100, 160)
    assert torch.allclose(step_powers(steps), steps.var(dim=1, correction=0), rtol=1e-4)
    assert step_powers(torch.zeros(0, 160)).shape == (0,)


def test_speech_directly_after_a_minute_of_silence_keeps_its_margin():
    """Levels are measured over a minute, and the first words start just after it."""
    tone = 0.1 * torch.sin(torch.arange(SAMPLE_RATE) * (2 * math.pi * 300 / SAMPLE_RATE))
    noise = 0.0003 * torch.randn(65 * SAMPLE_RATE, generator=torch.Generator().manual_seed(1))
    begins = []
    for start in (59.0, 60.05):
        spoken = noise.clone()
        spoken[round(start * SAMPLE_RATE) :][: len(tone)] += tone
        ((begin, _end),) = times(spoken)
        begins.append(begin - start)
    assert begins[0] < -0.1 and begins[1] == pytest.approx(begins[0], abs=0.021)
