"""Decoding of encoder frames: choice of the search, and beam search over the scores of several models.

Watanabe et al. (2017), Hybrid CTC/Attention Architecture for End-to-End Speech Recognition: a hypothesis has the score

    (1 - w) log p_attention + w log p_CTC + l log p_language model + bonus x tokens

over all of its tokens. For an unfinished hypothesis, p_CTC is the probability of all sequences with that prefix.

B utterances (in a search: those not yet finished), K hypotheses per utterance (the beam), C candidates of a hypothesis,
V vocabulary, T' encoder frames, D model width.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import DecodingConfig, DecodingMethod
from konkanivani.data.text import FREE, OUR_TOKENS, GenerationRules, SpecialTokens, TimeRules, Vocabulary
from konkanivani.decoding.ctc import (
    Heads,
    Hypothesis,
    Network,
    ctc_head_of,
    decoder_of,
    first_best,
    greedy_ctc,
    prefix_beam_search,
    sort_hypotheses,
)
from konkanivani.decoding.language_model import Fusion, LanguageModel, read_language_model
from konkanivani.decoding.scorers import AttentionScorer, CTCScorer, FullScorer, LanguageModelScorer
from konkanivani.errors import UsageError
from konkanivani.lengths import Lengths

# --------------------
# Generation rules: tokens that are never generated, consistent timestamps, and an end to loops.
#
# Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 4.5, and the published
# code: a timestamp precedes and follows each segment of text, and timestamps never decrease.


class RuledScorer:
    """Scorer that gives -inf to tokens that the rules forbid (a FullScorer); the rest is not renormalised."""

    def __init__(self, scorer: FullScorer, rules: GenerationRules, end: int) -> None:
        self._scorer = scorer
        self._rules = rules
        self._end = end
        self._length = 0
        self._times: _Times | None = None  # set by the first `score`, which determines the number of hypotheses
        self._loops = _Loops(rules) if rules.ends_loops else None

    def _history(self) -> "_Times":
        """Return the timestamps of the hypotheses so far; a RuntimeError before the first `score`."""
        if self._times is None:
            raise RuntimeError("The first `score` must come before `follow` and `keep`.")
        return self._times

    def score(self) -> torch.Tensor:
        scores = self._scorer.score()
        if self._times is None:
            self._times = _Times.none(scores)
        if self._length == self._rules.most_tokens:
            return scores  # only the end token can follow here, and no rule forbids it
        forbidden = torch.zeros(scores.shape[2], dtype=torch.bool, device=scores.device)
        forbidden[list(self._rules.suppressed)] = True
        if self._length == 0:
            forbidden[list(self._rules.suppressed_first)] = True
        allowed = scores.masked_fill(forbidden, -math.inf)
        if self._rules.times is not None:
            allowed = self._apply_timestamp_rules(allowed, self._rules.times)
        if self._loops is not None:
            for n, k in self._loops.found():  # only the end token can follow a loop, and no rule forbids it
                allowed[n, k] = -math.inf
                allowed[n, k, self._end] = scores[n, k, self._end]
        return allowed

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._scorer.follow(sources, tokens)
        self._length += 1
        if self._rules.times is not None:
            self._times = self._history().followed(sources, tokens, self._rules.times, is_first=self._length == 1)
        if self._loops is not None:
            self._loops.follow(sources.tolist(), tokens.tolist())

    def keep(self, utterances: torch.Tensor) -> None:
        self._scorer.keep(utterances)
        self._times = self._history().kept(utterances)
        if self._loops is not None:
            self._loops.keep(utterances.tolist())

    def _apply_timestamp_rules(self, scores: torch.Tensor, rules: TimeRules) -> torch.Tensor:
        history = self._history()
        ids = torch.arange(scores.shape[2], device=scores.device)
        is_time = ids >= rules.first
        is_pair = history.is_last & history.is_before
        is_half = history.is_last & ~history.is_before
        forbidden = (
            # Two timestamps must be followed by text; a single one after text by its pair or the end token.
            (ids == rules.no_times) | (is_pair[:, :, None] & is_time) | (is_half[:, :, None] & (ids < self._end))
        )
        # After text, its end timestamp may be repeated as the next segment's start; others must increase.
        lowest = torch.where(is_half, history.latest, history.latest + 1)
        forbidden |= is_time & (ids < lowest[:, :, None])
        if self._length == 0:
            forbidden |= ~is_time
            if rules.latest_first is not None:
                forbidden |= ids > rules.first + rules.latest_first
        return _prefer_timestamps(scores.masked_fill(forbidden, -math.inf), rules.first)


def _prefer_timestamps(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Mask non-timestamps in scores (B, K, V) if all timestamps together are likelier than any other token."""
    times = scores[:, :, first:].logsumexp(dim=2)
    best_text = scores[:, :, :first].amax(dim=2)
    scores[:, :, :first].masked_fill_((times > best_text)[:, :, None], -math.inf)
    return scores


