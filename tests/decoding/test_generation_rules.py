"""Generation rules forbid the same tokens as transformers' logits processors, and prompts precede hypotheses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.config import DecodingConfig, FeatureConfig
from konkanivani.data.text import GenerationRules, SpecialTokens, TimeRules
from konkanivani.decoding.decode import BeamDecode, RuledScorer, Scorers, Weighted, beam_search, build_decode
from konkanivani.decoding.scorers import AttentionScorer, gather_scores
from konkanivani.errors import UsageError
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.conformer import keep_activations
from tests.invariants.parts import MODEL

processors = pytest.importorskip("transformers.generation.logits_process")
transformers = pytest.importorskip("transformers")

V, END, NO_TIMES = 40, 20, 24
FIRST_TIME, PROMPT = NO_TIMES + 1, (21, 22)
SPECIAL = SpecialTokens(blank=None, unknown=None, start=21, end=END)


class FixedScores:
    """FullScorer that returns fixed scores (steps, B, K, V), one step at a time."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores, self._step = scores, 0
        self._totals = torch.zeros(scores.shape[1:3], dtype=torch.float64)

    def score(self) -> torch.Tensor:
        return self._totals[:, :, None] + self._scores[self._step].double().log_softmax(dim=-1)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._totals = gather_scores(self.score(), sources, tokens)
        self._step += 1

    def keep(self, utterances: torch.Tensor) -> None:
        self._totals, self._scores = self._totals[utterances], self._scores[:, utterances]


def transformers_scores(tokens: torch.Tensor, scores: torch.Tensor, rules: GenerationRules) -> torch.Tensor:
    """Return scores (N, V) after tokens (N, U) from transformers' processors, in the order of `generate`."""
    begin = len(PROMPT)
    history = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], dim=1)
    scores = processors.SuppressTokensAtBeginLogitsProcessor(rules.suppressed_first, begin)(history, scores)
    scores = processors.SuppressTokensLogitsProcessor(rules.suppressed)(history, scores)
    if rules.times:
        config = transformers.GenerationConfig(eos_token_id=END, bos_token_id=END, no_timestamps_token_id=NO_TIMES)
        config.max_initial_timestamp_index = rules.times.latest_first
        scores = processors.WhisperTimeStampLogitsProcessor(config, begin_index=begin)(history, scores)
    return scores


IDS = st.lists(st.integers(0, V - 1), max_size=6, unique=True).map(tuple)
TIME_RULES = st.none() | st.builds(TimeRules, st.just(NO_TIMES), st.just(FIRST_TIME), st.none() | st.integers(0, 5))
RULES = st.builds(GenerationRules, st.just(()), IDS, IDS, TIME_RULES)


