"""How sure an error rate is: 95 % percentile intervals of the bootstrap, for one system and for two compared.

Bisani and Ney (2004), Bootstrap estimates for confidence intervals in ASR performance evaluation: utterances are drawn
with replacement, as many as there are, and errors and words summed anew. Liu et al. (2020), Statistical testing on ASR
performance via blockwise bootstrap: what one speaker says is not independent, so whole speakers are drawn. Of few
speakers that interval is far too short (docs/evaluation.md has the figures), so `auto` draws them from MIN_SPEAKERS
on, and utterances below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 2_000
SEED = 1234
MIN_SPEAKERS = 10
DRAWS_PER_CHUNK = 4_000_000

Unit = Literal["utterances", "speakers"]
Wish = Literal["auto", "utterances", "speakers"]


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of the resamples; NaN where they say nothing."""

    low: float
    high: float


def choose_unit(speakers: Sequence[str], wish: Wish) -> Unit:
    """What is drawn of these utterances' speakers ("": not known); speakers only where there are two at least."""
    named = len(set(speakers) - {""})
    is_enough = named >= (MIN_SPEAKERS if wish == "auto" else 2)
    return "speakers" if wish != "utterances" and is_enough else "utterances"


def block_numbers(speakers: Sequence[str], unit: Unit) -> np.ndarray:
    """(utterances,) the number of the block that each is drawn with; an unknown speaker's utterance is its own."""
    if unit == "utterances":
        return np.arange(len(speakers))
    keys = [("speaker", speaker) if speaker else ("row", row) for row, speaker in enumerate(speakers)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def resample_sums(amounts: np.ndarray, blocks: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """(resamples, K) float64: amounts (utterances, K) summed over as many blocks as there are, drawn with replacement.

    The same blocks and seed give the same draws, so two systems' amounts side by side are resampled together.
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
        drawn = generator.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)  # each block is drawn
        found.append(times.astype(np.float64) @ sums)
    return np.concatenate(found)


def ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """The quotients; NaN where there is nothing to divide by."""
    return np.divide(numerators, denominators, out=np.full(len(numerators), np.nan), where=denominators > 0)


def percentiles(values: np.ndarray) -> Interval:
    """The middle 95 % of the values that are numbers; NaN where they do not vary, and so say nothing.

    Resamples without an error, or of one block, are all the same: that is no sign of certainty.
    """
    numbers = values[~np.isnan(values)]
    if not len(numbers) or np.ptp(numbers) == 0:
        return Interval(np.nan, np.nan)
    return Interval(*map(float, np.quantile(numbers, (0.025, 0.975))))
