"""Which split an utterance is in: by what a corpus names its parts, or by hash order.

A drawn split is a pure function of the seed and of the names of speakers or utterances; the order of rows is no part
of it.
"""

import hashlib
import re
from collections.abc import Iterable
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


@dataclass(frozen=True)
class Unit:
    """What is never divided between splits (a speaker, or an utterance), and how long it is."""

    name: str
    milliseconds: int


def split_named(name: str) -> str:
    """`train`, `valid` or `test` where `name` begins with a usual name of it (dev, train-00, validation); else ""."""
    found = re.match(r"[a-z]+", name.lower())
    word = found.group() if found else ""
    return next((split for split, words in NAMES if word in words), "")


def split_of_path(parts: Iterable[str]) -> str:
    """The split that the first of these folders with such a name stands for; else ""."""
    return next((split for part in parts if (split := split_named(part))), "")


def draw_splits(units: Iterable[Unit], shares: Shares, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """The names that go to validation and those that go to testing; each asked split gets a unit, train the rest.

    There must be as many units as splits asked for. In the order of the hashes a unit is taken where it
    still fits into the split's share of the time, and at the end one more where that comes nearer.
    """
    ordered = sorted(units, key=lambda unit: _hash(seed, unit.name))
    total = sum(unit.milliseconds for unit in ordered)
    test, rest = _take(ordered, shares.test * total, kept=shares.asked - 1)
    valid, _ = _take(rest, shares.valid * total, kept=1)
    return frozenset(valid), frozenset(test)


def _take(units: list[Unit], target: float, kept: int) -> tuple[list[str], list[Unit]]:
    """X"""
    if target <= 0:
        return [], units
    taken: list[Unit] = []
    left: list[Unit] = []
    filled = 0
    for unit in units:
        fits = filled + unit.milliseconds <= target and len(units) - len(taken) > kept
        (taken if fits else left).append(unit)
        filled += unit.milliseconds if fits else 0
    nearest = min(left, key=lambda unit: abs(filled + unit.milliseconds - target))  # the first of equal ones
    is_nearer = abs(filled + nearest.milliseconds - target) < abs(filled - target)
    if not taken or (is_nearer and len(left) > kept):
        taken.append(nearest)
        left = [unit for unit in left if unit is not nearest]
    return [unit.name for unit in taken], left


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{name}".encode()).digest()
