"""Fingerprint of a corpus from hashes of its utterances, which identifies it after it is moved or extended."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from konkanivani.base.console import count, duration_words
from konkanivani.base.errors import CheckpointError
from konkanivani.data.index import SKETCHED
from konkanivani.data.manifest import Manifest

OLD_SKETCHED = 256  # maximum number of hashes in checkpoints of older versions


@dataclass(frozen=True)
class CorpusChange:
    """Number of utterances added to and removed from a corpus; estimated if not `is_exact`."""

    added: int
    removed: int
    is_exact: bool

    def sentence(self) -> str:
        """Return both numbers in words."""
        about = "" if self.is_exact else "about "
        return f"{about}{count(self.added, 'utterance')} added, {about}{self.removed:,} removed"


@dataclass(frozen=True)
class Fingerprint:
    """Path, size and bottom-k sketch of a training manifest.

    The k smallest hashes of a corpus are a uniform sample of its utterances, so that comparing two sketches estimates
    the overlap of the corpora (Broder, 1997, "On the resemblance and containment of documents").
    """

    manifest: str
    utterances: int
    hours: float
    sketch: tuple[int, ...]

    def sentence(self) -> str:
        """Return a description of the corpus for messages."""
        return f"{self.manifest} ({count(self.utterances, 'utterance')}, {duration_words(self.hours)})"

    def shared(self, other: "Fingerprint") -> float:
        """Estimate the share of the smaller corpus's utterances that are also in the other corpus."""
        mine, theirs = self._comparable(other)
        return len(mine & theirs) / max(1, min(len(mine), len(theirs)))

    def is_unchanged(self, other: "Fingerprint") -> bool:
        """Return whether the other corpus has the same number of utterances and no detectable difference."""
        return self.utterances == other.utterances and self.change_to(other) is None

    def change_to(self, other: "Fingerprint") -> CorpusChange | None:
        """Return the difference to the other corpus; None if both sketches show no difference."""
        mine, theirs = self._comparable(other)
        difference = other.utterances - self.utterances  # known exactly
        is_exact = min(self.reach, other.reach) == float("inf")
        if is_exact:
            # Hashes are a set, whereas a row that occurs twice counts as two utterances: correct by the difference.
            added = max(len(theirs - mine), len(mine - theirs) + difference)
        else:
            # Estimate the removed utterances from this sketch's sample; the difference of the sizes is exact.
            added = max(0, round(len(mine - theirs) / max(1, len(mine)) * self.utterances) + difference)
        change = CorpusChange(added, added - difference, is_exact)
        return change if change.added or change.removed else None

    @property
    def reach(self) -> float:
        """Return the largest hash of the sketch; infinite if it contains the hashes of all utterances."""
        is_cut = len(self.sketch) in (OLD_SKETCHED, SKETCHED) and self.utterances > len(self.sketch)
        return self.sketch[-1] if is_cut else float("inf")

    def _comparable(self, other: "Fingerprint") -> tuple[set[int], set[int]]:
        """Return the hashes of both corpora up to the smaller reach: above it, one sketch is incomplete."""
        limit = min(self.reach, other.reach)
        return {mark for mark in self.sketch if mark <= limit}, {mark for mark in other.sketch if mark <= limit}

    def state_dict(self) -> dict[str, object]:
        return asdict(self)


def make_fingerprint(manifest: Manifest) -> Fingerprint:
    hours = float(manifest.durations.sum()) / 3600
    return Fingerprint(os.path.abspath(manifest.path), len(manifest), hours, manifest.index.sketch)


def read_fingerprint(state: Mapping[str, object]) -> Fingerprint:
    """Return the fingerprint stored in a checkpoint; raise a `CheckpointError` if it is invalid."""
    manifest = state.get("manifest")
    utterances = state.get("utterances")
    hours = state.get("hours")
    sketch = state.get("sketch")
    # The file may come from elsewhere; `type`, because a bool is an int.
    if type(manifest) is str and type(utterances) is int and type(hours) is float and type(sketch) is tuple:
        if all(type(mark) is int for mark in sketch):
            return Fingerprint(manifest, utterances, hours, sketch)
    raise CheckpointError("The checkpoint has no valid record of its training corpus. Use another checkpoint.")
