"""Sizes of memory, ratios in decibels and percentages as people write them. No torch here."""

import re
from dataclasses import dataclass

from konkanivani.base.errors import UsageError

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MIB, GIB = 2**20, 2**30


def parse_budget(text: str) -> int:
    """Bytes of a budget such as `4GiB`, `4g` or `700 MB`, in any case; a UsageError without a unit or beyond sense.

    GB is 10**9 bytes, as standards have it; GiB, and a bare G, 2**30, which is what a card "of 4 G" has. K, M, T alike.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt])(i?b)?\s*", text.lower())
    if match is None:
        raise UsageError(f"--memory_budget {text}: give a number and a unit, for example 4GiB, 4G or 700MiB.")
    number, prefix, ending = match.groups()
    size = int(float(number) * (1000 if ending == "b" else 1024) ** POWERS[prefix])
    if not 2**20 <= size <= 2**43:
        raise UsageError(f"--memory_budget {text} is out of range. Give a size from 1MiB to 8192GiB.")
    return size


def budget_text(size: int) -> str:
    """The size as a flag takes it, in whole MiB, rounded down."""
    return f"{size // MIB}MiB"


def peak_text(size: int) -> str:
    """The size in whole MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"


NUMBER = r"[+-]?\d+(?:\.\d+)?"
MIN_SNR, MAX_SNR = -50.0, 100.0  # dB: below and above, one of the two sounds is gone from 16 bits


@dataclass(frozen=True)
class DecibelRange:
    """From `low` to `high` dB, both included."""

    low: float
    high: float


def parse_snr(text: str) -> DecibelRange:
    """The range of signal-to-noise ratios that `5:25` means; a UsageError where it is none, or beyond sense."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*:\s*({NUMBER})\s*", text)
    if match is None:
        raise UsageError(f"--noise_snr {text}: give the lowest and highest SNR in dB, for example 5:25.")
    low, high = map(float, match.groups())
    if not MIN_SNR <= low <= high <= MAX_SNR:
        raise UsageError(
            f"--noise_snr {text}: give the lower SNR first, both between {MIN_SNR:g} and {MAX_SNR:g} dB, for "
            "example 5:25."
        )
    return DecibelRange(low, high)


def parse_share(text: str, flag: str) -> float:
    """The share that a person writes as 1% or 0.01; a UsageError where it is none between 0 and 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{flag} {text} is not a share. Give a percentage such as 1%, or a number between 0 and 1.")
    return share
