"""CTC prefix beam search and prefix scores equal the sum over all alignments of tiny inputs; 1e-9 in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.config import DecodingConfig
from konkanivani.decoding import ctc as prefix_beam
from konkanivani.decoding import scorers as prefix_scorer
from konkanivani.decoding.ctc import (
    MAX_DISTANCE,
    STEPS_IN_A_NAT,
    Hypothesis,
    collapse_repeats,
    first_best,
    mask_padding_as_blank,
    prefix_beam_search,
)
from konkanivani.decoding.scorers import CTCPrefixScorer, PrefixState
from konkanivani.errors import UsageError
from konkanivani.lengths import Lengths, ctc_frames_needed
from konkanivani.rules import check_decoding

BOUND = 1e-9
EVERY_PREFIX = 400  # exceeds the number of prefixes of 5 frames and 3 tokens
Probabilities = dict[tuple[int, ...], float]


def random_log_probabilities(seed: int, frames: Lengths, vocabulary: int, impossible: float = 0.0) -> torch.Tensor:
    """Return log probabilities (B, T', V) in float64, NaN in the padding; a share of them is -inf."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(frames), max(frames), vocabulary
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    logits.masked_fill_(torch.rand(shape, generator=generator) < impossible, -math.inf)
    logits[:, :, int(torch.randint(vocabulary, (), generator=generator))].clamp_(min=-1)  # one token is always possible
    log_probabilities = logits.log_softmax(dim=-1)
    for row, length in enumerate(frames):
        log_probabilities[row, length:] = math.nan
    return log_probabilities


def all_sequences(log_probabilities: torch.Tensor) -> Probabilities:
    """Return the probability of each token sequence for (T', V): the sum over all V ** T' alignments that spell it."""
    rows = log_probabilities.exp().tolist()
    terms: dict[tuple[int, ...], list[float]] = {}
    for alignment in itertools.product(range(log_probabilities.shape[1]), repeat=len(rows)):
        tokens = tuple(token for token, _ in itertools.groupby(alignment) if token != 0)
        terms.setdefault(tokens, []).append(math.prod(row[token] for row, token in zip(rows, alignment, strict=True)))
    return {tokens: math.fsum(parts) for tokens, parts in terms.items()}


def prefix_probability(sequences: Probabilities, prefix: tuple[int, ...]) -> float:
    return math.fsum(sequences[tokens] for tokens in sequences if tokens[: len(prefix)] == prefix)


def log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def is_close(one: float, other: float) -> bool:
    """Return whether the values agree to 1e-9, relative if large; two infinities are equal, a NaN equals nothing."""
    return one == other or math.isclose(one, other, rel_tol=BOUND, abs_tol=BOUND)


def is_exact(hypotheses: tuple[Hypothesis, ...], sequences: Probabilities) -> bool:
    """Return whether the hypotheses are all possible sequences with their probabilities, likeliest first."""
    expected = sorted((probability for probability in sequences.values() if probability > 0), reverse=True)
    return len(hypotheses) == len({hypothesis.tokens for hypothesis in hypotheses}) == len(expected) and all(
        is_close(hypothesis.log_probability, math.log(probability))
        and is_close(hypothesis.log_probability, log(sequences.get(hypothesis.tokens, 0.0)))
        for hypothesis, probability in zip(hypotheses, expected, strict=True)
    )


def state_after(scorer: CTCPrefixScorer, tokens: tuple[int, ...]) -> PrefixState:
    """Return the state after these tokens of one hypothesis for the first utterance."""
    state = scorer.initial()
    for token in tokens:
        state = scorer.select(state, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[token]]))
    return state


def has_exact_scores(log_probabilities: torch.Tensor, longest: int) -> bool:
    """Return whether the scores after each hypothesis of up to `longest` tokens are sums over all sequences (T', V)."""
    vocabulary = log_probabilities.shape[1]
    sequences = all_sequences(log_probabilities)
    scorer = CTCPrefixScorer(log_probabilities[None], (len(log_probabilities),))
    for length in range(longest + 1):
        for tokens in itertools.product(range(1, vocabulary), repeat=length):
            state = state_after(scorer, tokens)
            expected = [-math.inf] + [
                log(prefix_probability(sequences, (*tokens, token))) for token in range(1, vocabulary)
            ]
            scores = scorer.score(state)[0, 0].tolist()
            ends = scorer.end(state).item(), log(sequences.get(tokens, 0.0))
            if not is_close(*ends) or not all(map(is_close, scores, expected)):
                return False
    return True


