"""Histograms with round bin edges; distant outliers are counted but not drawn."""

import math
from dataclasses import dataclass

import numpy as np

MIN_BINS = 6
MAX_BINS = 24
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten


@dataclass(frozen=True)
class Histogram:
    """Amounts per bin: `amounts[i]` is in [start + i * width, start + (i + 1) * width), the last bin includes its end.

    `below` and `beyond` are the amounts outside all bins. An amount is a number of values or a sum of their weights.
    """

    start: float
    width: float
    amounts: tuple[float, ...]
    below: float
    beyond: float

    @property
    def end(self) -> float:
        return self.start + self.width * len(self.amounts)

    def edge(self, number: int) -> float:
        return round(self.start + number * self.width, 9)


def build_histogram(values: np.ndarray, weights: np.ndarray | None = None, finest: float = 0.0) -> Histogram:
    """Return the histogram of the finite values.

    The bins span the values without the outer 0.5 % on each side, or all values if that is not much wider.
    No bin is narrower than `finest`, because smaller differences mean nothing.
    """
    finite = np.isfinite(values)
    values = values[finite]
    weights = None if weights is None else weights[finite]
    if not len(values):
        return Histogram(0.0, 1.0, (), 0.0, 0.0)
    start, width, count = _bins(values, finest)
    # A value on an edge belongs to the bin above, whatever the last bit of the division is; a value at the end belongs
    # to the last bin.
    exact = (values - start) / width
    place = np.floor(exact + 1e-9)
    place[(place == count) & (exact < count + 1e-9)] = count - 1
    # Index 0 collects the values below, the last index those beyond.
    sums = np.bincount(np.clip(place, -1, count).astype(np.int64) + 1, weights, minlength=count + 2)
    return Histogram(start, width, tuple(sums[1:-1].tolist()), float(sums[0]), float(sums[-1]))


def round_step(span: float, most: int) -> float:
    """Return the smallest round number such that `most` of them cover `span`."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerance absorbs rounding errors: 0.30000000000000004 / 3 gives 0.1, not 0.2.
    return next(step * power for step in ROUND_STEPS if step * power >= rough * (1 - 1e-9))


def _bins(values: np.ndarray, finest: float) -> tuple[float, float, int]:
    """Return the start, width and number of the bins."""
    low, high = (float(value) for value in np.quantile(values, [0.005, 0.995]))
    # A tail of less than 30 % of the range is drawn.
    if values.max() - high < 0.3 * (high - low):
        high = float(values.max())
    if low - values.min() < 0.3 * (high - low):
        low = float(values.min())
    # Start at zero if that leaves less than 40 % of the axis empty.
    if 0 <= low < 0.4 * high:
        low = 0.0
    span = high - low if high - low > 1e-9 * max(1.0, abs(high)) else max(abs(high) * 0.1, 0.1)
    # Rice's rule: twice the cube root of the number of values; more bins would show noise.
    wanted = min(MAX_BINS, max(MIN_BINS, round(2 * len(values) ** (1 / 3))))
    width = max(round_step(span, wanted - 1), finest)
    first = math.floor(low / width + 1e-9)
    count = max(1, math.ceil(high / width - 1e-9) - first)
    if count == 1:  # a single bar needs an empty bin next to it to be recognisable
        first, count = (first - 1, 3) if first else (0, 2)
    return first * width, width, count
