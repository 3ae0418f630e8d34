"""Split assignment: by the names in a corpus, or drawn in hash order.

A drawn split is a pure function of the seed and of the names and durations of speakers or utterances; it does not
depend on the order of rows.
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
    """Shares of the total duration for validation and test, from 0 to below 1; a split with share 0 is not drawn."""

    valid: float
    test: float

    @property
    def asked(self) -> int:
        """Return the number of splits, including train."""
        return 1 + (self.valid > 0) + (self.test > 0)


def split_named(name: str) -> str:
    """Return `train`, `valid` or `test` if `name` starts with a usual name of it (dev, train-00, valid), else ""."""
    word = re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]
    return next((split for split, words in NAMES if word in words), "")


def split_of_path(parts: Iterable[str]) -> str:
    """Return the split of the first of these folders that is named like one, else ""."""
    return next((split for part in parts if (split := split_named(part))), "")


def draw_splits(lengths: Mapping[str, int], shares: Shares, seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names for validation and the names for test; the rest is for training.

    Each requested split gets at least one name, train included.

    Args:
        lengths: Milliseconds per indivisible unit (a speaker, an utterance); at least one unit per split.
    """
    # The hash makes the order independent of the order of rows.
    ordered = sorted(lengths, key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).digest())
    total = sum(lengths.values())
    # Keep one unit for train, and one for valid if it is drawn.
    test = _take(ordered, lengths, shares.test * total, kept=shares.asked - 1)
    rest = [name for name in ordered if name not in test]
    return _take(rest, lengths, shares.valid * total, kept=1), test


def _take(names: list[str], lengths: Mapping[str, int], target: float, kept: int) -> frozenset[str]:
    """Return names whose total length approximates `target`, and leave at least `kept` names."""
    if target <= 0:
        return frozenset()
    taken: list[str] = []
    filled = 0
    for name in names:
        # A long unit is skipped and shorter ones may still fit.
        if filled + lengths[name] <= target and len(names) - len(taken) > kept:
            taken.append(name)
            filled += lengths[name]
    known = set(taken)
    left = [name for name in names if name not in known]
    # One more unit may exceed the target if that comes closer to it; min() takes the first on a tie.
    nearest = min(left, key=lambda name: abs(filled + lengths[name] - target))
    is_nearer = abs(filled + lengths[nearest] - target) < abs(filled - target)
    if not taken or (is_nearer and len(left) > kept):
        taken.append(nearest)
    return frozenset(taken)
