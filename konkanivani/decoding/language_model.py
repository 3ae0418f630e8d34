"""A back-off language model of tokens, held so that a beam is scored at once.

Katz (1987), Estimation of Probabilities from Sparse Data: the probability of a token after a context is that of their
n-gram where there is one, else the context's backoff weight (1 where it has none) times the probability after the
context without its first token.

The n-grams are a trie in sorted arrays. A state is a node of it: the longest end of the tokens so far that begins an
n-gram, so that equal tokens always have the same state.

R hypotheses (rows), V vocabulary, E n-grams, N states.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from konkanivani.base.errors import DataError
from konkanivani.data.text import OUR_TOKENS, SpecialTokens, Tokenizer
from konkanivani.decoding.arpa import FOREIGN, Ngrams, read_arpa

ROOT = 0  # the state of a context of no tokens
SENTENCES_AT_ONCE = 256
NODES_AT_ONCE = 2**19  # that are linked; bounds what that takes beside the model


class RepeatedNgram(Exception):
    """The same n-gram stands twice in a model; `tokens` is one such."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(f"The n-gram {tokens} is listed twice.")
        self.tokens = tokens


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A back-off model of n-grams; log probabilities are natural, in float64, and add up to the model's own whole.

    A token that the model does not know is scored and remembered as the unknown one.
    """

    order: int
    keys: torch.Tensor  # (E,) int64, ascending: state x V + the token that follows it
    log_probabilities: torch.Tensor  # (E,) of that token there
    next_states: torch.Tensor  # (E,) after it
    unigrams: torch.Tensor  # (V,) log probabilities without a context, -inf where there is none
    first_edges: torch.Tensor  # (N + 1,) where the keys of each state begin
    backoffs: torch.Tensor  # (N,) log weights
    shorter: torch.Tensor  # (N,) the state that a state backs off to; ROOT's is ROOT
    stand_ins: torch.Tensor  # (V,) the token that each is scored as; blank, of no probability, as itself
    special: SpecialTokens = OUR_TOKENS

    def initial(self, rows: int) -> torch.Tensor:
        """(R,) int64: the state in which a sentence begins."""
        start = torch.tensor([self.special.start], device=self.keys.device)
        return self._after(torch.full_like(start, ROOT), start).expand(rows)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """(R, V) float64: the log probability of each token after each state (R,).

        The end token's is that of the end of the sentence; blank and the start token have -inf.
        """
        contexts = [states]
        for _ in range(self.order - 2):
            contexts.append(self.shorter[contexts[-1]])
        scores = self.unigrams.repeat(len(states), 1)
        for context in reversed(contexts):
            scores += self.backoffs[context, None]
            # (rows, edges) of everything that follows one of the contexts but ROOT.
            first = self.first_edges[context]
            counts = (self.first_edges[context + 1] - first).masked_fill(context == ROOT, 0)
            rows = torch.arange(len(context), device=context.device).repeat_interleave(counts)
            edges = torch.arange(len(rows), device=context.device) + (first - counts.cumsum(0) + counts)[rows]
            scores[rows, self.keys[edges] % len(self.unigrams)] = self.log_probabilities[edges]
        return scores[:, self.stand_ins]

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(R,) int64: the states after one token (R,) more."""
        return self._after(states, self.stand_ins[tokens])

    def _after(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(R,): the longest end of a state's tokens with a token (R,) more that is a state itself."""
        after, is_found = torch.full_like(states, ROOT), torch.zeros_like(states, dtype=torch.bool)
        for _ in range(self.order):
            edges, is_there = find(self.keys, states * len(self.unigrams) + tokens)
            after = torch.where(is_there & ~is_found, self.next_states[edges], after)
            is_found |= is_there
            states = self.shorter[states]
        return after


def find(keys: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(places among the ascending keys (E,), whether it is there at all) of each wanted key (R,)."""
    places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return places, keys[places] == wanted


def read_language_model(path: str | Path, tokenizer: Tokenizer, device: torch.device) -> LanguageModel:
    """The model of an ARPA file, for the tokens of `tokenizer`, on `device`; a DataError where it is none for them."""
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
    pieces, known = tokenizer.size - len(special), int((~np.isin(orders[0].tokens, special)).sum())
    if 2 * known < pieces:  # it would say of nearly everything that it is unknown
        raise DataError(f"The language model {path} has only {known} of the tokenizer's {pieces} tokens. {FOREIGN}")
    return model


def score_sentences(model: LanguageModel, sentences: Iterable[Sequence[int]]) -> list[float]:
    """The log probability of each sentence's tokens and of its end after them."""
    found, sentences = [], iter(sentences)
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
        found += totals.tolist()
    return found


def build_language_model(
    orders: Sequence[Ngrams], vocabulary: int, device: torch.device, special: SpecialTokens = OUR_TOKENS
) -> LanguageModel:
    """The model of n-grams of order 1, 2, ..., whose tokens all stand in order 1; a RepeatedNgram where one repeats."""
    words = orders[0].tokens[:, 0]
    is_word = np.zeros(vocabulary, bool)
    is_word[words] = True
    if not all(is_word[ngrams.tokens].all() for ngrams in orders):
        raise ValueError("A token of an n-gram is missing in order 1.")
    levels = _levels(orders)
    begins = np.cumsum([1, *(len(level.tokens) for level in levels)]).tolist()  # of each level's nodes; ROOT is node 0
    keys = torch.from_numpy(np.concatenate([level.keys(begins, vocabulary) for level in levels]))
    backoffs = torch.from_numpy(np.concatenate([np.zeros(1), *(level.backoffs for level in levels[:-1])]))
    log_probabilities = torch.from_numpy(np.concatenate([level.log_probabilities for level in levels]))
    shorter = torch.zeros(len(keys) + 1, dtype=torch.int64)
    for begin, end in zip(begins[1:-1], begins[2:], strict=True):
        for first in range(begin, end, NODES_AT_ONCE):
            nodes = slice(first, min(first + NODES_AT_ONCE, end))
            _link(nodes, keys, vocabulary, shorter, log_probabilities, backoffs)
    # Each of the words is scored as itself, any other token as the unknown one; as blank where the model has none.
    stand_ins = torch.full((vocabulary,), special.unknown if special.unknown in words else special.blank)
    stand_ins[words] = torch.from_numpy(words.astype(np.int64))
    stand_ins[[special.blank, special.start]] = special.blank
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
        stand_ins=stand_ins.to(device),
        special=special,
    )


@dataclass(frozen=True, eq=False)
class _Level:
    """The n-grams of one order, sorted, and what only begins longer ones: that has no log probability (NaN) yet."""

    order: int
    parents: np.ndarray  # (N,) the place in the level below of an n-gram's first n - 1 tokens
    tokens: np.ndarray  # (N,) its last token
    log_probabilities: np.ndarray  # (N,)
    backoffs: np.ndarray  # (N,)

    def keys(self, begins: list[int], vocabulary: int) -> np.ndarray:
        """(N,) int64, ascending: the parent's node x V + the token; `begins` are the first nodes of all levels."""
        first = begins[self.order - 2] if self.order > 1 else ROOT
        return (self.parents.astype(np.int64) + first) * vocabulary + self.tokens


def _levels(orders: Sequence[Ngrams]) -> list[_Level]:
    """A level an order, each with every beginning of an n-gram of the one above it."""
    levels: list[_Level] = []
    prefixes = np.zeros((0, len(orders)), np.int32)  # of the level above, each once
    prefixes_above = np.zeros(0, np.int32)  # which of them each of its n-grams has
    for ngrams in reversed(orders):
        tokens = np.concatenate([ngrams.tokens, prefixes])
        missing = np.full(len(prefixes), math.nan)
        log_probabilities = np.concatenate([ngrams.log_probabilities, missing])
        # Stable: of equals, the n-gram comes before the prefix.
        ranks = np.lexsort(tokens.T[::-1])
        tokens, log_probabilities = tokens[ranks], log_probabilities[ranks]
        is_new = _is_new(tokens)
        repeated = ~is_new & ~np.isnan(log_probabilities)
        if repeated.any():
            raise RepeatedNgram(tokens[repeated.argmax()].tolist())
        if levels:
            places = np.empty(len(tokens), np.int32)
            places[ranks] = is_new.cumsum(dtype=np.int32) - 1
            levels[-1] = replace(levels[-1], parents=places[len(ngrams) :][prefixes_above])
        kept, backoffs = tokens[is_new], np.concatenate([ngrams.backoffs, np.zeros(len(prefixes))])
        is_new_prefix = _is_new(kept[:, :-1])
        prefixes, prefixes_above = kept[is_new_prefix, :-1], is_new_prefix.cumsum(dtype=np.int32) - 1
        values = kept[:, -1].copy(), log_probabilities[is_new], backoffs[ranks][is_new]
        levels.append(_Level(kept.shape[1], np.zeros(len(kept), np.int32), *values))
    return levels[::-1]


def _is_new(rows: np.ndarray) -> np.ndarray:
    """(N,) bool: whether each of the sorted rows (N, n) differs from the one before it; the first does."""
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
    """Fills in what these nodes of one level back off to, and the log probability of those that have none (NaN).

    Both follow from the levels below: the first context, ever shorter, in which the node's token is found.
    """
    edges = slice(nodes.start - 1, nodes.stop - 1)
    contexts, tokens = keys[edges] // vocabulary, keys[edges] % vocabulary
    weights, found = backoffs[contexts], torch.zeros_like(contexts)
    contexts, pending = shorter[contexts], torch.arange(len(contexts))
    while len(pending):
        places, is_there = find(keys, contexts[pending] * vocabulary + tokens[pending])
        found[pending[is_there]] = places[is_there]
        pending = pending[~is_there]
        weights[pending] += backoffs[contexts[pending]]
        contexts[pending] = shorter[contexts[pending]]
    shorter[nodes] = found + 1
    own = log_probabilities[edges]
    own.copy_(torch.where(own.isnan(), weights + log_probabilities[found], own))
