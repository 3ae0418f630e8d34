"""Language model scores of the prefixes of a CTC prefix beam: shallow fusion (Hannun et al., 2014).

A transcript has the score log P_CTC + weight x log P_language model + bonus x tokens, the end of the sentence being
part of what the language model says. An unfinished prefix has it without that end.

B batch, K prefixes an utterance (the beam), V vocabulary, C tokens tried in a frame, R rows.
"""

import math
from dataclasses import dataclass

import torch

from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.language_model import LanguageModel


@dataclass(frozen=True)
class Fusion:
    """A language model, what its log probabilities are multiplied by, and what is added for each token."""

    language_model: LanguageModel
    weight: float
    length_bonus: float = 0.0
    special: SpecialTokens = OUR_TOKENS

    def begin(self, batch: int, beam: int) -> "FusionScores":
        """The scores of empty prefixes."""
        states = self.language_model.initial(batch * beam)
        following, ends = self.following(states)
        scores = ends.new_zeros(batch, beam)
        return FusionScores(self, states.view_as(scores), scores, following.view(batch, beam, -1), ends.view_as(scores))

    def following(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token (R, V), and what the end of the sentence (R,), adds after each state (R,)."""
        scores = self.language_model.score(states)
        scores = self.weight * scores if self.weight else torch.zeros_like(scores)
        # The start and the end of a sentence are no tokens that CTC may spell.
        special = torch.tensor([self.special.start, self.special.end], device=scores.device)
        return (scores + self.length_bonus).index_fill(1, special, -math.inf), scores[:, self.special.end]


@dataclass(frozen=True)
class FusionScores:
    """Scores of the prefixes of a beam, and what each token more, or the end of the transcript, adds to them."""

    fusion: Fusion
    states: torch.Tensor  # (B, K), the language model's
    scores: torch.Tensor  # (B, K)
    following: torch.Tensor  # (B, K, V)
    ends: torch.Tensor  # (B, K)

    @property
    def ended(self) -> torch.Tensor:
        """(B, K): the scores of the prefixes as whole transcripts."""
        return self.scores + self.ends

    def of(self, tried: torch.Tensor) -> torch.Tensor:
        """(B, K, 1 + C): the scores of the prefixes as they are, and with each of the tried tokens (B, C) more."""
        gains = self.following.gather(2, tried[:, None].expand(-1, self.scores.shape[1], -1))
        return torch.cat([self.scores[:, :, None], self.scores[:, :, None] + gains], dim=2)

    def follow(self, sources: torch.Tensor, is_longer: torch.Tensor, tokens: torch.Tensor) -> "FusionScores":
        """The scores of prefixes `sources` (B, K), where `is_longer` (B, K) with a token (B, K) more."""
        following = self.following.gather(1, sources[:, :, None].expand_as(self.following))
        states, scores, ends = (each.gather(1, sources) for each in (self.states, self.scores, self.ends))
        gains = following.gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]
        scores = torch.where(is_longer, scores + gains, scores)
        states[is_longer] = self.fusion.language_model.advance(states[is_longer], tokens[is_longer])
        following[is_longer], ends[is_longer] = self.fusion.following(states[is_longer])
        return FusionScores(self.fusion, states, scores, following, ends)