@settings(deadline=None, max_examples=80)
@given(RULES, st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 4.0]))
def test_forbidden_tokens_equal_those_of_transformers(rules, seed, spread):
    """Ten steps of three utterances with two hypotheses each, with random allowed tokens except for the end."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(10, 3, 2, V, generator=generator)
    scorer, history = RuledScorer(FixedScores(scores), rules, END), torch.empty(3, 2, 0, dtype=torch.int64)
    for step in range(10):
        if step == 6:  # an utterance has ended
            kept = torch.tensor([0, 2])
            scorer.keep(kept)
            history, scores = history[kept], scores[:, kept]
        actual = scorer.score()
        expected = transformers_scores(history.flatten(0, 1), scores[step].flatten(0, 1), rules).view_as(actual)
        assert torch.equal(actual.isinf(), expected.isinf())
        allowed = actual.exp().gt(0).double().index_fill(2, torch.tensor(END), 0.0) + 1e-9
        tokens = torch.multinomial(allowed.flatten(0, 1), 1, generator=generator).view(history.shape[:2])
        sources = torch.randint(2, history.shape[:2], generator=generator)
        tokens = tokens.gather(1, sources)
        scorer.follow(sources, tokens)
        history = torch.cat([history.gather(1, sources[:, :, None].expand_as(history)), tokens[:, :, None]], dim=2)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_hypotheses_that_loop_can_only_end(seed, has_times):
    """Three copies and two repeated tokens count as a loop here, and only three tokens are possible."""
    generator = torch.Generator().manual_seed(seed)
    times = TimeRules(NO_TIMES, FIRST_TIME, None) if has_times else None
    scores = torch.full((14, 3, 2, V), -math.inf)
    scores[..., [1, 2, END, *(range(FIRST_TIME, V) if has_times else ())]] = 0.0
    loops = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("konkanivani.decoding.decode.ENDLESS_COPIES", 3)
        patch.setattr("konkanivani.decoding.decode.ENDLESS_TOKENS", 2)
        plain = RuledScorer(FixedScores(scores), GenerationRules(times=times), END)
        scorer = RuledScorer(FixedScores(scores), GenerationRules(times=times, ends_loops=True), END)
        history = torch.empty(3, 2, 0, dtype=torch.int64)
        for step in range(14):
            if step == 8:  # an utterance has ended
                kept = torch.tensor([0, 2])
                for each in (plain, scorer):
                    each.keep(kept)
                history = history[kept]
            expected, actual = plain.score(), scorer.score()
            for row in [(n, k) for n in range(len(history)) for k in range(2)]:
                text = [token for token in history[row].tolist() if token < NO_TIMES]
                periods = range(1, len(text) // 3 + 1)
                if any(text[-3 * period :] == 3 * text[-period:] for period in periods):
                    assert actual[row].isfinite().nonzero().flatten().tolist() == [END]
                    loops += 1
                else:
                    assert torch.equal(actual[row], expected[row])
            # The hypotheses continue, so that later loops are tested too.
            allowed = expected.exp().gt(0).double().index_fill(2, torch.tensor(END), 0.0) + 1e-9
            tokens = torch.multinomial(allowed.flatten(0, 1), 1, generator=generator).view(history.shape[:2])
            sources = torch.randint(2, history.shape[:2], generator=generator)
            tokens = tokens.gather(1, sources)
            for each in (plain, scorer):
                each.follow(sources, tokens)
            history = torch.cat([history.gather(1, sources[:, :, None].expand_as(history)), tokens[:, :, None]], dim=2)
    assert loops or has_times


def test_scores_of_allowed_tokens_are_unchanged():
    scores = torch.randn(2, 1, 1, V, generator=torch.Generator().manual_seed(0))
    rules = GenerationRules(suppressed=(3,), suppressed_first=(4,))
    result, plain = RuledScorer(FixedScores(scores), rules, END).score(), FixedScores(scores).score()
    assert result.isinf().nonzero()[:, 2].tolist() == [3, 4]
    assert torch.equal(result[~result.isinf()], plain[~result.isinf()])


def test_length_bonus_search_continues_while_no_hypothesis_ends():
    """The empty hypothesis ends in the first step; the likely one of six tokens is the next that ends."""
    scores = torch.full((9, 1, 2, V), -50.0)
    scores[0, :, :, END] = -8.0
    scores[:6, :, :, 1] = 0.0
    scores[6:, :, :, END] = 0.0
    scorers = Scorers((Weighted(FixedScores(scores), 1.0),), None, 0.0, 0.5, END)
    (hypotheses,) = beam_search(scorers, (8,), 2, 1, torch.device("cpu"))
    assert hypotheses[0].tokens == (1,) * 6
    assert hypotheses[0].log_probability == pytest.approx(3.0, abs=0.01)


def build_model():
    torch.manual_seed(1)
    architecture = HybridArchitecture(MODEL, FeatureConfig(), V, has_ctc=False)
    return architecture, architecture.build().eval()


def test_prompt_precedes_the_first_score():
    _, model = build_model()
    encoded, lengths = torch.randn(2, 12, MODEL.d_model), (12, 9)
    with torch.no_grad():
        scorer = AttentionScorer(model, encoded, lengths, 2, SPECIAL, prompt=(5, 6, 7))
        result = scorer.score()
        tokens = torch.tensor([[SPECIAL.start, 5, 6, 7]] * 2)
        whole = model.decoder.output(model.decoder(tokens, encoded, lengths, keep_activations))[:, -1].double()
        assert torch.allclose(result, whole.log_softmax(-1)[:, None].expand_as(result), atol=1e-5)
        assert not result.isinf().any()  # without a blank, only the rules exclude tokens
        unlike = AttentionScorer(model, encoded, lengths, 2, SPECIAL, prompt=(5, 7, 6)).score()
        assert not torch.allclose(result, unlike, atol=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_beam_search_follows_rules_and_token_limit(beam):
    _, model = build_model()
    encoded, lengths = torch.randn(3, 5, MODEL.d_model), (5, 5, 5)
    with torch.no_grad():
        model.decoder.output.bias[END] = -30.0  # the end token is never chosen
        model.decoder.output.bias[FIRST_TIME:] += 2.0
    times = TimeRules(NO_TIMES, FIRST_TIME, latest_first=2)
    suppressed = (1, 2, 3, 21, 22, 23)
    for rules in (
        GenerationRules(PROMPT[1:], suppressed, (4, END), times, most_tokens=11),
        GenerationRules(PROMPT[1:], suppressed, (4, END), None, most_tokens=11),
    ):
        search = BeamDecode(beam, 0.0, 0.0, None, 0.0, SPECIAL, rules)
        for tokens in search(model, encoded, lengths):
            assert len(tokens) == 11 and not set(tokens) & set(suppressed) and tokens[0] != 4
            timestamps = [token for token in tokens if token >= FIRST_TIME]
            assert timestamps == sorted(timestamps) or rules.times is None
            assert FIRST_TIME <= tokens[0] <= FIRST_TIME + 2 or rules.times is None
    free = BeamDecode(beam, 0.0, 0.0, None, 0.0, SPECIAL)(model, encoded, lengths)
    assert [len(tokens) for tokens in free] == [5, 5, 5]  # negative control: one token per frame


def test_language_model_with_other_tokens_is_rejected():
    architecture, _ = build_model()

    class Other:
        special, rules = SPECIAL, GenerationRules()

    config = DecodingConfig(decode="attention", beam=2, language_model="lm.arpa", language_model_weight=0.5)
    with pytest.raises(UsageError, match="--language_model"):
        build_decode(config, architecture, Other(), torch.device("cpu"))
