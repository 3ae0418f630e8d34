"""Scorers of a search's hypotheses: attention decoder, CTC and language model.

A scorer serves one search and changes with it: `score` returns the scores of every hypothesis extended by one token,
`follow` continues with the hypotheses that the search has chosen, `keep` with the utterances that are not finished.
Scores are float64 log probabilities in nats of whole hypotheses.

B batch, K hypotheses per utterance, C candidates of a hypothesis, V vocabulary, T' encoder frames, D model width.
"""

import math
from typing import Protocol

import torch

from konkanivani.base.lengths import Lengths
from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.language_model import LanguageModel
from konkanivani.decoding.network import Network, ctc_head_of, decoder_of
from konkanivani.decoding.prefix_scorer import CTCPrefixScorer


class FullScorer(Protocol):
    """Scorer of every token of the vocabulary; its end token stands for the end of a hypothesis."""

    def score(self) -> torch.Tensor:
        """Return scores (B, K, V) of each hypothesis plus each token; `never_generated` tokens get -inf."""

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        """Replace hypothesis k by the former hypothesis sources[k] plus tokens[k]; both (B, K)."""

    def keep(self, utterances: torch.Tensor) -> None:
        """Continue with the utterances with these indices (B',) only."""


class AttentionScorer:
    """Attention decoder as a scorer, one token at a time with a key-value cache.

    After the start token the decoder reads `prompt`, whose tokens are not scored.
    """

    def __init__(
        self,
        model: Network,
        encoded: torch.Tensor,
        encoded_lengths: Lengths,
        beam: int,
        special: SpecialTokens = OUR_TOKENS,
        prompt: tuple[int, ...] = (),
    ) -> None:
        self._decoder = decoder_of(model)
        self._special = special
        self._cache = self._decoder.begin(encoded, encoded_lengths, beam)
        self._last = torch.full((len(encoded), beam), special.start, device=encoded.device)
        # The last prompt token stays in `_last`: the first `score` decodes it.
        for token in prompt:
            self._decoder.step(self._last, self._cache)
            self._last = torch.full_like(self._last, token)
        self._totals = torch.zeros(self._last.shape, dtype=torch.float64, device=encoded.device)
        self._scores = self._totals

    def score(self) -> torch.Tensor:
        # In double precision, since totals of long hypotheses are compared with each other.
        logits = self._decoder.output(self._decoder.step(self._last, self._cache)).double()
        # As in training, blank and the start token keep their share of the probability, though neither can follow.
        self._scores = self._totals[:, :, None] + logits.log_softmax(dim=-1)
        return without(self._scores, *self._special.never_generated)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._totals = gather_scores(self._scores, sources, tokens)
        self._last = tokens
        self._cache.reorder(sources)

    def keep(self, utterances: torch.Tensor) -> None:
        self._totals = self._totals[utterances]
        self._last = self._last[utterances]
        self._cache.select(utterances)


class LanguageModelScorer:
    """Language model of tokens as a scorer; a hypothesis' state is its context."""

    def __init__(
        self,
        model: LanguageModel,
        utterances: int,
        beam: int,
        device: torch.device,
        special: SpecialTokens = OUR_TOKENS,
    ) -> None:
        self._model = model
        self._special = special
        # The model may be on another device than the search.
        self._contexts = model.initial(utterances * beam).to(device).view(utterances, beam)
        self._totals = torch.zeros(self._contexts.shape, dtype=torch.float64, device=device)
        self._scores = self._totals

    def score(self) -> torch.Tensor:
        following = self._model.score(self._contexts.flatten()).to(self._totals.device)
        self._scores = self._totals[:, :, None] + following.view(*self._totals.shape, -1)
        return without(self._scores, *self._special.never_generated)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._totals = gather_scores(self._scores, sources, tokens)
        contexts = self._contexts.gather(1, sources)
        self._contexts = self._model.advance(contexts.flatten(), tokens.flatten()).view_as(contexts)

    def keep(self, utterances: torch.Tensor) -> None:
        self._totals = self._totals[utterances]
        self._contexts = self._contexts[utterances]


class CTCScorer:
    """CTC prefix scores of given candidates only, since each costs a pass over all frames."""

    def __init__(
        self,
        model: Network,
        encoded: torch.Tensor,
        encoded_lengths: Lengths,
        beam: int,
        special: SpecialTokens = OUR_TOKENS,
    ) -> None:
        self._end = special.end
        log_probabilities = ctc_head_of(model)(encoded).float().log_softmax(dim=-1)
        self._scorer = CTCPrefixScorer(log_probabilities, encoded_lengths)
        self._state = self._scorer.initial(beam)

    def score(self, candidates: torch.Tensor) -> torch.Tensor:
        """Return scores (B, K, C) of each hypothesis plus each of its candidates (B, K, C), or ended."""
        scores = self._scorer.score(self._state, candidates)
        return torch.where(candidates == self._end, self._scorer.end(self._state)[:, :, None], scores)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._state = self._scorer.select(self._state, sources, tokens)

    def keep(self, utterances: torch.Tensor) -> None:
        self._scorer, self._state = self._scorer.keep(self._state, utterances)


def without(scores: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Return a copy of scores (B, K, V) in which these tokens have probability zero."""
    return scores.index_fill(2, torch.tensor(tokens, dtype=torch.int64, device=scores.device), -math.inf)


def gather_scores(scores: torch.Tensor, sources: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Select from scores (B, K', V) of hypotheses `sources` plus `tokens`, both (B, K): (B, K)."""
    return scores.flatten(1).gather(1, sources * scores.shape[2] + tokens)
