"""Invariant 7: cached decoding == uncached; beam 1 == greedy; wide beam == brute force; batch == one by one.

Decoding also leaves the model unchanged: a step after a validation by beam search equals the step without it.
"""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from konkanivani.config import DecodingConfig, TrainConfig
from konkanivani.data.index import Utterance
from konkanivani.data.text import FREE, OUR_TOKENS
from konkanivani.decoding.decode import BeamDecode, Decode, Scorers, Weighted, beam_search, build_decode
from konkanivani.decoding.scorers import AttentionScorer
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.conformer import keep_activations
from konkanivani.models.decoder import FIRST_CAPACITY, DecoderCache
from konkanivani.training.step import StepParts, train_step
from konkanivani.training.validation import join_portions, recognize_all
from tests.invariants.parts import (
    MODEL,
    VOCAB_SIZE,
    double_parts,
    global_batch,
    relative_difference,
    speeches,
    with_dropout,
)

LENGTHS = (19, 31, 12)
ARCHITECTURE = architecture_of(TrainConfig(model=MODEL), VOCAB_SIZE)
TINY_VOCABULARY = 6  # the unknown token and two ordinary ones can be decoded


class NumberTokenizer:
    """Tokenizer that decodes token ids into their numbers."""

    special, rules = OUR_TOKENS, FREE

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def sharp_model(vocab_size: int = VOCAB_SIZE, seed: int = 0, end: float = 0.0) -> KonkaniVaniASR:
    """Return a random float64 model with clear preferences; `end` is added to the logit of the end token."""
    model = double_parts(vocab_size=vocab_size).forward.model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*model.decoder.parameters(), *model.ctc_head.parameters()):
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5)
        model.decoder.output.bias[OUR_TOKENS.end] = end
    return model


