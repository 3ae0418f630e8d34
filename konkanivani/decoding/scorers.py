"""Scores of the hypotheses of a search: by the attention decoder, by CTC, by a language model.

A scorer lives as long as one search and is changed by it: `score` says how likely every hypothesis is with one token
more, `follow` goes on with those that the search has chosen, `keep` with the utterances that are not done. Scores are
float64 log probabilities in nats of whole hypotheses.

B batch, K hypotheses an utterance, C candidates of a hypothesis, V vocabulary, T' encoder frames, D model width.
"""

import math
from typing import Protocol

import torch

from konkanivani.base.lengths import Lengths
from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.language_model import LanguageModel
from konkanivani.decoding.prefix_scorer import CTCPrefixScorer
from konkanivani.model.asr import KonkaniVaniASR


class FullScorer(Protocol):
    """Scores every token; its end token stands for the end of a hypothesis."""

    def score(self) -> torch.Tensor:
        """(B, K, V): each hypothesis with each token more; what is `never_generated` gets -inf."""

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        """Hypothesis k is from now on what was sources[k], with tokens[k] more; both (B, K)."""

    def keep(self, utterances: torch.Tensor) -> None:
        """Only the utterances at these places (B',) go on."""


class AttentionScorer:
    """The attention decoder, one token at a time, on what its cache keeps of those before.

    Behind the start token it is given the `prompt`, of which no score is asked.
    """

    def __init__(
        self,
        model: KonkaniVaniASR,
        encoded: torch.Tensor,
        encoded_lengths: Lengths,
        beam: int,
        special: SpecialTokens = OUR_TOKENS,
        prompt: tuple[int, ...] = (),
    ) -> None:
        self._decoder, self._special = model.decoder, special
        self._cache = model.decoder.begin(encoded, encoded_lengths, beam)
        self._last = torch.full((len(encoded), beam), special.start, device=encoded.device)
        for token in prompt:
            self._decoder.step(self._last, self._cache)
            self._last = torch.full_like(self._last, token)
        self._totals = torch.zeros(self._last.shape, dtype=torch.float64, device=encoded.device)
        self._scores = self._totals

    def score(self) -> torch.Tensor:
        logits = self._decoder.output(self._decoder.step(self._last, self._cache)).double()
        # As in training, blank and the start token have a share of the probability, though neither can follow.
        self._scores = self._totals[:, :, None] + logits.log_softmax(dim=-1)
        return without(self._scores, *self._special.never_generated)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._totals, self._last = gather_scores(self._scores, sources, tokens), tokens
        self._cache.reorder(sources)

    def keep(self, utterances: torch.Tensor) -> None:
        self._totals, self._last = self._totals[utterances], self._last[utterances]
        self._cache.select(utterances)


class LanguageModelScorer:
    """A language model of tokens; a hypothesis's context is all that it knows."""

    def __init__(
        self,
        model: LanguageModel,
        utterances: int,
        beam: int,
        device: torch.device,
        special: SpecialTokens = OUR_TOKENS,
    ) -> None:
        self._model, self._special = model, special
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
        self._totals, self._contexts = self._totals[utterances], self._contexts[utterances]


class CTCScorer:
    """CTC's prefix scores, of given candidates only: they cost a pass over all frames each."""

    def __init__(
        self,
        model: KonkaniVaniASR,
        encoded: torch.Tensor,
        encoded_lengths: Lengths,
        beam: int,
        special: SpecialTokens = OUR_TOKENS,
    ) -> None:
        self._end = special.end
        log_probabilities = model.ctc_head(encoded).float().log_softmax(dim=-1)
        self._scorer = CTCPrefixScorer(log_probabilities, encoded_lengths)
        self._state = self._scorer.initial(beam)

    def score(self, candidates: torch.Tensor) -> torch.Tensor:
        """(B, K, C): each hypothesis with each of its candidates (B, K, C) more, or ended."""
        scores = self._scorer.score(self._state, candidates)
        return torch.where(candidates == self._end, self._scorer.end(self._state)[:, :, None], scores)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._state = self._scorer.select(self._state, sources, tokens)

    def keep(self, utterances: torch.Tensor) -> None:
        self._scorer, self._state = self._scorer.keep(self._state, utterances)


def without(scores: torch.Tensor, *tokens: int) -> torch.Tensor:
    """A copy of scores (B, K, V) in which these tokens have no probability."""
    return scores.index_fill(2, torch.tensor(tokens, dtype=torch.int64, device=scores.device), -math.inf)


def gather_scores(scores: torch.Tensor, sources: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, K): of scores (B, K', V), those of hypotheses `sources` and tokens `tokens`, both (B, K)."""
    return scores.flatten(1).gather(1, sources * scores.shape[2] + tokens)