SHAPES = [(1, 2), (2, 3), (3, 4), (4, 3), (5, 2), (5, 4)]


def test_wider_beam_approaches_the_ctc_loss_from_below():
    """The CTC loss is the exact value; noise is the hardest case, with many relevant alignments."""
    lengths = (60, 45)
    log_probabilities = random_log_probabilities(6, lengths, 7)
    missed = []
    for beam in (1, 10, 100):
        result = prefix_beam_search(log_probabilities, lengths, beam)
        tokens = [torch.tensor(hypotheses[0].tokens) for hypotheses in result]
        losses = F.ctc_loss(
            log_probabilities.nan_to_num().transpose(0, 1),
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            lengths,
            tuple(map(len, tokens)),
            reduction="none",
        )
        missed.append(-losses - torch.tensor([hypotheses[0].log_probability for hypotheses in result]))
    assert all((each > -BOUND).all() for each in missed)
    assert (missed[0] > missed[1]).all() and (missed[1] > missed[2]).all()


def test_beam_search_finds_likelier_sequence_than_best_path():
    """Two frames of 0.6 blank and 0.4 token: the best path is empty (0.36), but three paths spell the token (0.64)."""
    log_probabilities = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]], dtype=torch.float64).log()
    assert collapse_repeats(log_probabilities.argmax(-1), (2,)) == [[]]
    ((first, second),) = prefix_beam_search(log_probabilities, (2,), beam=2, best=2)
    assert first.tokens == (1,) and is_close(first.log_probability, math.log(0.64))
    assert second.tokens == () and is_close(second.log_probability, math.log(0.36))


def single_alignment(path: list[int], vocabulary: int = 3) -> torch.Tensor:
    """Return log probabilities (1, T', V) of one possible alignment."""
    return F.one_hot(torch.tensor([path]), vocabulary).double().log()


@pytest.mark.parametrize(
    "path, tokens",
    [([1, 1, 1], (1,)), ([1, 0, 1], (1, 1)), ([0, 1, 2], (1, 2)), ([1, 1, 2, 2, 0, 2], (1, 2, 2)), ([0, 0], ())],
)
def test_repeated_tokens_need_a_blank_between(path, tokens):
    expected = Hypothesis(tokens, 0.0)
    assert prefix_beam_search(single_alignment(path), (len(path),), beam=4, best=4) == [(expected,)]
    scorer = CTCPrefixScorer(single_alignment(path), (len(path),))
    assert scorer.end(state_after(scorer, tokens)).item() == 0.0


def test_ties_are_ordered_by_token_ids():
    """All alignments are equally likely, so groups of sequences have equal scores."""
    uniform = torch.full((1, 4, 4), 0.25, dtype=torch.float64).log()
    (hypotheses,) = prefix_beam_search(uniform, (4,), EVERY_PREFIX, best=EVERY_PREFIX)
    keys = [(-round(hypothesis.log_probability, 6), hypothesis.tokens) for hypothesis in hypotheses]
    assert keys == sorted(keys) and len({likelihood for likelihood, _ in keys}) < len(keys)
    assert [h.tokens for h in prefix_beam_search(uniform[:, :1], (1,), beam=2, best=2)[0]] == [(), (1,)]


@pytest.mark.parametrize("lengths", [(9, 9), (9, 0, 4, 1), (1, 30, 17)])
@pytest.mark.parametrize("beam", [1, 4, 7])
def test_batched_beam_search_equals_single_utterances(lengths, beam):
    log_probabilities = random_log_probabilities(1, lengths, 6, impossible=0.1)
    log_probabilities[0, :, 3:5] = log_probabilities[0, :, 2:3]  # includes ties
    together = prefix_beam_search(log_probabilities, lengths, beam, beam)
    for row, length in enumerate(lengths):
        alone = prefix_beam_search(log_probabilities[row : row + 1, :length], (length,), beam, beam)
        assert [h.tokens for h in alone[0]] == [h.tokens for h in together[row]]
        for one, other in zip(alone[0], together[row], strict=True):
            assert is_close(one.log_probability, other.log_probability)


