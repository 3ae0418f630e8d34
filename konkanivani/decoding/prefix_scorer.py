"""CTC prefix scores for an attention decoder's hypotheses: the probability that a transcript starts with them.

Watanabe et al. (2017), Hybrid CTC/Attention Architecture for End-to-End Speech Recognition, algorithm 2. A hypothesis
has two forward variables per frame: the probability of all alignments of the frames so far that spell it and end in
blank, and of those that end in its last token. The prefix probability needs no variables of its own: an alignment of a
longer transcript starts the last token exactly once, in some frame, after an alignment of the tokens before.

Forward variables are float64: a path's log probability is about -10^5 after ten minutes, where float32 has steps of
0.008.

B batch, T' encoder frames, V vocabulary, K hypotheses per utterance (the beam), C candidates of a hypothesis.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import Lengths
from konkanivani.decoding.ctc import mask_padding_as_blank
from konkanivani.model.losses import BLANK

# Frames scored at once: B x K x 32 x C numbers exist at a time, not B x K x T' x C.
FRAMES_AT_ONCE = 32


@dataclass(frozen=True)
class PrefixState:
    """Forward variables of K hypotheses per utterance, before the first frame and after each frame."""

    in_blank: torch.Tensor  # (B, K, T' + 1), log probability of the alignments that end in blank
    in_token: torch.Tensor  # (B, K, T' + 1), log probability of the alignments that end in the last token
    last: torch.Tensor  # (B, K), the last token; BLANK of an empty hypothesis

    @property
    def log_probabilities(self) -> torch.Tensor:
        return torch.logaddexp(self.in_blank, self.in_token)


class CTCPrefixScorer:
    """Scorer of hypotheses under the CTC log probabilities (B, T', V) of a batch of utterances.

    Start from `initial`; a step is `score` (and `end`), the search's choice, and `select`. States are immutable and the
    scorer does not change. CTC has no end token: if a search ends a hypothesis, its score is `end`.
    """

    def __init__(self, log_probabilities: torch.Tensor, encoded_lengths: Lengths) -> None:
        self._frames = mask_padding_as_blank(log_probabilities.detach(), encoded_lengths)

    @torch.no_grad()
    def initial(self, beam: int = 1) -> PrefixState:
        """Return the state of `beam` empty hypotheses per utterance."""
        blanks = self._frames[:, :, BLANK].double().cumsum(dim=1)
        in_blank = torch.cat([blanks.new_zeros(len(blanks), 1), blanks], dim=1)[:, None].repeat(1, beam, 1)
        last = torch.full(in_blank.shape[:2], BLANK, device=blanks.device)
        return PrefixState(in_blank, torch.full_like(in_blank, -math.inf), last)

    @torch.no_grad()
    def score(self, state: PrefixState, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """Return log probabilities (B, K, C), float64, that a transcript starts with a hypothesis plus a candidate.

        Candidates are token ids (B, K, C), or None for all V. Blank gets -inf, as do hypotheses with no frames left.
        """
        after_any = state.log_probabilities[:, :, :-1]
        after_blank = state.in_blank[:, :, :-1]
        scores = self._begun(after_any, candidates)
        if candidates is None:
            candidates = torch.arange(self._frames.shape[2], device=scores.device).expand_as(scores)
        # A repeated token must follow a blank, or CTC merges it with the previous one.
        repeated = self._begun(after_blank, state.last[:, :, None])
        scores = torch.where(candidates == state.last[:, :, None], repeated, scores)
        return scores.masked_fill(candidates == BLANK, -math.inf)

    @torch.no_grad()
    def end(self, state: PrefixState) -> torch.Tensor:
        """Return log probabilities (B, K), float64, that a hypothesis is the complete transcript."""
        return state.log_probabilities[:, :, -1]

    @torch.no_grad()
    def select(self, state: PrefixState, sources: torch.Tensor, tokens: torch.Tensor) -> PrefixState:
        """Return the state of hypotheses `sources` (B, K') of `state`, each extended by its token (B, K').

        K' may differ from K. Tokens must not be blank.
        """
        places = sources[:, :, None].expand(-1, -1, state.in_blank.shape[2])
        before_blank = state.in_blank.gather(1, places)
        before_token = state.in_token.gather(1, places)
        is_repeated = (tokens == state.last.gather(1, sources))[:, :, None]
        begins = torch.where(is_repeated, before_blank, torch.logaddexp(before_blank, before_token))
        columns = tokens[:, None].expand(-1, self._frames.shape[1], -1)
        of_tokens = self._frames.gather(2, columns).double().transpose(1, 2)  # (B, K', T')
        of_blank = self._frames[:, None, :, BLANK].double().expand_as(of_tokens)
        in_token = _reached(of_tokens, begins[:, :, :-1])
        in_blank = _reached(of_blank, in_token[:, :, :-1])
        return PrefixState(in_blank, in_token, tokens)

    def keep(self, state: PrefixState, utterances: torch.Tensor) -> tuple["CTCPrefixScorer", PrefixState]:
        """Return the scorer and the state of the utterances with these indices (B',) only."""
        kept = PrefixState(state.in_blank[utterances], state.in_token[utterances], state.last[utterances])
        return CTCPrefixScorer(self._frames[utterances], (self._frames.shape[1],) * len(utterances)), kept

    def _begun(self, after: torch.Tensor, candidates: torch.Tensor | None) -> torch.Tensor:
        """Return log probabilities (B, K, C) that a candidate starts in some frame, after an alignment ended before it.

        `after` (B, K, T') is the log probability of the alignments that end before each frame.
        """
        columns = self._frames.shape[2] if candidates is None else candidates.shape[2]
        scores = after.new_full((*after.shape[:2], columns), -math.inf)
        chunks = zip(self._frames.split(FRAMES_AT_ONCE, 1), after.split(FRAMES_AT_ONCE, 2), strict=True)
        for frames, ended in chunks:
            emissions = frames[:, None].double()  # (B, 1, frames, V)
            if candidates is not None:
                size = (-1, -1, frames.shape[1], -1)
                emissions = emissions.expand(-1, after.shape[1], -1, -1).gather(3, candidates[:, :, None].expand(size))
            # One logsumexp per chunk of frames, added to the sum of the earlier chunks.
            scores = torch.logaddexp(scores, (ended[:, :, :, None] + emissions).logsumexp(dim=2))
        return scores


# Replaces log(0) in sums, where -inf - -inf would be NaN; results below half of it are log(0) again.
ALMOST_MINUS_INFINITY = -1e6


def _reached(emissions: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    """Solve x[0] = 0, x[t + 1] = (x[t] + arriving[t]) emissions[t] for x (B, K, T' + 1), in log space."""
    # In closed form, without a loop over frames: with E[t] the product of the emissions before t, x[t] / E[t] is the
    # sum of arriving[s] / E[s] over all s < t.
    products = F.pad(emissions.clamp(min=ALMOST_MINUS_INFINITY).cumsum(dim=2), (1, 0))
    sums = (arriving - products[:, :, :-1]).logcumsumexp(dim=2) + products[:, :, 1:]
    sums = sums.masked_fill((sums < ALMOST_MINUS_INFINITY / 2) | (emissions == -math.inf), -math.inf)
    return F.pad(sums, (1, 0), value=-math.inf)
