"""Causal voice activity detection: silence and steady noise are not speech, and no speech is lost."""

import itertools

import numpy as np
import pytest
import torch

from konkanivani.inference.segmentation import (
    LOOKBACK,
    STEADY,
    TICK_SAMPLES,
    CausalSegmenter,
    Piece,
    build_segmentation,
)
from konkanivani.lengths import SAMPLE_RATE
from tests.data.test_streamed_audio import cut, noise, syllables, zeros

SECONDS = 60


def detect_speech(waveform: torch.Tensor, longest: float = 20.0, pause: float = 0.4) -> list[Piece]:
    segmenter = CausalSegmenter(build_segmentation(longest, pause))
    *ticks, last = waveform.split(TICK_SAMPLES)
    return [*itertools.chain.from_iterable(map(segmenter.advance, ticks)), *segmenter.advance(last, is_end=True)]


def hum(seconds: float, pitch: float = 50.0) -> torch.Tensor:
    return 0.03 * torch.sin(2 * torch.pi * pitch * torch.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE)


def fan(seconds: float) -> torch.Tensor:
    """Return noise below 300 Hz with the second harmonic of its motor."""
    spectrum = np.fft.rfft(noise(seconds, 1.0, seed=7).numpy())
    pitches = np.fft.rfftfreq(round(seconds * SAMPLE_RATE), 1 / SAMPLE_RATE)
    filtered = np.fft.irfft(spectrum / np.sqrt(1 + (pitches / 300) ** 2), round(seconds * SAMPLE_RATE))
    return torch.from_numpy(0.02 * filtered / filtered.std()).float() + 0.2 * hum(seconds, 100.0)


BACKGROUNDS = {
    "zeros": zeros,
    "noise at -40 dBFS": lambda seconds: noise(seconds, 10**-2.0),
    "noise at -70 dBFS": lambda seconds: noise(seconds, 10**-3.5),
    "hum": hum,
    "hum at 60 Hz": lambda seconds: hum(seconds, 60.0),
    "fan": fan,
    "offset": lambda seconds: 0.1 + noise(seconds, 1e-3),
}


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_background_gives_no_speech_and_speech_in_it_is_found(background):
    silence = BACKGROUNDS[background](SECONDS)
    assert detect_speech(silence) == []
    # Negative control: the same background with syllables.
    spoken = silence.clone()
    spoken[SAMPLE_RATE * 30 : SAMPLE_RATE * 32] += 2 * syllables(2)
    (piece,) = detect_speech(spoken)
    assert 29.7 < piece.start <= 30.05
    assert 31.9 <= piece.end < 32.3


@pytest.mark.parametrize("before", [zeros(0), zeros(10), noise(10, 1e-3), fan(10) * 0.1])
def test_speech_is_found_from_its_first_sample(before):
    (piece,) = detect_speech(torch.cat([before, syllables(2), 0.01 * noise(1)]))
    begin = len(before) / SAMPLE_RATE
    assert begin - 0.2 <= piece.start <= begin + 0.05
    # Negative control: without the syllables, no speech is found.
    assert detect_speech(torch.cat([before, before, zeros(1)])) == []


def test_causal_pieces_match_the_offline_segmentation():
    parts = [syllables(2, 1), noise(0.8, 1e-3), syllables(3, 2), noise(0.6, 1e-3), syllables(1.5, 3), noise(1, 1e-3)]
    waveform = torch.cat(parts)
    expected = cut(waveform)
    actual = detect_speech(waveform)
    assert len(actual) == len(expected) == 3
    for piece, other in zip(actual, expected, strict=True):
        assert abs(piece.start - other.start) < 0.1 and abs(piece.end - other.end) < 0.1


def test_speech_without_pause_is_cut_without_losing_samples():
    waveform = syllables(25)
    pieces = detect_speech(waveform, longest=6.0)
    assert len(pieces) > 4
    assert pieces[0].core_start == 0 and pieces[-1].core_end == pytest.approx(25, abs=0.01)
    assert all(a.core_end == b.core_start for a, b in itertools.pairwise(pieces))
    for piece in pieces:
        first = round(piece.start * SAMPLE_RATE)
        expected = waveform[first : first + len(piece.waveform)]
        assert torch.equal(piece.waveform[: len(expected)], expected)


def test_click_and_starting_fan_are_not_speech():
    quiet = noise(10, 3e-4)
    click = quiet.clone()
    click[80_000:80_002] = torch.tensor([0.9, -0.9])
    assert detect_speech(click) == []
    started = torch.cat([quiet, fan(20)])
    assert detect_speech(started) == []
    # Negative control: the first second of the fan is still classified as speech.
    assert detect_speech(started[: len(quiet) + SAMPLE_RATE]) != []


def test_memory_is_bounded_for_long_recordings():
    segmenter = CausalSegmenter(build_segmentation(5.0, 0.4))
    bound = (500 + LOOKBACK + STEADY) * SAMPLE_RATE // 100
    minute = torch.cat([syllables(12), zeros(10), noise(8, 1e-3), syllables(3), fan(27)])
    sizes = []
    for tick in minute.repeat(5).split(TICK_SAMPLES):
        segmenter.advance(tick)
        sizes.append(segmenter.buffered_samples)
    assert segmenter.seconds == 300
    assert max(sizes) < bound
    # The buffer is largest in the first minute.
    each = len(sizes) // 5
    assert max(sizes[-each:]) <= max(sizes[:each]) + TICK_SAMPLES


def test_weak_plosive_after_a_closure_of_digital_silence_is_kept():
    """Synthetic speech and noise gates have zeros in closures; a weak burst after them is below the threshold."""
    burst = noise(0.02, 10**-3.0)
    closure = zeros(0.06)
    spoken = torch.cat([zeros(1), 2 * syllables(2), closure, burst, zeros(1)])
    end = 1 + 2 + 0.06 + 0.02
    (piece,) = detect_speech(spoken)
    # Up to the burst, without the digital silence after it, to a step of 10 ms.
    assert piece.end == pytest.approx(end, abs=0.011)
    # Negative control: the burst is not loud by itself, so that the speech ends before it.
    assert piece.speech_end is not None and piece.speech_end < 3.04
    (without,) = detect_speech(torch.cat([zeros(1), 2 * syllables(2), zeros(1)]))
    assert without.end < end - 0.04
