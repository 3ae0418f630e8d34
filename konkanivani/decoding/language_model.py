"""Back-off n-gram language model for a beam, and its fusion with the scores of CTC.

B batch, K prefixes per utterance (the beam), R hypotheses (rows), V vocabulary, C tokens tried in a frame, E n-grams,
N states.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from konkanivani.data.text import OUR_TOKENS, SpecialTokens, Vocabulary
from konkanivani.decoding.ngram import FOREIGN, Ngrams, read_arpa
from konkanivani.errors import DataError

# --------------------
# Back-off n-gram language model, stored so that all hypotheses of a beam are scored at once.
#
# Katz (1987), Estimation of Probabilities from Sparse Data: the probability of a token after a context is their
# n-gram's if there is one; otherwise it is the context's backoff weight (1 if it has none) times the probability after
# the context without its first token. The n-grams are a trie in sorted arrays. A state is a node of it: the longest
# suffix of the tokens so far that is a prefix of an n-gram, so that equal token sequences always have the same state.


ROOT = 0  # state of the empty context
SENTENCES_AT_ONCE = 256
NODES_AT_ONCE = 2**19  # nodes linked at once; bounds the temporary memory


class RepeatedNgram(Exception):
    """Error for an n-gram that is listed twice; `tokens` is the n-gram."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(f"The n-gram {tokens} is listed twice.")
        self.tokens = tokens


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """Back-off n-gram model; log probabilities are natural, in float64, and those of the file, not renormalised.

    A token that the model does not contain is scored and remembered as the unknown token.
    """

    order: int
    keys: torch.Tensor  # (E,) int64, ascending: state x V + following token
    log_probabilities: torch.Tensor  # (E,) of that token in that state
    next_states: torch.Tensor  # (E,) state after that token
    unigrams: torch.Tensor  # (V,) log probabilities without context, -inf for tokens without one
    first_edges: torch.Tensor  # (N + 1,) index of each state's first key
    backoffs: torch.Tensor  # (N,) log weights
    shorter: torch.Tensor  # (N,) state that a state backs off to; ROOT's is ROOT
    stand_ins: torch.Tensor  # (V,) token that each token is scored as; blank, with probability 0, as itself
    special: SpecialTokens = OUR_TOKENS

    def initial(self, rows: int) -> torch.Tensor:
        """Return the state (R,), int64, at the start of a sentence."""
        start = torch.tensor([self.special.start], device=self.keys.device)
        return self._next_states(torch.full_like(start, ROOT), start).expand(rows)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """Return the log probability (R, V), float64, of each token after each state (R,).

        The end token's is the end of the sentence's; blank and the start token have -inf.
        """
        contexts = [states]
        for _ in range(self.order - 2):
            contexts.append(self.shorter[contexts[-1]])
        scores = self.unigrams.repeat(len(states), 1)
        # From the shortest context to the longest: all tokens are backed off, then the known n-grams overwrite theirs.
        for context in reversed(contexts):
            scores += self.backoffs[context, None]
            # (rows, edges) of all followers of the contexts; ROOT's are the unigrams already.
            first = self.first_edges[context]
            counts = (self.first_edges[context + 1] - first).masked_fill(context == ROOT, 0)
            rows = torch.arange(len(context), device=context.device).repeat_interleave(counts)
            edges = torch.arange(len(rows), device=context.device) + (first - counts.cumsum(0) + counts)[rows]
            scores[rows, self.keys[edges] % len(self.unigrams)] = self.log_probabilities[edges]
        return scores[:, self.stand_ins]

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states (R,), int64, after one more token (R,)."""
        return self._next_states(states, self.stand_ins[tokens])

    def _next_states(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state (R,) that is the longest suffix of a state's tokens plus one more token (R,)."""
        after = torch.full_like(states, ROOT)
        is_found = torch.zeros_like(states, dtype=torch.bool)
        for _ in range(self.order):
            edges, is_there = find(self.keys, states * len(self.unigrams) + tokens)
            after = torch.where(is_there & ~is_found, self.next_states[edges], after)
            is_found |= is_there
            states = self.shorter[states]
        return after


