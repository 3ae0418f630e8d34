"""CTC prefix beam search with a language model equals the sum over all alignments of tiny inputs; 1e-9 in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.data.text import OUR_TOKENS
from konkanivani.decoding import language_model as fusion_module
from konkanivani.decoding.ctc import Hypothesis, prefix_beam_search
from konkanivani.decoding.language_model import (
    Fusion,
    FusionScores,
    LanguageModel,
    build_language_model,
    score_sentences,
)
from konkanivani.decoding.ngram import estimate_ngrams
from tests.decoding.test_decoding import all_sequences, is_close, random_log_probabilities

FRAMES, VOCABULARY = 3, 6
EVERY_PREFIX = 160  # exceeds the number of prefixes of 3 frames and 5 tokens
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """Return a trigram model of two tokens, one of which often repeats."""
    sentences = [[4, 4, 5], [4, 4], [4], [5, 4, 4], [4, 5, 4, 4, 4]]
    return build_language_model(estimate_ngrams(sentences, VOCABULARY, 3), VOCABULARY, CPU)


def exact_hypotheses(log_probabilities: torch.Tensor, fusion: Fusion) -> list[Hypothesis]:
    """Return every possible transcript with its score by definition, best first."""
    results = []
    for tokens, probability in all_sequences(log_probabilities).items():
        if probability > 0 and not {OUR_TOKENS.start, OUR_TOKENS.end} & set(tokens):
            lm_score = fusion.weight * score_sentences(fusion.language_model, [tokens])[0]
            score = math.log(probability) + lm_score + fusion.length_bonus * len(tokens)
            results.append(Hypothesis(tokens, score))
    return sorted(results, key=lambda hypothesis: -hypothesis.log_probability)


def is_exact(log_probabilities: torch.Tensor, fusion: Fusion) -> bool:
    """Return whether the search with a beam of every prefix finds exactly the hypotheses of (T', V) by definition."""
    frames = log_probabilities[None], (len(log_probabilities),)
    (result,) = prefix_beam_search(*frames, EVERY_PREFIX, best=EVERY_PREFIX, fusion=fusion)
    truth = exact_hypotheses(log_probabilities, fusion)
    scores = {hypothesis.tokens: hypothesis.log_probability for hypothesis in truth}
    return len(result) == len(truth) == len({hypothesis.tokens for hypothesis in result}) and all(
        is_close(one.log_probability, other.log_probability)
        and is_close(one.log_probability, scores.get(one.tokens, math.nan))
        for one, other in zip(result, truth, strict=True)
    )


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 0.3, 2.5]), st.sampled_from([-1, 0, 2])
)
def test_beam_of_all_prefixes_is_exact(model, seed, impossible, weight, bonus):
    log_probabilities = random_log_probabilities(seed, (FRAMES,), VOCABULARY, impossible)[0]
    assert is_exact(log_probabilities, Fusion(model, weight, bonus))


def scores_without_end(self: FusionScores) -> torch.Tensor:
    return self.scores


ORIGINAL_FOLLOWING = Fusion.following


def following_from_start(self: Fusion, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ORIGINAL_FOLLOWING(self, self.language_model.initial(len(states)))


@pytest.mark.parametrize("kind, part, mistake", [
    ("FusionScores", "ended", property(scores_without_end)),
    ("Fusion", "following", following_from_start),
])  # fmt: skip
def test_negative_control_wrong_fusion_is_detected(model, kind, part, mistake, monkeypatch):
    """A language model that does not score the end or ignores its history gives inexact scores."""
    log_probabilities, fusion = random_log_probabilities(0, (FRAMES,), VOCABULARY)[0], Fusion(model, 0.7)
    assert is_exact(log_probabilities, fusion)
    monkeypatch.setattr(getattr(fusion_module, kind), part, mistake)
    assert not is_exact(log_probabilities, fusion)


def test_language_model_decides_between_equal_ctc_scores(model):
    """CTC scores a repeat and a repeat with another token in between equally; the model was trained on one of them."""
    probabilities = torch.full((1, 3, VOCABULARY), 1e-9, dtype=torch.float64)
    probabilities[0, [0, 2], 4] = 1.0
    probabilities[0, 1, [0, 5]] = 0.5
    log_probabilities = probabilities.log()
    sequences = {h.tokens for h in prefix_beam_search(log_probabilities, (3,), 8, best=2)[0]}
    assert sequences == {(4, 4), (4, 5, 4)}
    for sentence in sequences:
        spoken = estimate_ngrams([list(sentence)] * 9, VOCABULARY, 3)
        fusion = Fusion(build_language_model(spoken, VOCABULARY, CPU), 0.5)
        assert prefix_beam_search(log_probabilities, (3,), 8, fusion=fusion)[0][0].tokens == sentence


@pytest.mark.parametrize("beam", [1, 5, 7])
def test_batched_fusion_equals_single_utterances_below_exact_score(model, beam):
    lengths, fusion = (4, 0, 3, 4), Fusion(model, 0.6, 0.4)
    log_probabilities = random_log_probabilities(1, lengths, VOCABULARY, impossible=0.1)
    together = prefix_beam_search(log_probabilities, lengths, beam, beam, fusion)
    for row, length in enumerate(lengths):
        frames = log_probabilities[row : row + 1, :length]
        (alone,) = prefix_beam_search(frames, (length,), beam, beam, fusion)
        assert [h.tokens for h in alone] == [h.tokens for h in together[row]]
        truth = {h.tokens: h.log_probability for h in exact_hypotheses(frames[0], fusion)}
        for one, other in zip(alone, together[row], strict=True):
            assert is_close(one.log_probability, other.log_probability)
            assert one.log_probability <= truth[one.tokens] + 1e-9


def test_fusion_with_zero_weight_changes_nothing(model):
    log_probabilities = random_log_probabilities(2, (9, 4), VOCABULARY)
    log_probabilities[:, :, [OUR_TOKENS.start, OUR_TOKENS.end]] = -math.inf
    plain = prefix_beam_search(log_probabilities, (9, 4), 6, 6)
    assert prefix_beam_search(log_probabilities, (9, 4), 6, 6, fusion=Fusion(model, 0.0)) == plain
    unlikely = replace(model, unigrams=model.unigrams.clone().fill_(-math.inf))
    assert prefix_beam_search(log_probabilities, (9, 4), 6, 6, fusion=Fusion(unlikely, 0.0)) == plain