@dataclass(frozen=True)
class _Times:
    """Timestamp state of hypotheses (B, K): last token, token before, and the latest timestamp's id (-1 for none)."""

    is_last: torch.Tensor
    is_before: torch.Tensor  # True also if there is only one token
    latest: torch.Tensor

    @classmethod
    def none(cls, scores: torch.Tensor) -> "_Times":
        shape = scores.shape[:2]
        device = scores.device
        is_last = torch.zeros(shape, dtype=torch.bool, device=device)
        return cls(is_last, ~is_last, torch.full(shape, -1, device=device))

    def followed(self, sources: torch.Tensor, tokens: torch.Tensor, rules: TimeRules, is_first: bool) -> "_Times":
        is_before = self.is_last.gather(1, sources)
        latest = self.latest.gather(1, sources)
        is_time = tokens >= rules.first
        return _Times(is_time, is_before | is_first, torch.where(is_time, tokens, latest))

    def kept(self, utterances: torch.Tensor) -> "_Times":
        return _Times(self.is_last[utterances], self.is_before[utterances], self.latest[utterances])


# Copies of a sequence, and tokens in its repetitions, that count as a loop without end: more than a speaker repeats
# without a pause.
ENDLESS_COPIES = 8
ENDLESS_TOKENS = 32


def count_repeated(text: Sequence[int], copies: int, least: int = 0) -> int:
    """Return the number of tokens at the end of `text` that repeat those one period earlier, for the best period.

    Args:
        copies: minimum number of copies of a sequence; else the result is 0. The first copy is not counted.
        least: minimum result; else it is 0.
    """
    most = 0
    for period in range(1, len(text) // copies + 1):
        repeated = 0
        while repeated < len(text) - period and text[-1 - repeated] == text[-1 - repeated - period]:
            repeated += 1
        if repeated >= max((copies - 1) * period, least):
            most = max(most, repeated)
    return most


def is_endless(text: Sequence[int]) -> bool:
    """Return whether these tokens end in a loop that `GenerationRules.ends_loops` ends."""
    return count_repeated(text, ENDLESS_COPIES, ENDLESS_TOKENS) > 0


class _Loops:
    """Text tokens of the hypotheses of a search. Timestamps rise from copy to copy, so they are left out."""

    def __init__(self, rules: GenerationRules) -> None:
        self._first_time = math.inf if rules.times is None else rules.times.first
        self._texts: list[list[list[int]]] = []  # by utterance and hypothesis; empty before the first token

    def found(self) -> Iterator[tuple[int, int]]:
        """Yield the places (utterance, hypothesis) of texts that end in a loop."""
        for n, texts in enumerate(self._texts):
            yield from ((n, k) for k, text in enumerate(texts) if is_endless(text))

    def follow(self, sources: list[list[int]], tokens: list[list[int]]) -> None:
        earlier = self._texts or [[[] for _ in row] for row in tokens]
        self._texts = [
            [
                texts[source] + ([token] if token < self._first_time else [])
                for source, token in zip(row_sources, row_tokens, strict=True)
            ]
            for texts, row_sources, row_tokens in zip(earlier, sources, tokens, strict=True)
        ]

    def keep(self, utterances: list[int]) -> None:
        self._texts = [self._texts[n] for n in utterances]


# --------------------
# Beam search over the weighted sum of several scorers, token by token; with a beam of 1, greedy search.


# CTC scores the likeliest candidates of each hypothesis by the other scorers: this number times the beam size.
CANDIDATES_A_PLACE = 2
# With a length bonus, scores can grow: the search then ends when hypotheses ended at each of the last three lengths and
# none of them came within ten nats of the best one (Watanabe et al., 2017, eq. 22; here endings are pruned too).
END_DETECT_LENGTHS = 3
NATS_WITHOUT_HOPE = 10.0


@dataclass(frozen=True)
class Weighted:
    """Scorer and the weight of its log probabilities."""

    scorer: FullScorer
    weight: float


@dataclass(frozen=True)
class Scorers:
    """All scorers of a search; `ctc` scores only the candidates that `full` finds likeliest."""

    full: tuple[Weighted, ...]
    ctc: CTCScorer | None
    ctc_weight: float
    length_bonus: float
    end: int = OUR_TOKENS.end

    def score(self, beam: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates (B, K, C), always including the end token, and the scores of the extended hypotheses."""
        first, *remaining = self.full
        scores = first.weight * first.scorer.score()
        for weighted in remaining:
            scores = scores + weighted.weight * weighted.scorer.score()
        # A broken model's NaN or infinity must not make a hypothesis win.
        scores = scores.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
        candidates = _top_candidates(scores, CANDIDATES_A_PLACE * beam if self.ctc else scores.shape[2], self.end)
        scores = scores.gather(2, candidates)
        if self.ctc:
            scores = scores + self.ctc_weight * self.ctc.score(candidates)
        return candidates, scores

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        """Continue with hypotheses `sources` (B, K), each extended by its token (B, K)."""
        for scorer in self._all_scorers():
            scorer.follow(sources, tokens)

    def keep(self, utterances: torch.Tensor) -> None:
        """Continue with the utterances at these indices only."""
        for scorer in self._all_scorers():
            scorer.keep(utterances)

    def _all_scorers(self) -> list[FullScorer | CTCScorer]:
        return [weighted.scorer for weighted in self.full] + ([self.ctc] if self.ctc else [])


def _top_candidates(scores: torch.Tensor, count: int, end: int) -> torch.Tensor:
    """Return token ids (B, K, C), ascending: the `count` likeliest by scores (B, K, V), and the end token."""
    batch, beam, vocabulary = scores.shape
    if count >= vocabulary:
        return torch.arange(vocabulary, device=scores.device).expand(batch, beam, -1)
    # The end token is always added, so it must not take a place among the likeliest.
    without_end = scores.index_fill(2, torch.tensor(end, device=scores.device), -math.inf)
    likeliest = first_best(without_end.flatten(0, 1), count).view(batch, beam, count)
    ends = likeliest.new_full((batch, beam, 1), end)
    return torch.cat([likeliest, ends], dim=2).sort(dim=2).values


@dataclass
class _Search:
    """State of a search: hypotheses of the unfinished utterances, and ended hypotheses of all utterances."""

    limits: torch.Tensor  # (B,)
    places: list[int]  # index in the batch of each of the B utterances
    tokens: torch.Tensor  # (B, K, tokens so far)
    scores: torch.Tensor  # (B, K), -inf for an empty place in the beam
    ended: list[list[Hypothesis]]  # of all utterances of the batch

    @property
    def length(self) -> int:
        return self.tokens.shape[2]


@torch.no_grad()
def beam_search(
    scorers: Scorers, limits: Lengths, beam: int, best: int, device: torch.device
) -> list[tuple[Hypothesis, ...]]:
    """Return each utterance's up to `best` hypotheses of at most limits[b] tokens, likeliest first.

    The result does not depend on the batch. Without a length bonus, log probabilities never grow with another token, so
    the search ends when no open hypothesis can beat the ended ones.
    """
    search = _begin(limits, beam, device)
    while search.places:
        candidates, scores = scorers.score(beam)
        # Hypotheses are extended only from used places of the beam, and only up to their limit.
        is_end = candidates == scorers.end
        scores = scores + scorers.length_bonus * (search.length + (~is_end).double())
        is_too_long = (search.limits <= search.length)[:, None, None] & ~is_end
        scores = scores.masked_fill(is_too_long | (search.scores == -math.inf)[:, :, None], -math.inf)
        sources, tokens = _select(search, candidates, scores)
        # Hypotheses that now end leave the search; the end token is not part of them.
        has_ended = (tokens == scorers.end) & (search.scores > -math.inf)
        for n, k in has_ended.nonzero().tolist():
            hypothesis = Hypothesis(tuple(search.tokens[n, k, :-1].tolist()), search.scores[n, k].item())
            search.ended[search.places[n]].append(hypothesis)
        search.scores = search.scores.masked_fill(tokens == scorers.end, -math.inf)
        can_improve = [n for n in range(len(search.places)) if _can_improve(search, n, best, scorers.length_bonus)]
        search.places = [search.places[n] for n in can_improve]
        if not can_improve:
            break
        scorers.follow(sources, tokens)
        if len(can_improve) < len(tokens):
            rows = torch.tensor(can_improve, device=device)
            search.limits = search.limits[rows]
            search.tokens = search.tokens[rows]
            search.scores = search.scores[rows]
            scorers.keep(rows)
    return [tuple(sort_hypotheses(ended)[:best]) for ended in search.ended]


def _begin(limits: Lengths, beam: int, device: torch.device) -> _Search:
    """Return a search with one empty hypothesis per utterance; the other places of its beam are empty."""
    scores = torch.full((len(limits), beam), -math.inf, dtype=torch.float64, device=device)
    scores[:, 0] = 0.0
    tokens = torch.empty(*scores.shape, 0, dtype=torch.int64, device=device)
    return _Search(torch.tensor(limits, device=device), list(range(len(limits))), tokens, scores, [[] for _ in limits])


def _select(search: _Search, candidates: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the K best of the scores (B, K, C) in the search; return their sources and tokens (B, K)."""
    chosen = first_best(scores.flatten(1), search.scores.shape[1])
    sources = chosen // scores.shape[2]
    tokens = candidates.flatten(1).gather(1, chosen)
    before = search.tokens.gather(1, sources[:, :, None].expand_as(search.tokens))
    search.tokens = torch.cat([before, tokens[:, :, None]], dim=2)
    search.scores = scores.flatten(1).gather(1, chosen)
    return sources, tokens


def _can_improve(search: _Search, n: int, best: int, length_bonus: float) -> bool:
    """Return whether an open hypothesis of the n-th utterance may still become one of the `best`."""
    highest = search.scores[n].max().item()
    ended = sort_hypotheses(search.ended[search.places[n]])
    if highest == -math.inf or len(ended) < best:
        return highest > -math.inf
    if length_bonus <= 0:
        return highest > ended[best - 1].log_probability
    # A hypothesis gains at most the bonus of the tokens up to its limit.
    most_gain = length_bonus * max(0, int(search.limits[n]) + 1 - search.length)
    if highest + most_gain <= ended[best - 1].log_probability:
        return False
    hopeless = ended[0].log_probability - NATS_WITHOUT_HOPE
    recent: dict[int, float] = {}  # score of the best hypothesis that ended with each number of tokens
    for hypothesis in ended[::-1]:
        recent[len(hypothesis.tokens)] = hypothesis.log_probability
    # A length at which no ending reached the beam says nothing.
    lengths = range(search.length - END_DETECT_LENGTHS, search.length)
    return not all(recent.get(length, math.inf) < hopeless for length in lengths)


# --------------------
# Decoding of encoded frames into token ids, as the settings choose.


class Decode(Protocol):
    """Decoder of encoded (B, T', D) with their lengths into token ids per utterance, without special tokens.

    The model must be in evaluation mode and is not changed.
    """

    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]: ...


@dataclass(frozen=True)
class PrefixDecode:
    """CTC prefix beam search, with a language model if `fusion` is given."""

    beam: int
    fusion: Fusion | None = None

    @torch.no_grad()
    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
        # Softmax in fp32, whatever the precision of the head.
        log_probabilities = ctc_head_of(model)(encoded).float().log_softmax(dim=-1)
        return _best_tokens(prefix_beam_search(log_probabilities, encoded_lengths, self.beam, fusion=self.fusion))


@dataclass(frozen=True)
class BeamDecode:
    """Beam search with the attention decoder, with CTC if `ctc_weight` is above 0, and optionally a language model."""

    beam: int
    ctc_weight: float
    length_bonus: float
    language_model: LanguageModel | None
    language_model_weight: float
    special: SpecialTokens = OUR_TOKENS
    rules: GenerationRules = FREE

    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
        return _best_tokens(self.search(model, encoded, encoded_lengths, best=1))

    @torch.no_grad()
    def search(
        self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths, best: int
    ) -> list[tuple[Hypothesis, ...]]:
        """Return each utterance's `best` hypotheses, likeliest first, without the rules' prompt."""
        frames = encoded, encoded_lengths, self.beam
        full = [Weighted(self.attention(model, *frames), 1 - self.ctc_weight)]
        if self.language_model is not None:
            scorer = LanguageModelScorer(self.language_model, len(encoded), self.beam, encoded.device, self.special)
            full.append(Weighted(scorer, self.language_model_weight))
        ctc = CTCScorer(model, *frames, self.special) if self.ctc_weight else None
        scorers = Scorers(tuple(full), ctc, self.ctc_weight, self.length_bonus, self.special.end)
        return beam_search(scorers, self.limits(model, encoded_lengths), self.beam, best, encoded.device)

    def limits(self, model: Network, encoded_lengths: Lengths) -> Lengths:
        """Return the maximal number of tokens of each utterance's hypotheses.

        The rules' maximum or, without one, the utterance's number of frames; at most the decoder's capacity.
        """
        # The prompt takes positions in the decoder. Without a rule, at most one token per encoder frame, as in CTC.
        max_tokens = self.rules.most_tokens
        capacity = decoder_of(model).most_tokens - len(self.rules.prompt)
        # int: a capacity without limit is infinite, but no minimum is.
        return tuple(int(min(length if max_tokens is None else max_tokens, capacity)) for length in encoded_lengths)

    def attention(self, model: Network, encoded: torch.Tensor, lengths: Lengths, beam: int) -> FullScorer:
        """Return the attention decoder's scorer of `beam` hypotheses per utterance, restricted by the rules."""
        scorer = AttentionScorer(model, encoded, lengths, beam, self.special, self.rules.prompt)
        return RuledScorer(scorer, self.rules, self.special.end) if self.rules.forbids else scorer


def greedy_decode(heads: Heads, tokenizer: Vocabulary) -> Decode:
    """Return greedy decoding: CTC's best path, or without a CTC head the decoder's likeliest token at each step."""
    if heads.has_ctc:
        return greedy_ctc
    return BeamDecode(1, 0.0, 0.0, None, 0.0, tokenizer.special, tokenizer.rules)


def ways_to_decode(heads: Heads) -> list[DecodingMethod]:
    """Return the values of `DecodingConfig.decode` that the model has the heads for, the best one last."""
    has_ctc = heads.has_ctc
    has_decoder = heads.has_decoder
    is_possible_by_method: dict[DecodingMethod, bool] = {
        "greedy": True,
        "prefix": has_ctc,
        "attention": has_decoder,
        "joint": has_ctc and has_decoder,
    }
    return [method for method, is_possible in is_possible_by_method.items() if is_possible]


def build_decode(config: DecodingConfig, heads: Heads, tokenizer: Vocabulary, device: torch.device) -> Decode:
    """Return the decoding that the settings choose.

    Raises:
        UsageError: The model does not have the heads for it.
        DataError: The language model does not match the tokenizer.
    """
    possible = ways_to_decode(heads)
    if config.decode not in possible:
        missing = "CTC head" if not heads.has_ctc else "attention decoder"
        raise UsageError(
            f"--decode {config.decode} needs the {missing}, which the model does not have: use --decode "
            f"{' or '.join(possible)}."
        )
    if config.decode == "greedy":
        return greedy_decode(heads, tokenizer)
    language_model = None
    weight = config.language_model_weight
    if config.language_model is not None and weight:  # with a weight of 0 the file need not exist
        # A language model is over the project's own tokenizer, which has a blank; Whisper's has none.
        if tokenizer.special.blank is None:
            raise UsageError("--language_model needs a model with a KonkaniVani tokenizer: omit it.")
        language_model = read_language_model(config.language_model, tokenizer, device)
    if config.decode == "prefix":
        fusion = Fusion(language_model, weight, config.length_bonus, tokenizer.special) if language_model else None
        return PrefixDecode(config.beam, fusion)
    ctc_weight = config.joint_ctc_weight if config.decode == "joint" else 0.0
    return BeamDecode(
        config.beam, ctc_weight, config.length_bonus, language_model, weight, tokenizer.special, tokenizer.rules
    )


def _best_tokens(results: list[tuple[Hypothesis, ...]]) -> list[list[int]]:
    """Return the first hypothesis' tokens per utterance, [] if the search found none."""
    return [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in results]
