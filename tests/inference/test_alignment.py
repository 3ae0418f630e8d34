"""Word times: alignment equals brute force, frame times, and grouping of tokens into words."""

import dataclasses
import itertools
import math

import pytest
import torch

from konkanivani.config import FeatureConfig
from konkanivani.data.text import Tokenizer, train_tokenizer
from konkanivani.inference.segmentation import Piece
from konkanivani.inference.word_times import (
    AFTER_LAST_LETTER,
    FIRST_LETTER_DELAY,
    MAX_DELAY,
    AlignedToken,
    EmissionDelay,
    Word,
    align_tokens,
    group_words,
    timed_words,
)
from konkanivani.lengths import SAMPLE_RATE, Framing
from konkanivani.models.conformer import Subsampling

FRAMING = Framing(FeatureConfig())

TEXTS = ["एक दोन तीन", "चार पांच", "उदक घर शाळा", "बाजार आवय", "एक घर"]


@pytest.fixture(scope="module", params=["char", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXTS, request.param, 40)


def log_probabilities(frames: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(frames, vocabulary, generator=generator)).log_softmax(dim=-1)


def collapse_path(path: tuple[int, ...]) -> list[int]:
    """Return the transcript of a CTC path."""
    return [token for token, _ in itertools.groupby(path) if token]


def best_path(frames: torch.Tensor, tokens: list[int]) -> tuple[int, ...]:
    """Return the likeliest of all paths that spell the tokens."""
    paths = itertools.product(range(frames.shape[1]), repeat=len(frames))
    spelling = [path for path in paths if collapse_path(path) == tokens]
    return max(spelling, key=lambda path: sum(float(frames[place, token]) for place, token in enumerate(path)))


@pytest.mark.parametrize("tokens", [[1], [1, 2], [2, 2], [3, 1, 3], [1, 1, 2]])
@pytest.mark.parametrize("seed", [0, 1])
def test_alignment_equals_the_likeliest_of_all_paths(tokens, seed):
    frames = log_probabilities(6, 4, seed)
    path = best_path(frames, tokens)
    runs, place = [], 0
    for token, run in itertools.groupby(path):
        count = len(list(run))
        if token:
            probability = frames[place : place + count, token].exp().mean()
            runs.append(AlignedToken(token, place, place + count, pytest.approx(float(probability), abs=1e-6)))
        place += count
    assert align_tokens(frames, tokens) == runs
    # Negative control: reversed frames have another alignment.
    assert align_tokens(frames.flip(0), tokens) != runs


def test_tokens_impossible_for_ctc_are_spread_evenly():
    frames = log_probabilities(3, 4, 0)
    for tokens in ([1, 2, 3, 1], [1, 1, 1]):  # more tokens than frames, or no frame for a blank between equal tokens
        aligned = align_tokens(frames, tokens)
        assert [a.token for a in aligned] == tokens and {a.probability for a in aligned} == {None}
        assert aligned[0].first == 0 and aligned[-1].end == 3
        assert all(a.end == b.first for a, b in itertools.pairwise(aligned))
    assert all(a.probability is not None for a in align_tokens(frames, [1, 2, 3]))
    assert align_tokens(frames, []) == [] and align_tokens(frames[:0], []) == []


def test_frame_time_is_the_middle_of_its_receptive_field():
    subsampling = Subsampling(80, 4, 8).eval()
    features = torch.randn(1, 60, 80, generator=torch.Generator().manual_seed(0)).requires_grad_()
    subsampling(features)[0, 5].sum().backward()
    seen = torch.nonzero(features.grad.abs().sum(dim=(0, 2)))[:, 0]
    first_sample, end_sample = 160 * int(seen[0]), 160 * int(seen[-1]) + 512
    assert FRAMING.encoder_frame_seconds(5) == (first_sample + end_sample) / 2 / SAMPLE_RATE
    assert FRAMING.encoder_frame_seconds(6) - FRAMING.encoder_frame_seconds(5) == pytest.approx(0.04)
    assert [FRAMING.encoded_length(samples) for samples in (0, 1471, 1472, 2112)] == [0, 0, 1, 2]


def spikes(tokens: list[int], every: int = 5) -> list[AlignedToken]:
    """Return one-frame tokens, `every` frames apart, with distinct probabilities."""
    return [AlignedToken(t, every * place, every * place + 1, 1 / (place + 1)) for place, t in enumerate(tokens)]


def time_words(aligned: list[AlignedToken], tokenizer: Tokenizer, seconds: float) -> list[Word]:
    """Return the word times for a model without delay statistics."""
    return timed_words(group_words(aligned, tokenizer, FRAMING), EmissionDelay(), seconds)


def test_timed_words_equal_the_words_of_the_text(tokenizer):
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        words = time_words(spikes([tokenizer.special.start, *tokens, tokenizer.special.end]), tokenizer, 60.0)
        assert [word.text for word in words] == text.split()
        assert " ".join(word.text for word in words) == tokenizer.decode(tokens)
        assert all(0 <= word.start <= word.end <= 60 and 0 < word.confidence <= 1 for word in words)
        assert all(a.end <= b.start for a, b in itertools.pairwise(words))


def test_word_times_are_corrected_for_emission_delay():
    tokenizer = train_tokenizer(TEXTS, "char", 40)
    tokens = tokenizer.encode("एक घर")
    assert [tokenizer.piece(token) for token in tokens] == ["▁", "ए", "क", "▁", "घ", "र"]
    aligned = [AlignedToken(t, f, f + 1, 0.5) for t, f in zip(tokens, (1, 8, 12, 13, 15, 20), strict=True)]
    first, second = time_words(aligned, tokenizer, 5.0)
    assert first.start == pytest.approx(FRAMING.encoder_frame_seconds(8) - FIRST_LETTER_DELAY)
    assert second.start == first.end == pytest.approx(FRAMING.encoder_frame_seconds(15) - FIRST_LETTER_DELAY)
    assert second.end == pytest.approx(FRAMING.encoder_frame_seconds(20) + AFTER_LAST_LETTER)
    assert (first.confidence, second.confidence) == (0.5, 0.5)
    # A pause belongs to neither word, although the word boundary token is emitted before it.
    late = [*aligned[:4], *(AlignedToken(a.token, a.first + 50, a.end + 50, None) for a in aligned[4:])]
    first, second = time_words(late, tokenizer, 5.0)
    assert first.end == pytest.approx(FRAMING.encoder_frame_seconds(12) + AFTER_LAST_LETTER)
    assert second.start == pytest.approx(FRAMING.encoder_frame_seconds(65) - FIRST_LETTER_DELAY)
    assert second.confidence is None


def test_word_times_are_ordered_and_within_the_waveform():
    tokenizer = train_tokenizer(TEXTS, "char", 40)
    tokens = tokenizer.encode("एक घर आवय")
    crowded = [AlignedToken(t, place / 4, place / 4, None) for place, t in enumerate(tokens)]
    for seconds in (0.05, 0.1, 1.0):
        times = [t for word in time_words(crowded, tokenizer, seconds) for t in (word.start, word.end)]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= seconds
        assert not any(math.isnan(t) for t in times)
    only_marks = [AlignedToken(tokens[0], 0, 1, 1.0), AlignedToken(tokenizer.special.unknown, 1, 2, 1.0)]
    assert time_words(only_marks, tokenizer, 1.0) == []


def piece_from(start: float, speech_start: float | None, speech_end: float | None) -> Piece:
    return Piece(torch.zeros(5 * SAMPLE_RATE), start, start, start + 5, speech_start, speech_end)


def test_emission_delay_is_learnt_from_speech_bounded_by_pauses():
    tokenizer = train_tokenizer(TEXTS, "char", 40)
    words = group_words(spikes(tokenizer.encode("एक घर")), tokenizer, FRAMING)  # letters in frames 5, 10 and 20, 25
    first, last = FRAMING.encoder_frame_seconds(5), FRAMING.encoder_frame_seconds(25)
    delay = EmissionDelay()
    for first_lag, last_lag in ((0.1, 0.3), (0.2, 0.2), (0.3, 0.25)):
        delay.learn(words, piece_from(40.0, 40 + first - first_lag, 40 + last + last_lag))
    assert (delay.first_letter, delay.after_last_letter) == (pytest.approx(0.2), pytest.approx(0.25))
    one, other = timed_words(words, delay, 5.0)
    assert (one.start, one.end, other.end) == pytest.approx((first - 0.2, other.start, last + 0.25))
    # Delays are not learnt from cut speech, pieces without words, implausible delays, or words impossible for CTC.
    spread = [dataclasses.replace(token, probability=None) for token in spikes(tokenizer.encode("एक घर"))]
    for known, piece in (
        (words, piece_from(0.0, None, None)),
        ([], piece_from(0.0, 0.0, 1.0)),
        (group_words(spread, tokenizer, FRAMING), piece_from(0.0, first, last)),
        (words, piece_from(0.0, first - MAX_DELAY - 0.01, last + MAX_DELAY + 0.01)),
        (words, piece_from(0.0, first + 0.01, last - 0.01)),
    ):
        delay.learn(known, piece)
    assert (delay.first_letter, delay.after_last_letter) == (pytest.approx(0.2), pytest.approx(0.25))
