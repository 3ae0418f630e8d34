"""Generation rules of a model trained with timestamps: tokens that are never generated, and consistent timestamps.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 4.5, and the published code:
a timestamp precedes and follows each segment of text, and timestamps never decrease.

B batch, K hypotheses per utterance, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from konkanivani.data.generation import GenerationRules, TimeRules
from konkanivani.decoding.scorers import FullScorer


class RuledScorer:
    """Scorer that gives -inf to tokens that the rules forbid (a FullScorer); the rest is not renormalised."""

    def __init__(self, scorer: FullScorer, rules: GenerationRules, end: int) -> None:
        self._scorer = scorer
        self._rules = rules
        self._end = end
        self._length = 0
        self._said: _Times | None = None  # set by the first `score`, which determines the number of hypotheses

    def _history(self) -> "_Times":
        """Return the timestamps of the hypotheses so far; a RuntimeError before the first `score`."""
        if self._said is None:
            raise RuntimeError("The first `score` must come before `follow` and `keep`.")
        return self._said

    def score(self) -> torch.Tensor:
        scores = self._scorer.score()
        if self._said is None:
            self._said = _Times.none(scores)
        if self._length == self._rules.most_tokens:
            return scores  # only the end token can follow here, and no rule forbids it
        forbidden = torch.zeros(scores.shape[2], dtype=torch.bool, device=scores.device)
        forbidden[list(self._rules.suppressed)] = True
        if self._length == 0:
            forbidden[list(self._rules.suppressed_first)] = True
        scores = scores.masked_fill(forbidden, -math.inf)
        return scores if self._rules.times is None else self._with_times(scores, self._rules.times)

    def follow(self, sources: torch.Tensor, tokens: torch.Tensor) -> None:
        self._scorer.follow(sources, tokens)
        self._length += 1
        if self._rules.times is not None:
            self._said = self._history().followed(sources, tokens, self._rules.times, is_first=self._length == 1)

    def keep(self, utterances: torch.Tensor) -> None:
        self._scorer.keep(utterances)
        self._said = self._history().kept(utterances)

    def _with_times(self, scores: torch.Tensor, rules: TimeRules) -> torch.Tensor:
        said = self._history()
        ids = torch.arange(scores.shape[2], device=scores.device)
        is_time = ids >= rules.first
        is_pair = said.is_last & said.is_before
        is_half = said.is_last & ~said.is_before
        forbidden = (
            # Two timestamps must be followed by text; a single one after text by its pair or the end token.
            (ids == rules.no_times) | (is_pair[:, :, None] & is_time) | (is_half[:, :, None] & (ids < self._end))
        )
        # After text, its end timestamp may be repeated as the next segment's start; others must increase.
        lowest = torch.where(is_half, said.latest, said.latest + 1)
        forbidden |= is_time & (ids < lowest[:, :, None])
        if self._length == 0:
            forbidden |= ~is_time
            if rules.latest_first is not None:
                forbidden |= ids > rules.first + rules.latest_first
        return _times_where_likelier(scores.masked_fill(forbidden, -math.inf), rules.first)


def _times_where_likelier(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Mask non-timestamps in scores (B, K, V) if all timestamps together are likelier than any other token."""
    times = scores[:, :, first:].logsumexp(dim=2)
    others = scores[:, :, :first].amax(dim=2)
    scores[:, :, :first].masked_fill_((times > others)[:, :, None], -math.inf)
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
