"""Estimation of n-grams of tokens from text: interpolated modified Kneser-Ney.

Chen and Goodman (1998), An Empirical Study of Smoothing Techniques for Language Modeling, section 3. An n-gram below
the highest order is counted by the number of different tokens before it; n-grams at the start of a sentence have none
and are counted by their occurrences (as in Heafield et al., 2013, Scalable Modified Kneser-Ney Language Model
Estimation). Unigrams are interpolated with the uniform distribution, so that no token of the vocabulary is impossible.

V vocabulary, P positions in the text, N different n-grams of one order, M of the order below.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from konkanivani.data.text import OUR_TOKENS, SpecialTokens
from konkanivani.decoding.arpa import IMPOSSIBLE, LN_10, Ngrams

# Discounts of counts 1, 2 and >= 3 for texts too small to estimate them: the middle of the possible range.
USUAL_DISCOUNTS = (0.5, 1.0, 1.5)
NOWHERE = -1


@dataclass(frozen=True, eq=False)
class _Counted:
    """Different n-grams of one order and their numbers of occurrences."""

    parents: np.ndarray  # (N,) the first n - 1 tokens, as an index into the M
    tokens: np.ndarray  # (N,) the last token
    suffixes: np.ndarray  # (N,) the last n - 1 tokens, as an index into the M
    counts: np.ndarray  # (N,)


def estimate_ngrams(
    sentences: Iterable[Sequence[int]], vocabulary: int, order: int, special: SpecialTokens = OUR_TOKENS
) -> tuple[Ngrams, ...]:
    """Estimate the n-grams of order 1 to `order` from at least one sentence of token ids.

    Orders longer than every sentence, including its start and end, are left out. The probabilities after each context
    add up to one over all tokens but blank and the start; each of these has a unigram.
    """
    framed = ((special.start, *tokens, special.end) for tokens in sentences)
    text = np.fromiter(chain.from_iterable(framed), np.int64)
    levels = _count(text, vocabulary, order, special.end)
    estimated: list[Ngrams] = []
    tokens = np.zeros((1, 0), np.int32)
    lower = np.full(1, 1 / (vocabulary - 2))
    for level, above in zip(levels, [*levels[1:], None], strict=True):
        counts = _kneser_ney_counts(level, above, special.start)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(level.parents, counts, len(lower))
        weights = np.bincount(level.parents, discounts, len(lower)) / np.maximum(totals, 1)
        if estimated:
            np.log(weights, out=estimated[-1].backoffs, where=totals > 0)
        # Interpolation: discounted estimate plus the context's freed mass times the lower order's estimate.
        lower = (counts - discounts) / totals[level.parents] + weights[level.parents] * lower[level.suffixes]
        tokens = np.column_stack([tokens[level.parents], level.tokens.astype(np.int32)])
        estimated.append(Ngrams(tokens, np.log(lower), np.zeros(len(tokens))))
    unigrams = estimated[0]
    kept = unigrams.tokens[:, 0] != special.blank
    never_follows = unigrams.tokens[kept, 0] == special.start
    log_probabilities = np.where(never_follows, IMPOSSIBLE * LN_10, unigrams.log_probabilities[kept])
    return Ngrams(unigrams.tokens[kept], log_probabilities, unigrams.backoffs[kept]), *estimated[1:]


def _count(text: np.ndarray, vocabulary: int, order: int, end: int) -> list[_Counted]:
    """Count each order's n-grams in concatenated sentences (P,); order 1 has all tokens of the vocabulary."""
    nothing = np.zeros(vocabulary, np.int64)
    levels = [_Counted(nothing, np.arange(vocabulary), nothing, np.bincount(text, minlength=vocabulary))]
    ends = np.flatnonzero(text == end)
    left = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(text)) + 1  # tokens up to the sentence's end
    # index within its order of the n-gram starting at each position
    places = text
    starts = np.arange(len(text))
    for number in range(2, order + 1):
        starts = starts[left[starts] >= number]
        if not len(starts):
            break
        # An n-gram is its first n - 1 tokens, by their index, and its last token.
        keys = places[starts] * vocabulary + text[starts + number - 1]
        keys, firsts, found, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        levels.append(_Counted(keys // vocabulary, keys % vocabulary, places[starts[firsts] + 1], counts))
        places = np.full(len(text), NOWHERE)
        places[starts] = found
    return levels


def _kneser_ney_counts(level: _Counted, above: _Counted | None, start: int) -> np.ndarray:
    """Return the number (N,) of different tokens before each n-gram, or its occurrences.

    The latter at the highest order and for n-grams at the start of a sentence, which nothing precedes.
    """
    counts = level.counts
    if above is not None:
        before = np.bincount(above.suffixes, minlength=len(counts))
        counts = np.where(before > 0, before, counts)
    # The start of a sentence is only a context and has no probability of its own.
    return np.where(level.tokens == start, 0, counts)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts (4,) of counts 0, 1, 2 and >= 3 (Chen and Goodman, 1998, eq. 26).

    The default discounts are used if a count of counts is zero or an estimate is outside of its possible range.
    """
    once, twice, thrice, four_times = (int((counts == count).sum()) for count in range(1, 5))
    discounts = USUAL_DISCOUNTS
    if min(once, twice, thrice, four_times) > 0:
        y = once / (once + 2 * twice)
        estimated = 1 - 2 * y * twice / once, 2 - 3 * y * thrice / twice, 3 - 4 * y * four_times / thrice
        if all(0 < discount < count for count, discount in enumerate(estimated, start=1)):
            discounts = estimated
    return np.array([0.0, *discounts])