def find(keys: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up keys (R,) in ascending keys (E,); return their indices and whether they are present."""
    places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)  # a larger key than all gives E
    return places, keys[places] == wanted


def read_language_model(path: str | Path, tokenizer: Vocabulary, device: torch.device) -> LanguageModel:
    """Read the model of an ARPA file, for the tokens of `tokenizer`, to `device`.

    Raises:
        DataError: The file is not a model of these tokens.
    """
    orders = read_arpa(path, tokenizer)
    try:
        model = build_language_model(orders, tokenizer.size, device, tokenizer.special)
    except RepeatedNgram as error:
        words = " ".join(tokenizer.piece(token) for token in error.tokens)
        raise DataError(
            f'The language model {path} cannot be used: "{words}" is listed twice in its '
            f"{len(error.tokens)}-grams. Train it again, or use another --language_model."
        ) from None
    special = dataclasses.astuple(tokenizer.special)
    pieces = tokenizer.size - len(special)
    known_pieces = int((~np.isin(orders[0].tokens, special)).sum())
    if 2 * known_pieces < pieces:  # nearly every token would be scored as unknown
        raise DataError(
            f"The language model {path} has only {known_pieces} of the tokenizer's {pieces} tokens. {FOREIGN}"
        )
    return model


def score_sentences(model: LanguageModel, sentences: Iterable[Sequence[int]]) -> list[float]:
    """Return the log probability of each sentence, including its end."""
    sentence_scores = []
    sentences = iter(sentences)
    while some := [[*tokens, model.special.end] for tokens in islice(sentences, SENTENCES_AT_ONCE)]:
        columns = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in some], padding_value=-1)
        states = model.initial(len(some))
        totals = torch.zeros(len(some), dtype=torch.float64, device=states.device)
        for tokens in columns.to(states.device):
            is_there = tokens >= 0
            followed = tokens.clamp(min=0)
            scores = model.score(states).gather(1, followed[:, None])[:, 0]
            totals += scores.masked_fill(~is_there, 0.0)
            states = model.advance(states, followed)
        sentence_scores += totals.tolist()
    return sentence_scores


def build_language_model(
    orders: Sequence[Ngrams], vocabulary: int, device: torch.device, special: SpecialTokens = OUR_TOKENS
) -> LanguageModel:
    """Build the model of n-grams of order 1, 2, ...; every token must be in order 1.

    Raises:
        RepeatedNgram: An n-gram is listed twice.
        ValueError: A token is missing in order 1, or the vocabulary has no blank.
    """
    words = orders[0].tokens[:, 0]
    is_word = np.zeros(vocabulary, bool)
    is_word[words] = True
    if not all(is_word[ngrams.tokens].all() for ngrams in orders):
        raise ValueError("A token of an n-gram is missing in order 1.")
    levels = _levels(orders)
    begins = np.cumsum([1, *(len(level.tokens) for level in levels)]).tolist()  # first node per level; ROOT is node 0
    keys = torch.from_numpy(np.concatenate([level.keys(begins, vocabulary) for level in levels]))
    backoffs = torch.from_numpy(np.concatenate([np.zeros(1), *(level.backoffs for level in levels[:-1])]))
    log_probabilities = torch.from_numpy(np.concatenate([level.log_probabilities for level in levels]))
    shorter = torch.zeros(len(keys) + 1, dtype=torch.int64)
    # Lower levels first: a node backs off to nodes that are linked already.
    for begin, end in zip(begins[1:-1], begins[2:], strict=True):
        for first in range(begin, end, NODES_AT_ONCE):
            nodes = slice(first, min(first + NODES_AT_ONCE, end))
            _link(nodes, keys, vocabulary, shorter, log_probabilities, backoffs)
    states = len(backoffs)
    unigrams = torch.full((vocabulary,), -math.inf, dtype=torch.float64)
    unigrams[levels[0].tokens] = log_probabilities[: len(words)]
    return LanguageModel(
        order=len(levels),
        keys=keys.to(device),
        log_probabilities=log_probabilities.to(device),
        next_states=torch.cat([torch.arange(1, states), shorter[states:]]).to(device),
        unigrams=unigrams.to(device),
        first_edges=torch.searchsorted(keys, torch.arange(states + 1) * vocabulary).to(device),
        backoffs=backoffs.to(device),
        shorter=shorter[:states].clone().to(device),
        stand_ins=_scored_tokens(words, vocabulary, special).to(device),
        special=special,
    )


def _scored_tokens(words: np.ndarray, vocabulary: int, special: SpecialTokens) -> torch.Tensor:
    """Return the token (V,) that each token is scored as, for a model of these words.

    Words are scored as themselves, other tokens as the unknown one, or as blank if the model has none.
    """
    if special.blank is None:
        raise ValueError("A language model needs a vocabulary with a blank.")
    substitute = special.blank
    if special.unknown is not None and special.unknown in words:
        substitute = special.unknown
    stand_ins = torch.full((vocabulary,), substitute)
    stand_ins[words] = torch.from_numpy(words.astype(np.int64))
    stand_ins[[special.blank, special.start]] = special.blank
    return stand_ins


@dataclass(frozen=True, eq=False)
class _Level:
    """Sorted n-grams of one order, including prefixes of longer ones without a log probability of their own (NaN)."""

    order: int
    parents: np.ndarray  # (N,) index in the level below of an n-gram's first n - 1 tokens
    tokens: np.ndarray  # (N,) last token
    log_probabilities: np.ndarray  # (N,)
    backoffs: np.ndarray  # (N,)

    def keys(self, begins: list[int], vocabulary: int) -> np.ndarray:
        """Return keys (N,), int64, ascending: parent node x V + token; `begins` holds each level's first node."""
        first = begins[self.order - 2] if self.order > 1 else ROOT
        return (self.parents.astype(np.int64) + first) * vocabulary + self.tokens


def _levels(orders: Sequence[Ngrams]) -> list[_Level]:
    """Return a level per order, each containing every prefix of the level above."""
    levels: list[_Level] = []
    prefixes = np.zeros((0, len(orders)), np.int32)  # distinct prefixes of the level above
    prefixes_above = np.zeros(0, np.int32)  # index of each of its n-grams' prefix
    for ngrams in reversed(orders):
        tokens = np.concatenate([ngrams.tokens, prefixes])
        missing = np.full(len(prefixes), math.nan)
        log_probabilities = np.concatenate([ngrams.log_probabilities, missing])
        # lexsort is stable: of equal rows, the n-gram comes before the prefix and keeps its log probability.
        ranks = np.lexsort(tokens.T[::-1])
        tokens = tokens[ranks]
        log_probabilities = log_probabilities[ranks]
        is_new = _is_new(tokens)
        repeated = ~is_new & ~np.isnan(log_probabilities)
        if repeated.any():
            raise RepeatedNgram(tokens[repeated.argmax()].tolist())
        if levels:
            places = np.empty(len(tokens), np.int32)
            places[ranks] = is_new.cumsum(dtype=np.int32) - 1
            levels[-1] = replace(levels[-1], parents=places[len(ngrams) :][prefixes_above])
        distinct = tokens[is_new]
        backoffs = np.concatenate([ngrams.backoffs, np.zeros(len(prefixes))])
        is_new_prefix = _is_new(distinct[:, :-1])
        prefixes = distinct[is_new_prefix, :-1]
        prefixes_above = is_new_prefix.cumsum(dtype=np.int32) - 1
        values = distinct[:, -1].copy(), log_probabilities[is_new], backoffs[ranks][is_new]
        levels.append(_Level(distinct.shape[1], np.zeros(len(distinct), np.int32), *values))
    return levels[::-1]


def _is_new(rows: np.ndarray) -> np.ndarray:
    """Return (N,) bool: whether each of the sorted rows (N, n) differs from the previous one; True for the first."""
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return is_new


def _link(
    nodes: slice,
    keys: torch.Tensor,
    vocabulary: int,
    shorter: torch.Tensor,
    log_probabilities: torch.Tensor,
    backoffs: torch.Tensor,
) -> None:
    """Fill in the backoff states of these nodes of one level, and their log probability if it is missing (NaN).

    Both follow from the levels below: the longest of the shorter contexts in which the node's token is found.
    """
    # Node n is reached by edge n - 1: ROOT is node 0 and has no edge.
    edges = slice(nodes.start - 1, nodes.stop - 1)
    contexts = keys[edges] // vocabulary
    tokens = keys[edges] % vocabulary
    weights = backoffs[contexts]
    links = torch.zeros_like(contexts)
    contexts, pending = shorter[contexts], torch.arange(len(contexts))
    while len(pending):
        places, is_there = find(keys, contexts[pending] * vocabulary + tokens[pending])
        links[pending[is_there]] = places[is_there]
        pending = pending[~is_there]
        weights[pending] += backoffs[contexts[pending]]
        contexts[pending] = shorter[contexts[pending]]
    shorter[nodes] = links + 1
    own = log_probabilities[edges]
    own.copy_(torch.where(own.isnan(), weights + log_probabilities[links], own))


# --------------------
# Language model scores for CTC prefix beam search: shallow fusion (Hannun et al., 2014).
#
# A transcript has the score log P_CTC + weight x log P_language model + bonus x tokens, where P_language model includes
# the end of the sentence. An unfinished prefix is scored without that end.


@dataclass(frozen=True)
class Fusion:
    """Language model, the weight of its log probabilities, and a bonus per token."""

    language_model: LanguageModel
    weight: float
    length_bonus: float = 0.0
    special: SpecialTokens = OUR_TOKENS

    def begin(self, batch: int, beam: int) -> "FusionScores":
        """Return the scores of empty prefixes."""
        states = self.language_model.initial(batch * beam)
        following, ends = self.following(states)
        scores = ends.new_zeros(batch, beam)
        return FusionScores(self, states.view_as(scores), scores, following.view(batch, beam, -1), ends.view_as(scores))

    def following(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gain of each token (R, V) and of the end of the sentence (R,) after each state (R,)."""
        scores = self.language_model.score(states)
        # 0 x -inf would be NaN.
        scores = self.weight * scores if self.weight else torch.zeros_like(scores)
        # CTC must not emit the start and end of a sentence as tokens.
        special = torch.tensor([self.special.start, self.special.end], device=scores.device)
        return (scores + self.length_bonus).index_fill(1, special, -math.inf), scores[:, self.special.end]


@dataclass(frozen=True)
class FusionScores:
    """Scores of a beam's prefixes, and the gain of each further token or of the end of the transcript."""

    fusion: Fusion
    states: torch.Tensor  # (B, K), of the language model
    scores: torch.Tensor  # (B, K)
    following: torch.Tensor  # (B, K, V)
    ends: torch.Tensor  # (B, K)

    @property
    def ended(self) -> torch.Tensor:
        """Scores (B, K) of the prefixes as complete transcripts."""
        return self.scores + self.ends

    def of(self, tried: torch.Tensor) -> torch.Tensor:
        """Return scores (B, K, 1 + C): of the prefixes unchanged, and extended by each of the tried tokens (B, C)."""
        gains = self.following.gather(2, tried[:, None].expand(-1, self.scores.shape[1], -1))
        return torch.cat([self.scores[:, :, None], self.scores[:, :, None] + gains], dim=2)

    def follow(self, sources: torch.Tensor, is_longer: torch.Tensor, tokens: torch.Tensor) -> "FusionScores":
        """Return the scores of prefixes `sources` (B, K), extended by a token (B, K) if `is_longer` (B, K)."""
        following = self.following.gather(1, sources[:, :, None].expand_as(self.following))
        states, scores, ends = (values.gather(1, sources) for values in (self.states, self.scores, self.ends))
        gains = following.gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]  # -1: not extended
        scores = torch.where(is_longer, scores + gains, scores)
        states[is_longer] = self.fusion.language_model.advance(states[is_longer], tokens[is_longer])
        following[is_longer], ends[is_longer] = self.fusion.following(states[is_longer])
        return FusionScores(self.fusion, states, scores, following, ends)
