"""A sketch that identifies a corpus, moved or lengthened: a few hundred of its utterances."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from konkanivani.base.console import count, duration_words
from konkanivani.base.errors import CheckpointError
from konkanivani.data.index import SKETCHED
from konkanivani.data.manifest import Manifest


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
        limit = min(_reach(self.sketch), _reach(other.sketch))
        mine, theirs = ({mark for mark in each.sketch if mark <= limit} for each in (self, other))
        return len(mine & theirs) / max(1, min(len(mine), len(theirs)))

    def is_unchanged(self, other: "Fingerprint") -> bool:
        """Whether the other one has as many utterances, and as far as can be told the same."""
        return (self.utterances, self.sketch) == (other.utterances, other.sketch)

    def state_dict(self) -> dict[str, object]:
        return asdict(self)


def _reach(sketch: tuple[int, ...]) -> float:
    """The largest mark that a sketch would hold; a small corpus's holds all."""
    return sketch[-1] if len(sketch) == SKETCHED else float("inf")


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
