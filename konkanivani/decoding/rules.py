"""What a search may not say where a model was trained with rules: tokens never said, and times that make sense.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 4.5, and the code that came
with it: a time stands before and after each stretch of text, and no time comes before an earlier one.

B batch, K hypotheses an utterance, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from konkanivani.data.generation import GenerationRules, TimeRules
from konkanivani.decoding.scorers import FullScorer


class RuledScorer:
    """A scorer without what the rules forbid; a FullScorer. What is left is not made to add up to one again."""

    def __init__(self, scorer: FullScorer, rules: GenerationRules, end: int) -> None:
        self._scorer, self._rules, self._end = scorer, rules, end
        self._length = 0
        self._said: _Times | None = None  # known from the first scores on, which say how many hypotheses there are

    def score(self) -> torch.Tensor:
        scores = self._scorer.score()
        if self._said is None:
            self._said = _Times.none(scores)
        if self._length == self._rules.most_tokens:
            return scores  # only the end can follow, and nothing forbids it there
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
            self._said = self._said.followed(sources, tokens, self._rules.times, is_first=self._length == 1)

    def keep(self, utterances: torch.Tensor) -> None:
        self._scorer.keep(utterances)
        self._said = self._said.kept(utterances)

    def _with_times(self, scores: torch.Tensor, rules: TimeRules) -> torch.Tensor:
        said, ids = self._said, torch.arange(scores.shape[2], device=scores.device)
        is_time = ids >= rules.first
        is_pair, is_half = said.is_last & said.is_before, said.is_last & ~said.is_before
        forbidden = (
            (ids == rules.no_times) | (is_pair[:, :, None] & is_time) | (is_half[:, :, None] & (ids < self._end))
        )
        # Behind a text its time may be said again, to begin the next one; otherwise a time is later than the last.
        lowest = torch.where(is_half, said.latest, said.latest + 1)
        forbidden |= is_time & (ids < lowest[:, :, None])
        if self._length == 0:
            forbidden |= ~is_time
            if rules.latest_first is not None:
                forbidden |= ids > rules.first + rules.latest_first
        return _times_where_likelier(scores.masked_fill(forbidden, -math.inf), rules.first)


def _times_where_likelier(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Scores (B, K, V) without what is no time, where all times together are likelier than any other token."""
    times, others = scores[:, :, first:].logsumexp(dim=2), scores[:, :, :first].amax(dim=2)
    scores[:, :, :first].masked_fill_((times > others)[:, :, None], -math.inf)
    return scores


@dataclass(frozen=True)
class _Times:
    """Which hypotheses (B, K) ended in a time, in two, and the latest that each has said: an id, -1 for none."""

    is_last: torch.Tensor
    is_before: torch.Tensor  # also where there is one token only
    latest: torch.Tensor

    @classmethod
    def none(cls, scores: torch.Tensor) -> "_Times":
        shape, device = scores.shape[:2], scores.device
        is_last = torch.zeros(shape, dtype=torch.bool, device=device)
        return cls(is_last, ~is_last, torch.full(shape, -1, device=device))

    def followed(self, sources: torch.Tensor, tokens: torch.Tensor, rules: TimeRules, is_first: bool) -> "_Times":
        is_before, latest = self.is_last.gather(1, sources), self.latest.gather(1, sources)
        is_time = tokens >= rules.first
        return _Times(is_time, is_before | is_first, torch.where(is_time, tokens, latest))

    def kept(self, utterances: torch.Tensor) -> "_Times":
        return _Times(self.is_last[utterances], self.is_before[utterances], self.latest[utterances])