def test_batched_beam_search_with_ties_equals_single_utterances():
    """Two probability levels: equal sums are rounded differently at different positions in a batch."""
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        lengths = tuple(torch.randint(1, 25, (4,), generator=generator).tolist())
        levels = torch.randint(2, (4, max(lengths), 5), generator=generator).double().log_softmax(-1)
        together = prefix_beam_search(levels, lengths, beam=13, best=13)
        for row, length in enumerate(lengths):
            (alone,) = prefix_beam_search(levels[row : row + 1, :length], (length,), beam=13, best=13)
            assert [hypothesis.tokens for hypothesis in alone] == [hypothesis.tokens for hypothesis in together[row]]


def test_zero_frames_give_the_empty_hypothesis():
    nothing = torch.zeros(1, 0, 5)
    assert prefix_beam_search(nothing, (0,), beam=3, best=3) == [(Hypothesis((), 0.0),)]
    scorer = CTCPrefixScorer(nothing, (0,))
    assert scorer.end(scorer.initial()).item() == 0.0
    assert scorer.score(scorer.initial()).tolist() == [[[-math.inf] * 5]]


def test_impossible_input_gives_no_hypothesis():
    nothing = torch.full((2, 3, 4), -math.inf)
    assert prefix_beam_search(nothing, (3, 0), beam=3, best=2) == [(), (Hypothesis((), 0.0),)]


def test_half_precision_is_decoded_in_at_least_float32():
    log_probabilities = random_log_probabilities(4, (30,), 5)
    halves = log_probabilities.bfloat16()
    assert mask_padding_as_blank(halves, (30,)).dtype == torch.float32
    assert prefix_beam_search(halves, (30,), 5) == prefix_beam_search(halves.double(), (30,), 5)


@pytest.mark.parametrize("wrong", [{"beam": 0}, {"beam": 2, "best": 0}])
def test_beam_or_best_of_zero_raises_value_error(wrong):
    with pytest.raises(ValueError, match="above zero"):
        prefix_beam_search(torch.zeros(1, 2, 3), (2,), **wrong)


@pytest.mark.parametrize("lengths", [(3,), (2, 2)])
def test_mismatched_lengths_raise_value_error(lengths):
    with pytest.raises(ValueError, match="Lengths"):
        CTCPrefixScorer(torch.zeros(1, 2, 3), lengths)


@pytest.mark.parametrize("impossible", [0.0, 0.4])
@pytest.mark.parametrize("frames, vocabulary", SHAPES)
def test_prefix_scores_equal_sums_over_all_sequences(frames, vocabulary, impossible):
    """Hypotheses longer than the frames are included; they and their extensions are impossible."""
    for seed in range(2):
        log_probabilities = random_log_probabilities(seed, (frames,), vocabulary, impossible)
        assert has_exact_scores(log_probabilities[0], longest=min(frames + 1, 4))


def test_end_score_equals_negative_ctc_loss():
    frames, tokens = 40, (3, 3, 1, 4, 2, 2, 2, 1)
    log_probabilities = random_log_probabilities(2, (frames,), 5)
    scorer = CTCPrefixScorer(log_probabilities, (frames,))
    for length in range(len(tokens) + 1):
        loss = F.ctc_loss(
            log_probabilities.transpose(0, 1), torch.tensor([tokens[:length]]), (frames,), (length,), reduction="sum"
        )
        assert is_close(scorer.end(state_after(scorer, tokens[:length])).item(), -loss.item())


