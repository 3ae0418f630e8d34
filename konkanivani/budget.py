"""Sizes of memory as people write them."""

import re

from konkanivani.errors import UsageError

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
MIB, GIB = 2**20, 2**30


def parse_budget(text: str) -> int:
    """Bytes of a budget such as `4GiB` or `700 MiB`; a UsageError without a unit or beyond sense."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text)
    if match is None:
        raise UsageError(f"--memory_budget {text}: give a number and a unit, for example 4GiB or 700MiB.")
    size = int(float(match.group(1)) * UNITS[match.group(2)])
    if not 2**20 <= size <= 2**43:
        raise UsageError(f"--memory_budget {text} is not a size of a memory. Give one from 1MiB to 8192GiB.")
    return size


def budget_text(size: int) -> str:
    """The size as a flag takes it, in whole MiB, rounded down."""
    return f"{size // MIB}MiB"


def peak_text(size: int) -> str:
    """The size in whole MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"