def random_encoded(lengths: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return encoded frames (B, T', D), with noise as padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(lengths), max(lengths), MODEL.d_model, generator=generator, dtype=torch.float64)


def decode_of(decode: str, beam: int = 10) -> Decode:
    """Return the named decoder without a language model, the only part that needs a tokenizer."""
    return build_decode(DecodingConfig(decode, beam), ARCHITECTURE, NumberTokenizer(), torch.device("cpu"))


def decoded_step_by_step(model: KonkaniVaniASR, tokens: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    """Decode hypotheses (B, K, U) one token at a time through the cache into (B, K, U, D)."""
    with torch.no_grad():
        cache = model.decoder.begin(encoded, LENGTHS, tokens.shape[1])
        return torch.stack([model.decoder.step(tokens[:, :, u], cache) for u in range(tokens.shape[2])], dim=2)


def decoded_at_once(model: KonkaniVaniASR, tokens: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        each = [model.decoder(tokens[:, k], encoded, LENGTHS, keep_activations) for k in range(tokens.shape[1])]
    return torch.stack(each, dim=1)


def test_cached_decoding_equals_uncached_beyond_initial_capacity():
    model, encoded = sharp_model(), random_encoded(LENGTHS)
    tokens = torch.randint(VOCAB_SIZE, (3, 4, 2 * FIRST_CAPACITY + 5), generator=torch.Generator().manual_seed(1))
    cached, uncached = decoded_step_by_step(model, tokens, encoded), decoded_at_once(model, tokens, encoded)
    assert relative_difference(uncached, cached) < 1e-12


def test_reordered_hypotheses_keep_their_cached_state():
    model, encoded = sharp_model(), random_encoded(LENGTHS)
    assert difference_with_reordering(model, encoded) < 1e-12


def test_negative_control_cache_without_reordering_differs(monkeypatch):
    monkeypatch.setattr(DecoderCache, "reorder", lambda cache, sources: None)
    assert difference_with_reordering(sharp_model(), random_encoded(LENGTHS)) > 1e-3


def difference_with_reordering(model: KonkaniVaniASR, encoded: torch.Tensor) -> float:
    """Return the largest difference from uncached decoding while hypotheses branch and change their order.

    The first utterance leaves the batch early.
    """
    generator = torch.Generator().manual_seed(3)
    places = torch.tensor([0, 1, 2])
    tokens = torch.full((3, 4, 1), OUR_TOKENS.start)
    worst = 0.0
    with torch.no_grad():
        cache = model.decoder.begin(encoded, LENGTHS, 4)
        for length in range(1, 8):
            cached = model.decoder.step(tokens[:, :, -1], cache)
            rows, lengths = encoded[places], tuple(LENGTHS[place] for place in places)
            uncached = [model.decoder(tokens[:, k], rows, lengths, keep_activations)[:, -1] for k in range(4)]
            worst = max(worst, relative_difference(torch.stack(uncached, dim=1), cached))
            sources = torch.randint(4, tokens.shape[:2], generator=generator)
            new = torch.randint(4, VOCAB_SIZE, tokens.shape[:2], generator=generator)
            before = tokens.gather(1, sources[:, :, None].expand_as(tokens))
            tokens = torch.cat([before, new[:, :, None]], dim=2)
            cache.reorder(sources)
            if length == 4:
                kept = torch.tensor([1, 2])
                cache.select(kept)
                places, tokens = places[kept], tokens[kept]
    return worst


def greedy_without_cache(model: KonkaniVaniASR, encoded: torch.Tensor, length: int) -> list[int]:
    """Return the most likely token at each step, up to the end token or one token per frame."""
    tokens = [OUR_TOKENS.start]
    while len(tokens) <= length:
        with torch.no_grad():
            decoded = model.decoder(torch.tensor([tokens]), encoded[None, :length], (length,), keep_activations)
            scores = model.decoder.output(decoded[0, -1]).log_softmax(dim=0)
        scores[[OUR_TOKENS.blank, OUR_TOKENS.start]] = -math.inf
        token = int(scores.argmax())
        if token == OUR_TOKENS.end:
            break
        tokens.append(token)
    return tokens[1:]


@pytest.mark.parametrize("end", [-4.0, 1.0, 4.0])
def test_attention_beam_of_one_equals_greedy(end):
    results = []
    for seed in range(4):
        model, encoded = sharp_model(seed=seed, end=end), random_encoded(LENGTHS, seed)
        greedy = [greedy_without_cache(model, row, length) for row, length in zip(encoded, LENGTHS, strict=True)]
        assert BeamDecode(1, 0.0, 0.0, None, 0.0)(model, encoded, LENGTHS) == greedy
        results += map(tuple, greedy)
    assert len(set(results)) > 3


def attention_log_probability(model: KonkaniVaniASR, encoded: torch.Tensor, tokens: tuple[int, ...]) -> float:
    """Return the log-probability of the tokens and the end token, computed without a cache."""
    sequences = torch.tensor([[OUR_TOKENS.start, *tokens]])
    with torch.no_grad():
        decoded = model.decoder(sequences, encoded[None], (len(encoded),), keep_activations)
        scores = model.decoder.output(decoded[0]).log_softmax(dim=-1)
    return sum(float(scores[u, token]) for u, token in enumerate((*tokens, OUR_TOKENS.end)))


def ctc_log_probability(model: KonkaniVaniASR, encoded: torch.Tensor, tokens: tuple[int, ...]) -> float:
    """Return the CTC log-probability of the tokens, computed with `torch.nn.functional.ctc_loss`."""
    with torch.no_grad():
        frames = model.ctc_head(encoded).float().log_softmax(dim=-1).double()[:, None]
    if not tokens:
        return float(frames[:, 0, OUR_TOKENS.blank].sum())
    targets = torch.tensor([tokens])
    return -float(F.ctc_loss(frames, targets, (len(encoded),), (len(tokens),), reduction="sum"))


class Bigrams:
    """Bigram language model: the context is the last token."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        scores = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.table = (2 * scores.double()).log_softmax(dim=1)

    def initial(self, rows: int) -> torch.Tensor:
        return torch.full((rows,), OUR_TOKENS.start)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return self.table[states]

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def log_probability(self, tokens: tuple[int, ...]) -> float:
        sequences = [OUR_TOKENS.start, *tokens, OUR_TOKENS.end]
        return sum(float(self.table[one, next_]) for one, next_ in itertools.pairwise(sequences))


@functools.cache
def scored_sequences(seed: int) -> tuple[KonkaniVaniASR, torch.Tensor, dict[tuple[int, ...], tuple[float, float]]]:
    """Return a model, four frames, and the attention and CTC scores of every possible token sequence."""
    given = sharp_model(TINY_VOCABULARY, seed, end=-2.0), random_encoded((4,), seed)[0]
    words = [1, *range(4, TINY_VOCABULARY)]
    sequences = (tokens for count in range(5) for tokens in itertools.product(words, repeat=count))
    return *given, {t: (attention_log_probability(*given, t), ctc_log_probability(*given, t)) for t in sequences}


@pytest.mark.parametrize("ctc_weight", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("length_bonus", [0.0, 1.5])
@pytest.mark.parametrize("language_model_weight", [0.0, 0.7])
def test_wide_beam_equals_brute_force(ctc_weight, length_bonus, language_model_weight):
    for seed in range(2):
        (model, encoded, everything), bigrams, scored = scored_sequences(seed), Bigrams(seed, TINY_VOCABULARY), []
        for tokens, (attention, ctc) in everything.items():
            # Avoid 0 * inf: the CTC score may be -inf.
            total = (1 - ctc_weight) * attention + (ctc_weight * ctc if ctc_weight else 0.0)
            total += language_model_weight * bigrams.log_probability(tokens) + length_bonus * len(tokens)
            scored.append((total, tokens))
        expected = sorted(scored, reverse=True)[:5]
        fused = bigrams if language_model_weight else None
        decode = BeamDecode(200, ctc_weight, length_bonus, fused, language_model_weight)
        (actual,) = decode.search(model, encoded[None], (4,), best=5)
        assert [hypothesis.tokens for hypothesis in actual] == [tokens for _, tokens in expected]
        for hypothesis, (total, _) in zip(actual, expected, strict=True):
            assert hypothesis.log_probability == pytest.approx(total, abs=1e-5)  # CTC log-probabilities are fp32


@pytest.mark.parametrize("ctc_weight", [0.0, 0.3])
@pytest.mark.parametrize("length_bonus", [0.0, 0.5])
def test_batch_decoding_equals_decoding_one_by_one(ctc_weight, length_bonus):
    decode = BeamDecode(5, ctc_weight, length_bonus, Bigrams(0, VOCAB_SIZE), 0.4)
    for seed in range(2):
        lengths = (19, 3, 31, 12, 1)
        model, encoded = sharp_model(seed=seed, end=2.0), random_encoded(lengths, seed)
        together = decode.search(model, encoded, lengths, best=3)
        for row, length, item in zip(encoded, lengths, together, strict=True):
            (alone,) = decode.search(model, row[None, :length], (length,), best=3)
            assert [h.tokens for h in alone] == [h.tokens for h in item]
            for one, other in zip(alone, item, strict=True):
                assert one.log_probability == pytest.approx(other.log_probability, rel=1e-9)


def test_hypothesis_without_end_token_is_limited_to_frame_count():
    model, encoded = sharp_model(end=-1e4), random_encoded(LENGTHS)
    for decode in ("attention", "joint"):
        result = decode_of(decode, 3)(model, encoded, LENGTHS)
        assert all(len(tokens) <= length for tokens, length in zip(result, LENGTHS, strict=True))
    assert [len(t) for t in decode_of("attention", 1)(model, encoded, LENGTHS)] == [*LENGTHS]


def test_model_with_nan_logits_returns_no_tokens():
    model, encoded = sharp_model(), random_encoded(LENGTHS)
    with torch.no_grad():
        model.decoder.output.bias.fill_(math.nan)
        model.ctc_head.bias.fill_(math.nan)
    for decode in ("greedy", "prefix", "attention", "joint"):
        result = decode_of(decode, 3)(model, encoded, LENGTHS)
        assert len(result) == len(LENGTHS) and sum(map(len, result)) == 0


def test_beam_search_stops_when_no_hypothesis_can_improve():
    """Scoring is called once per token of the best hypothesis, and once to detect the end."""

    class Counting(AttentionScorer):
        calls = 0

        def score(self) -> torch.Tensor:
            Counting.calls += 1
            return super().score()

    model, encoded = sharp_model(end=30.0), random_encoded((40,))
    scorer = Counting(model, encoded, (40,), 4)
    (result,) = beam_search(Scorers((Weighted(scorer, 1.0),), None, 0.0, 0.0), (40,), 4, 1, encoded.device)
    assert len(result) == 1 and Counting.calls == len(result[0].tokens) + 1 < 40


def validate(parts: StepParts, decode: str) -> None:
    """Run a validation in the middle of an epoch."""
    spoken = speeches(3, seed=9, augmented=False)
    (batch,) = global_batch(spoken, 3).micro_batches
    utterances = [Utterance(s.utterance_id, 1.0, "4 5", "", row) for row, s in enumerate(spoken)]
    portion = recognize_all(parts.forward, [(batch, utterances)], NumberTokenizer(), decode_of(decode))
    evaluation = join_portions([portion], parts.forward.objective, seconds=0.0)
    assert len(evaluation.scored) == 3


@functools.cache
def weights_after(decode: str | None, disturb=lambda parts: None) -> list[torch.Tensor]:
    """Return the weights after two steps, with a validation by beam search between them."""
    parts = double_parts(with_dropout(MODEL, 0.2))
    train_step(parts, global_batch(speeches(4), 2), 0)
    if decode:
        validate(parts, decode)
    disturb(parts)
    train_step(parts, global_batch(speeches(4, seed=1), 2), 1)
    return [parameter.detach().clone() for parameter in parts.model.parameters()]


@pytest.mark.parametrize("decode", ["greedy", "prefix", "attention", "joint"])
def test_validation_does_not_change_the_next_step(decode):
    expected, actual = weights_after(None), weights_after(decode)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_negative_control_side_effect_of_validation_is_detected():
    def change_model(parts: StepParts) -> None:
        next(parts.model.parameters()).grad = torch.ones_like(next(parts.model.parameters()))
        parts.model.decoder.embedding.weight.data.add_(1e-12)

    expected, actual = weights_after(None), weights_after("joint", change_model)
    assert not all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_decoding_leaves_no_gradient_and_no_module_state():
    model, encoded = sharp_model(), random_encoded(LENGTHS).requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {name for name, _ in model.named_buffers()} | {key for module in model.modules() for key in vars(module)}
    for decode in ("greedy", "prefix", "attention", "joint"):
        decode_of(decode, 3)(model, encoded, LENGTHS)
    assert encoded.grad is None and all(parameter.grad is None for parameter in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert names == {name for name, _ in model.named_buffers()} | {k for m in model.modules() for k in vars(m)}
