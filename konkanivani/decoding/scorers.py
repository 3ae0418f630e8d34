"""Scorers of a beam search: attention decoder, CTC prefixes, language model.

A scorer serves one search and changes with it: `score` returns the scores of every hypothesis extended by one token,
`follow` continues with the hypotheses that the search has chosen, `keep` with the utterances that are not finished.
Scores are float64 log probabilities in nats of whole hypotheses.

Watanabe et al. (2017), Hybrid CTC/Attention Architecture for End-to-End Speech Recognition, algorithm 2.

B batch, K hypotheses per utterance (the beam), C candidates of a hypothesis, V vocabulary, T' encoder frames, D model
width.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.ctc import Network, ctc_head_of, decoder_of, mask_padding_as_blank
from konkanivani.decoding.language_model import LanguageModel
from konkanivani.lengths import Lengths
from konkanivani.models.asr import BLANK

# --------------------
# CTC prefix scores for an attention decoder's hypotheses: the probability that a transcript starts with them.
#
# A hypothesis has two forward variables per frame: the probability of all alignments of the frames so far that spell it
# and end in blank, and of those that end in its last token. The prefix probability needs no variables of its own: an
# alignment of a longer transcript starts the last token exactly once, in some frame, after an alignment of the tokens
# before. Forward variables are float64: a path's log probability is about -10^5 after ten minutes, where float32 has
# steps of 0.008.


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
        scores = self._log_starts(after_any, candidates)
        if candidates is None:
            candidates = torch.arange(self._frames.shape[2], device=scores.device).expand_as(scores)
        # A repeated token must follow a blank, or CTC merges it with the previous one.
        repeated = self._log_starts(after_blank, state.last[:, :, None])
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
        in_token = _solve_recursion(of_tokens, begins[:, :, :-1])
        in_blank = _solve_recursion(of_blank, in_token[:, :, :-1])
        return PrefixState(in_blank, in_token, tokens)

    def keep(self, state: PrefixState, utterances: torch.Tensor) -> tuple["CTCPrefixScorer", PrefixState]:
        """Return the scorer and the state of the utterances with these indices (B',) only."""
        kept_state = PrefixState(state.in_blank[utterances], state.in_token[utterances], state.last[utterances])
        return CTCPrefixScorer(self._frames[utterances], (self._frames.shape[1],) * len(utterances)), kept_state

    def _log_starts(self, after: torch.Tensor, candidates: torch.Tensor | None) -> torch.Tensor:
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


def _solve_recursion(emissions: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    """Solve x[0] = 0, x[t + 1] = (x[t] + arriving[t]) emissions[t] for x (B, K, T' + 1), in log space."""
    # In closed form, without a loop over frames: with E[t] the product of the emissions before t, x[t] / E[t] is the
    # sum of arriving[s] / E[s] over all s < t.
    products = F.pad(emissions.clamp(min=ALMOST_MINUS_INFINITY).cumsum(dim=2), (1, 0))
    sums = (arriving - products[:, :, :-1]).logcumsumexp(dim=2) + products[:, :, 1:]
    sums = sums.masked_fill((sums < ALMOST_MINUS_INFINITY / 2) | (emissions == -math.inf), -math.inf)
    return F.pad(sums, (1, 0), value=-math.inf)


# --------------------
# Scorers of a search's hypotheses: attention decoder, CTC and language model.


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
