"""A sketch that identifies a corpus, moved or lengthened: hashes of its utterances."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from konkanivani.base.console import count, duration_words
from konkanivani.base.errors import CheckpointError
from konkanivani.data.index import SKETCHED
from konkanivani.data.manifest import Manifest

OLD_SKETCHED = 256  # marks at most in the checkpoints of older versions


@dataclass(frozen=True)
class CorpusChange:
    """The number of utterances that were added to a corpus and removed from it; estimated if not `is_exact`."""

    added: int
    removed: int
    is_exact: bool

    def sentence(self) -> str:
        """Return both numbers in words."""
        about = "" if self.is_exact else "about "
        return f"{about}{count(self.added, 'utterance')} added, {about}{self.removed:,} removed"


@dataclass(frozen=True)
class Fingerprint:
    """A training manifest's path and size, and the sketch of its index.

    The utterances with the least marks of one corpus are those of another as far as they are in both (bottom-k
    sketch; Broder, 1997, "On the resemblance and containment of documents").
    """

    manifest: str
    utterances: int
    hours: float
    sketch: tuple[int, ...]

    def sentence(self) -> str:
        """The corpus for a person."""
        return f"{self.manifest} ({count(self.utterances, 'utterance')}, {duration_words(self.hours)})"

    def shared(self, other: "Fingerprint") -> float:
        """The share of the smaller corpus's utterances that the other one has too, about."""
        mine, theirs = self._comparable(other)
        return len(mine & theirs) / max(1, min(len(mine), len(theirs)))

    def is_unchanged(self, other: "Fingerprint") -> bool:
        """Whether the other one has as many utterances, and as far as can be told the same."""
        return self.utterances == other.utterances and self.change_to(other) is None

    def change_to(self, other: "Fingerprint") -> CorpusChange | None:
        """Return the difference to the other corpus; None if there is none within the reach of both sketches."""
        mine, theirs = self._comparable(other)
        difference = other.utterances - self.utterances  # known exactly
        is_exact = min(self.reach, other.reach) == float("inf")
        if is_exact:
            # A row that is in the manifest twice has one mark and counts as two utterances.
            added = max(len(theirs - mine), len(mine - theirs) + difference)
        else:
            added = max(0, round(len(mine - theirs) / max(1, len(mine)) * self.utterances) + difference)
        change = CorpusChange(added, added - difference, is_exact)
        return change if change.added or change.removed else None

    @property
    def reach(self) -> float:
        """Return the largest mark within the sketch's range; infinite if it holds the marks of all utterances."""
        is_cut = len(self.sketch) in (OLD_SKETCHED, SKETCHED) and self.utterances > len(self.sketch)
        return self.sketch[-1] if is_cut else float("inf")

    def _comparable(self, other: "Fingerprint") -> tuple[set[int], set[int]]:
        """Return the marks of both corpora within the range of both sketches."""
        limit = min(self.reach, other.reach)
        return {mark for mark in self.sketch if mark <= limit}, {mark for mark in other.sketch if mark <= limit}

    def state_dict(self) -> dict[str, object]:
        return asdict(self)


def make_fingerprint(manifest: Manifest) -> Fingerprint:
    hours = float(manifest.durations.sum()) / 3600
    return Fingerprint(os.path.abspath(manifest.path), len(manifest), hours, manifest.index.sketch)


def read_fingerprint(state: Mapping[str, object]) -> Fingerprint:
    """The fingerprint that a checkpoint carries; a CheckpointError where it is none."""
    fields = {"manifest": str, "utterances": int, "hours": float, "sketch": tuple}
    sound = all(type(state.get(name)) is kind for name, kind in fields.items())
    if not sound or not all(type(mark) is int for mark in state["sketch"]):
        raise CheckpointError("The checkpoint has no valid record of its training corpus. Use another checkpoint.")
    return Fingerprint(**{name: state[name] for name in fields})
