"""Which split an utterance is in: by what a corpus names its parts, or by hash order.

A drawn split is a pure function of the seed and of the names of speakers or utterances; the order of rows is no part
of it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SPLITS = ("train", "valid", "test")
NAMES = (
    ("train", ("train", "training")),
    ("valid", ("valid", "validation", "val", "dev", "devel")),
    ("test", ("test", "testing", "eval")),
)


@dataclass(frozen=True)
class Shares:
    """The parts of the whole that validation and testing get, 0 to below 1; a part of 0 is not drawn."""

    valid: float
    test: float

    @property
    def asked(self) -> int:
        """How many splits there are to be."""
        return 1 + (self.valid > 0) + (self.test > 0)


def split_named(name: str) -> str:
    """`train`, `valid` or `test` where `name` begins with a usual name of it (dev, train-00, validation); else ""."""
    word = re.match(r"[a-z]*", name.lower()).group()
    return next((split for split, words in NAMES if word in words), "")


def split_of_path(parts: Iterable[str]) -> str:
    """The split that the first of these folders with such a name stands for; else ""."""
    return next((split for part in parts if (split := split_named(part))), "")


def draw_splits(lengths: Mapping[str, int], shares: Shares, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names that go to validation and those that go to testing; each asked split gets one, train the rest.

    `lengths` are milliseconds of what is never divided (a speaker, an utterance); there must be as many as splits asked
    for. In the order of the hashes one is taken where it still fits into the split's share of the time, and at the end
    one more where that comes nearer.
    """
    ordered = sorted(lengths, key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).digest())
    total = sum(lengths.values())
    test = _take(ordered, lengths, shares.test * total, kept=shares.asked - 1)
    rest = [name for name in ordered if name not in test]
    return _take(rest, lengths, shares.valid * total, kept=1), test


def _take(names: list[str], lengths: Mapping[str, int], target: float, kept: int) -> frozenset[str]:
    """Those that make up the target; so many at least are left."""
    if target <= 0:
        return frozenset()
    taken, filled = [], 0
    for name in names:
        if filled + lengths[name] <= target and len(names) - len(taken) > kept:
            taken.append(name)
            filled += lengths[name]
    known = set(taken)
    left = [name for name in names if name not in known]
    nearest = min(left, key=lambda name: abs(filled + lengths[name] - target))  # the first of equal ones
    is_nearer = abs(filled + lengths[nearest] - target) < abs(filled - target)
    if not taken or (is_nearer and len(left) > kept):
        taken.append(nearest)
    return frozenset(taken)
