"""Language model scores for CTC prefix beam search: shallow fusion (Hannun et al., 2014).

A transcript has the score log P_CTC + weight x log P_language model + bonus x tokens, where P_language model includes
the end of the sentence. An unfinished prefix is scored without that end.

B batch, K prefixes per utterance (the beam), V vocabulary, C tokens tried in a frame, R rows.
"""

import math
from dataclasses import dataclass

import torch

from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.language_model import LanguageModel


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
        states, scores, ends = (each.gather(1, sources) for each in (self.states, self.scores, self.ends))
        gains = following.gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]  # -1: not extended
        scores = torch.where(is_longer, scores + gains, scores)
        states[is_longer] = self.fusion.language_model.advance(states[is_longer], tokens[is_longer])
        following[is_longer], ends[is_longer] = self.fusion.following(states[is_longer])
        return FusionScores(self.fusion, states, scores, following, ends)
