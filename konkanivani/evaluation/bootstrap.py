"""Confidence of error rates: 95 % percentile intervals of the bootstrap, for one system and for two compared.

Bisani and Ney (2004), Bootstrap estimates for confidence intervals in ASR performance evaluation: draw utterances with
replacement, the same number as in the test set, and sum errors and words of each resample. Liu et al. (2020),
Statistical testing on ASR performance via blockwise bootstrap: the utterances of one speaker are not independent, so
draw whole speakers. With few speakers that interval is far too short (docs/evaluation.md has the figures), so `auto`
draws speakers from MIN_SPEAKERS on, and utterances below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 2_000
SEED = 1234
MIN_SPEAKERS = 10
DRAWS_PER_CHUNK = 4_000_000  # bounds the memory of the drawn block numbers and their counts

Unit = Literal["utterances", "speakers"]
Wish = Literal["auto", "utterances", "speakers"]


@dataclass(frozen=True)
class Interval:
    """The central 95 % of the resamples; NaN if they are not informative."""

    low: float
    high: float


def choose_unit(speakers: Sequence[str], wish: Wish) -> Unit:
    """Return the unit to resample for utterances of these speakers ("": unknown).

    Resampling speakers needs at least two of them, with `auto` at least MIN_SPEAKERS.
    """
    named = len(set(speakers) - {""})
    is_enough = named >= (MIN_SPEAKERS if wish == "auto" else 2)
    return "speakers" if wish != "utterances" and is_enough else "utterances"


def block_numbers(speakers: Sequence[str], unit: Unit) -> np.ndarray:
    """Return the block number of each utterance (N,); an utterance of an unknown speaker is a block of its own."""
    if unit == "utterances":
        return np.arange(len(speakers))
    keys = [("speaker", speaker) if speaker else ("row", row) for row, speaker in enumerate(speakers)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def resample_sums(amounts: np.ndarray, blocks: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Return sums of `amounts` over blocks drawn with replacement, (resamples, K) float64.

    The same blocks and seed give the same draws; two systems are compared on the same resamples by concatenating their
    amounts as columns.

    Args:
        amounts: (N, K), such as errors and words of each utterance.
        blocks: (N,) block number of each utterance, from 0; a resample has the original number of blocks.
    """
    count = int(blocks.max()) + 1 if len(blocks) else 0
    if not count:
        return np.zeros((resamples, amounts.shape[1]))
    sums = np.stack([np.bincount(blocks, column, count) for column in amounts.T], axis=1)
    generator = np.random.default_rng(seed)
    rows_per_chunk = max(1, DRAWS_PER_CHUNK // count)
    found = []
    for done in range(0, resamples, rows_per_chunk):
        rows = min(rows_per_chunk, resamples - done)
        # Offset each row by `count`, so that one bincount() counts the draws of all rows.
        drawn = generator.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        # How often each block is drawn times its sums: a matrix product instead of gathering all draws.
        found.append(times.astype(np.float64) @ sums)
    return np.concatenate(found)


def ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return the quotients; NaN if the denominator is 0."""
    return np.divide(numerators, denominators, out=np.full(len(numerators), np.nan), where=denominators > 0)


def percentiles(values: np.ndarray) -> Interval:
    """Return the central 95 % of the values that are not NaN; NaN if they do not vary."""
    numbers = values[~np.isnan(values)]
    # Resamples without errors, or of a single block, are all equal: no sign of certainty.
    if not len(numbers) or np.ptp(numbers) == 0:
        return Interval(np.nan, np.nan)
    return Interval(*map(float, np.quantile(numbers, (0.025, 0.975))))