def test_prefix_probability_is_the_sum_of_end_and_extensions():
    """P(prefix g) = P(is g) + the sum over c of P(prefix g c), over more frames than are scored at once."""
    frames = 3 * prefix_scorer.FRAMES_AT_ONCE + 5
    scorer = CTCPrefixScorer(random_log_probabilities(3, (frames,), 6), (frames,))
    state, begun = scorer.initial(), torch.zeros(())
    for token in (2, 2, 5, 1, 1, 1, 3):
        scores = scorer.score(state)[0, 0]
        ways_on = torch.cat([scorer.end(state)[0], scores])
        assert is_close(ways_on.logsumexp(0).item(), begun.item())
        begun, state = scores[token], scorer.select(state, torch.tensor([[0]]), torch.tensor([[token]]))


def test_batched_prefix_scores_equal_those_of_each_hypothesis():
    lengths, beam = (12, 5, 0), 3
    log_probabilities = random_log_probabilities(5, lengths, 5, impossible=0.1)
    scorer = CTCPrefixScorer(log_probabilities, lengths)
    generator = torch.Generator().manual_seed(0)
    state, spelt = scorer.initial(), [[()] for _ in lengths]
    for _ in range(4):
        sources = torch.randint(len(spelt[0]), (len(lengths), beam), generator=generator)
        tokens = torch.randint(1, 5, (len(lengths), beam), generator=generator)
        state = scorer.select(state, sources, tokens)
        spelt = [
            [(*row[source], token) for source, token in zip(*places, strict=True)]
            for row, *places in zip(spelt, sources.tolist(), tokens.tolist(), strict=True)
        ]
        some = torch.randint(5, (len(lengths), beam, 2), generator=generator)
        scores, ends, of_some = scorer.score(state), scorer.end(state), scorer.score(state, some)
        assert torch.equal(of_some == -math.inf, scores.gather(2, some) == -math.inf)
        assert all(map(is_close, of_some.flatten().tolist(), scores.gather(2, some).flatten().tolist()))
        for row, place in itertools.product(range(len(lengths)), range(beam)):
            alone = CTCPrefixScorer(log_probabilities[row : row + 1, : lengths[row]], lengths[row : row + 1])
            alone_state = state_after(alone, spelt[row][place])
            assert is_close(alone.end(alone_state).item(), ends[row, place].item())
            expected = alone.score(alone_state).flatten().tolist()
            assert all(map(is_close, scores[row, place].tolist(), expected))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_small_random_problems_are_decoded_exactly(data):
    lengths = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    vocabulary = data.draw(st.integers(1, 4))
    value = st.one_of(st.just(-math.inf), st.integers(-30_000, 0).map(lambda number: number / 1000))
    count = len(lengths) * max(lengths) * vocabulary
    values = data.draw(st.lists(value, min_size=count, max_size=count))
    # Not normalised: no decoder needs frame probabilities that sum to one.
    log_probabilities = torch.tensor(values, dtype=torch.float64).view(len(lengths), max(lengths), vocabulary)
    everything = prefix_beam_search(log_probabilities, lengths, EVERY_PREFIX, best=EVERY_PREFIX)
    beam = data.draw(st.integers(1, 6))
    narrow = prefix_beam_search(log_probabilities, lengths, beam, best=beam)
    scorer = CTCPrefixScorer(log_probabilities, lengths)
    for row, length in enumerate(lengths):
        sequences = all_sequences(log_probabilities[row, :length])
        assert is_exact(everything[row], sequences)
        for hypothesis in narrow[row]:
            assert hypothesis.log_probability <= log(sequences[hypothesis.tokens]) + BOUND
            assert ctc_frames_needed(list(hypothesis.tokens)) <= length
    assert not scorer.score(scorer.initial(2)).isnan().any()


def allow_repeats_without_blank(token, last, in_blank, in_any):
    """Simulate a decoder that omits the blank between repeated tokens."""
    return in_any + torch.zeros_like(token + last)


def ignore_parents(beam, longest):
    """Simulate a decoder that counts a prefix twice: unchanged and extended from a shorter prefix."""
    return torch.zeros_like(beam.lengths), torch.zeros_like(beam.lengths, dtype=torch.bool)


