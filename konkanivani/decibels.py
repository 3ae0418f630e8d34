"""Ranges of decibels as people write them."""

import re
from dataclasses import dataclass

from konkanivani.errors import UsageError

NUMBER = r"[+-]?\d+(?:\.\d+)?"
LOWEST, HIGHEST = -50.0, 100.0  # dB: below and above, one of the two sounds is gone from 16 bits


@dataclass(frozen=True)
class DecibelRange:
    """From `low` to `high` dB, both included."""

    low: float
    high: float


def parse_snr(text: str) -> DecibelRange:
    """The range of signal-to-noise ratios that `5:25` means; a UsageError where it is none, or beyond sense."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*:\s*({NUMBER})\s*", text)
    if match is None:
        raise UsageError(f"--noise_snr {text}: give the lowest and the highest ratio in dB, for example 5:25.")
    low, high = map(float, match.groups())
    if not LOWEST <= low <= high <= HIGHEST:
        raise UsageError(
            f"--noise_snr {text}: give the lower ratio first, both between {LOWEST:g} and {HIGHEST:g} dB, "
            "for example 5:25."
        )
    return DecibelRange(low, high)
