"""Decoding with temperature fallback: hypotheses that loop or are unlikely are sampled again, silence is left empty.

Radford et al. (2023), Robust Speech Recognition via Large-Scale Weak Supervision, section 4.5: a text with a high
compression ratio repeats itself, and one with a low probability is unreliable. Both are sampled again at increasing
temperatures.

B unfinished utterances, V vocabulary, D model dimension, T' encoder frames.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from konkanivani.decoding.ctc import Hypothesis, Network
from konkanivani.decoding.decode import BeamDecode, count_repeated, is_endless
from konkanivani.decoding.scorers import AttentionScorer, FullScorer
from konkanivani.lengths import Lengths
from konkanivani.models.whisper.vocabulary import PromptedVocabulary
from konkanivani.randomness import derive_seed

LOOP_COPIES = 4
"""Minimum number of copies of a token sequence at the end of a hypothesis to count as a loop."""

Choose = Callable[[int, list[int], torch.Tensor], torch.Tensor]
"""Selector of tokens: step number, unfinished utterances, log probabilities (B, V) -> next tokens (B,)."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens of a hypothesis and their mean log probability in nats, as computed in `generate`."""

    tokens: list[int]
    mean_log_probability: float


@dataclass(frozen=True)
class FallbackDecode:
    """`Decode` that samples hypotheses of `inner` again if they fail the checks of section 4.5.

    A hypothesis fails if zlib compresses its text by more than `max_compression`, or if its mean log probability is
    below `min_log_probability`. In the latter case it is left empty if the probability of "no speech" exceeds
    `max_no_speech`. The first hypothesis that passes is used, else the last one. Samples depend only on the utterance
    and the seed.

    If the last hypothesis still fails the compression check and has no end token, as with fine-tuned models in the
    silence after speech, its final repetition is removed and the text before it is kept.
    """

    inner: BeamDecode
    vocabulary: PromptedVocabulary
    max_compression: float = 2.4
    min_log_probability: float = -1.0
    max_no_speech: float = 0.6
    temperatures: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    seed: int = 0

    @torch.no_grad()
    def __call__(self, model: Network, encoded: torch.Tensor, encoded_lengths: Lengths) -> list[list[int]]:
        speech = _EncodedSpeech(model, encoded, encoded_lengths)
        first = self.inner.search(model, encoded, encoded_lengths, best=1)
        outputs = [list(hypotheses[0].tokens) if hypotheses else [] for hypotheses in first]
        # Skip the scoring pass for hypotheses that certainly pass.
        bad = [row for row, hypotheses in enumerate(first) if not self._passes_without_rescoring(hypotheses)]
        no_speech = self._find_silent(speech, bad)
        # The first pass scores the hypotheses of `inner`, the others sample.
        for choose in (_replay(outputs, self.inner.special.end), *map(self._sampler, self.temperatures)):
            decoded = self._decode_rows(speech, bad, choose)
            # As in section 4.5, "no speech" alone is not reliable: the text must be unlikely too.
            silent = {row for row in no_speech & decoded.keys() if not self._is_likely(decoded[row])}
            for row in bad:
                outputs[row] = [] if row in silent else decoded[row].tokens
            bad = [row for row in bad if row not in silent and not self._is_good(decoded[row])]
        limits = self.inner.limits(model, encoded_lengths)
        for row in bad:
            # A chant or a list may repeat itself. If the hypothesis ends by itself, it is kept.
            is_cut = len(outputs[row]) >= limits[row] or self._is_ended_loop(outputs[row])
            if is_cut and not self._is_readable(outputs[row]):
                outputs[row] = without_final_loop(outputs[row], self.vocabulary)
        return outputs

    def _is_good(self, decoded: ScoredTokens) -> bool:
        return self._is_readable(decoded.tokens) and self._is_likely(decoded)

    def _is_readable(self, tokens: list[int]) -> bool:
        return compression_ratio(self.vocabulary.decode(tokens).encode()) <= self.max_compression

    def _is_ended_loop(self, tokens: list[int]) -> bool:
        text = [token for token in tokens if self.vocabulary.seconds_of(token) is None]
        return self.inner.rules.ends_loops and is_endless(text)

    def _is_likely(self, decoded: ScoredTokens) -> bool:
        return decoded.mean_log_probability >= self.min_log_probability

    def _passes_without_rescoring(self, hypotheses: tuple[Hypothesis, ...]) -> bool:
        """Return whether the scores of the decoder search already show that a hypothesis passes, without rescoring."""
        # Scores with CTC or a language model are not decoder probabilities.
        if not hypotheses or self.inner.ctc_weight or self.inner.language_model is not None:
            return False
        # The search normalises over all tokens, not only over allowed ones, so its probabilities are lower bounds.
        tokens = list(hypotheses[0].tokens)
        total = hypotheses[0].log_probability - self.inner.length_bonus * len(tokens)
        return self._is_good(ScoredTokens(tokens, total / (len(tokens) + 1)))

    def _find_silent(self, speech: "_EncodedSpeech", rows: list[int]) -> set[int]:
        """Return the utterances with a high probability of "no speech", predicted right after the start token."""
        silent = set()
        token = self.vocabulary.no_speech
        # The prompt is left out: the distribution after the start token alone contains "no speech".
        for part in speech.parts(rows) if token is not None else ():
            scores = AttentionScorer(speech.model, *speech.part(part), 1, self.inner.special).score()
            is_above = (scores[:, 0, token].exp() > self.max_no_speech).tolist()
            silent |= set(itertools.compress(part, is_above))
        return silent

    def _decode_rows(self, speech: "_EncodedSpeech", rows: list[int], choose: Choose) -> dict[int, ScoredTokens]:
        """Return the hypotheses of `rows` with tokens selected by `choose`."""
        decoded: dict[int, ScoredTokens] = {}
        for part in speech.parts(rows):
            scorer = self.inner.attention(speech.model, *speech.part(part), 1)
            limits = self.inner.limits(speech.model, tuple(speech.lengths[row] for row in part))
            decoded |= generate(scorer, choose, dict(zip(part, limits, strict=True)), self.inner.special.end)
        return decoded

    def _sampler(self, temperature: float) -> Choose:
        """Return a sampler of tokens with probabilities to the power of 1 / `temperature`, renormalised.

        The argmax of scaled log probabilities plus Gumbel noise is such a sample.
        """
        generator = torch.Generator()

        def choose(step: int, _rows: list[int], log_probabilities: torch.Tensor) -> torch.Tensor:
            # Equal noise for all utterances in a step: a sample does not depend on the batch that its utterance is in.
            generator.manual_seed(derive_seed(self.seed, "temperature", str(temperature), step))
            # -log of an exponential variable is Gumbel-distributed. Sampled on the CPU, in float64, to be equal on all
            # devices.
            waited = torch.empty(log_probabilities.shape[1], dtype=torch.float64).exponential_(generator=generator)
            noise = waited.log_().neg_().to(log_probabilities.device)
            return (log_probabilities / temperature + noise).argmax(dim=1)

        return choose