@pytest.mark.parametrize("part, mistake", [("_extendable", allow_repeats_without_blank), ("_parents", ignore_parents)])
def test_negative_control_wrong_prefix_merge_is_detected(part, mistake, monkeypatch):
    """With either mistake, the search is not exact."""
    log_probabilities = random_log_probabilities(0, (4,), 3)
    sequences = all_sequences(log_probabilities[0])
    assert is_exact(prefix_beam_search(log_probabilities, (4,), EVERY_PREFIX, EVERY_PREFIX)[0], sequences)
    monkeypatch.setattr(prefix_beam, part, mistake)
    assert not is_exact(prefix_beam_search(log_probabilities, (4,), EVERY_PREFIX, EVERY_PREFIX)[0], sequences)


def test_negative_control_wrong_prefix_score_is_detected(monkeypatch):
    """Forward variables that let a token repeat without a blank are detected."""
    log_probabilities = random_log_probabilities(0, (4,), 3)[0]
    assert has_exact_scores(log_probabilities, longest=2)
    right = CTCPrefixScorer.select

    def without_repeats(self, state, sources, tokens):
        return right(self, PrefixState(state.in_blank, state.in_token, torch.zeros_like(state.last)), sources, tokens)

    monkeypatch.setattr(CTCPrefixScorer, "select", without_repeats)
    assert not has_exact_scores(log_probabilities, longest=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (DecodingConfig("joint", beam=0), "--beam"),
        (DecodingConfig("joint", joint_ctc_weight=1.0), "--joint_ctc_weight"),
        (DecodingConfig("joint", length_bonus=math.nan), "finite"),
        (DecodingConfig("prefix", length_bonus=0.5), "--length_bonus works with"),
        (DecodingConfig("joint", language_model_weight=-0.1), "--language_model_weight"),
        (DecodingConfig("greedy", language_model="lm.arpa"), "--language_model works with"),
    ],
)
def test_invalid_decoding_settings_raise_usage_error(wrong, message):
    with pytest.raises(UsageError, match=message):
        check_decoding(wrong)


def test_default_decoding_settings_are_accepted():
    for decode in ("greedy", "prefix", "attention", "joint"):
        check_decoding(DecodingConfig(decode))


def first_best_with_fixed_distance(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return what `first_best` returns while the keys of all candidates fit into an int64."""
    highest = scores.amax(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    ranks = ((scores - highest) * STEPS_IN_A_NAT).round().clamp(min=-MAX_DISTANCE)
    ranks = ranks.masked_fill(scores == -math.inf, -MAX_DISTANCE - 1).long()
    keys = ranks * scores.shape[1] - torch.arange(scores.shape[1])
    return keys.topk(count, dim=1).indices


@pytest.mark.parametrize("candidates", [2**23 - 1, 2**23, 2**24 + 1])
def test_best_of_millions_of_candidates_are_found(candidates):
    scores = torch.full((1, candidates), -math.inf, dtype=torch.float64)
    scores[0, candidates // 2 :] = -1e6  # as far below the best as a rank can say
    best = [candidates - 1, 7, candidates // 2]
    scores[0, best] = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    assert first_best(scores, 4).tolist() == [[*best, candidates // 2 + 1]]


def test_best_of_usual_numbers_of_candidates_are_the_same_as_with_a_fixed_distance():
    generator = torch.Generator().manual_seed(0)
    for candidates in (1, 2, 1000, 2**16, 2**20 + 3):
        scores = 30_000 * torch.rand(2, candidates, generator=generator, dtype=torch.float64).neg()
        scores[0, ::3] = -math.inf
        count = min(100, candidates)
        assert torch.equal(first_best(scores, count), first_best_with_fixed_distance(scores, count))


def test_wide_beam_with_a_large_vocabulary_finds_the_likeliest_tokens():
    vocabulary = 2**20
    log_probabilities = torch.full((1, 3, vocabulary), -60.0)
    for frame, token in enumerate((9, 0, vocabulary - 1)):
        log_probabilities[0, frame, token] = -1e-6
    ((best,),) = prefix_beam_search(log_probabilities, (3,), beam=8)
    assert best.tokens == (9, vocabulary - 1)
