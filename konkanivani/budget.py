"""Sizes of memory as people write them."""

import re

from konkanivani.errors import UsageError

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
        raise UsageError(f"--memory_budget {text} is not a size of a memory. Give one from 1MiB to 8192GiB.")
    return size


def budget_text(size: int) -> str:
    """The size as a flag takes it, in whole MiB, rounded down."""
    return f"{size // MIB}MiB"


def peak_text(size: int) -> str:
    """The size in whole MiB, rounded up."""
    return f"{-(-size // MIB)} MiB"