@dataclass(frozen=True)
class _EncodedSpeech:
    """Batch of encoded utterances (B, T', D) with the model; a subset of it can be decoded again."""

    model: Network
    encoded: torch.Tensor
    lengths: Lengths

    def parts(self, rows: list[int]) -> Iterator[list[int]]:
        """Yield all rows at once if they are the whole batch, else in parts of half the batch size."""
        # Indexing copies the encoded frames. Half of the batch keeps the peak memory below that in the first pass.
        size = len(self.encoded)
        size = size if len(rows) == size else max(1, size // 2)
        yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def part(self, rows: list[int]) -> tuple[torch.Tensor, Lengths]:
        """Return encoded utterances (B', T', D) and their lengths."""
        is_entire_batch = len(rows) == len(self.encoded)
        return self.encoded if is_entire_batch else self.encoded[rows], tuple(self.lengths[row] for row in rows)


def compression_ratio(text: bytes) -> float:
    """Return the ratio of uncompressed to zlib-compressed size."""
    return len(text) / len(zlib.compress(text))


def without_final_loop(tokens: list[int], vocabulary: PromptedVocabulary) -> list[int]:
    """Return the tokens up to the first copy of a sequence that is repeated to the end, at least `LOOP_COPIES` times.

    Without such a sequence all tokens are returned. The timestamp after the first copy is kept.
    """
    # Timestamps rise from copy to copy, so only text tokens are compared.
    places = [index for index, token in enumerate(tokens) if vocabulary.seconds_of(token) is None]
    text = [tokens[index] for index in places]
    removed = count_repeated(text, LOOP_COPIES)
    if not removed:
        return tokens
    first_removed = places[len(text) - removed]
    last_kept = places[len(text) - removed - 1] if removed < len(text) else -1
    # Of two times between copies, the first is the end of the kept copy.
    return tokens[: min(last_kept + 2, first_removed)]


def generate(scorer: FullScorer, choose: Choose, limits: dict[int, int], end: int) -> dict[int, ScoredTokens]:
    """Return hypotheses with each next token selected by `choose`, at most limits[utterance] tokens of each utterance.

    The mean log probability is over all tokens and the end token, as in the code of Radford et al.: at temperature 1,
    renormalised over the tokens that the rules allow. At its limit a hypothesis is forced to end, with probability 1.
    """
    rows = list(limits)
    step = 0
    tokens: dict[int, list[int]] = {row: [] for row in limits}
    totals = dict.fromkeys(limits, 0.0)
    while rows:
        log_probabilities = _mask_forbidden(scorer.score()[:, 0], [limits[row] <= step for row in rows], end)
        chosen = choose(step, rows, log_probabilities)
        chosen = chosen.masked_fill(log_probabilities[:, end].isnan(), end)  # NaN: the model is broken, so end here
        gained = log_probabilities.gather(1, chosen[:, None])[:, 0].tolist()
        for row, token, gain in zip(rows, chosen.tolist(), gained, strict=True):
            totals[row] += gain
            tokens[row] += [token] if token != end else []
        scorer.follow(torch.zeros_like(chosen)[:, None], chosen[:, None])
        going = (chosen != end).nonzero()[:, 0]
        # Selecting utterances copies the decoder cache: do it only when one has ended.
        if len(going) < len(rows):
            scorer.keep(going)
        rows = [rows[index] for index in going.tolist()]
        step = step + 1
    return {row: ScoredTokens(tokens[row], totals[row] / (len(tokens[row]) + 1)) for row in limits}


def _mask_forbidden(scores: torch.Tensor, is_at_limit: list[bool], end: int) -> torch.Tensor:
    """Return log probabilities (B, V) renormalised over the allowed tokens, at the limit over the end token only.

    A row is NaN if no token is allowed.
    """
    # A NaN would spread to the whole row in log_softmax.
    scores = scores.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    is_too_long = torch.tensor(is_at_limit, device=scores.device)[:, None].expand_as(scores).clone()
    is_too_long[:, end] = False
    return scores.masked_fill_(is_too_long, -math.inf).log_softmax(dim=1)


def _replay(outputs: list[list[int]], end: int) -> Choose:
    """Return a selector of the tokens in `outputs`, followed by the end token."""

    def choose(step: int, rows: list[int], log_probabilities: torch.Tensor) -> torch.Tensor:
        tokens = [outputs[row][step] if step < len(outputs[row]) else end for row in rows]
        return torch.tensor(tokens, device=log_probabilities.device)

    return choose
