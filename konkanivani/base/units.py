"""Parsing of memory sizes, decibel ranges and percentages. Does not import torch."""

import re
from dataclasses import dataclass

from konkanivani.base.errors import UsageError

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
MIB = 2**20
GIB = 2**30


def parse_budget(text: str) -> int:
    """Return the bytes of a memory size such as `4GiB`, `4g` or `700 MB`, case-insensitive.

    GB is 10**9 bytes (SI); GiB, and G without B, is 2**30, the unit of nominal GPU memory. K, M and T likewise.
    Raises UsageError without a unit, or outside 1 MiB to 8192 GiB.
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
    """Return the size as a flag value, in whole MiB, rounded down."""
    return f"{size // MIB}MiB"


def peak_text(size: int) -> str:
    """Return the size in whole MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"


NUMBER = r"[+-]?\d+(?:\.\d+)?"
# dB; beyond, speech or noise is below the resolution of 16-bit audio
MIN_SNR = -50.0
MAX_SNR = 100.0


@dataclass(frozen=True)
class DecibelRange:
    """Range from `low` to `high` dB, both included."""

    low: float
    high: float


def parse_snr(text: str) -> DecibelRange:
    """Parse a range of signal-to-noise ratios in dB, such as `5:25`; raise UsageError if it is invalid."""
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
    """Parse a share written as 1% or 0.01; raise UsageError if it is not a number between 0 and 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        # Not a number: fails the range check below. So does NaN.
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{flag} {text} is not a share. Give a percentage such as 1%, or a number between 0 and 1.")
    return share
