"""What a corpus is known by, wherever it lies and whoever lengthens it: a few hundred of its utterances."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from heapq import nsmallest
from pathlib import Path

from konkanivani.data.manifest import Manifest
from konkanivani.data.utterance import Utterance
from konkanivani.errors import CheckpointError
from konkanivani.wording import count, duration_words

SKETCHED = 256  # utterances: two corpora of which the half is shared are told from two that share nothing


@dataclass(frozen=True)
class Fingerprint:
    """A training manifest's path and size, and the least hashes of its utterances, ascending, at most SKETCHED.

    The utterances with the least hashes of one corpus are those of another as far as they are in both (bottom-k
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
        mine, theirs = ({number for number in each.sketch if number <= limit} for each in (self, other))
        return len(mine & theirs) / max(1, min(len(mine), len(theirs)))

    def is_unchanged(self, other: "Fingerprint") -> bool:
        """Whether the other one has as many utterances, and as far as can be told the same."""
        return (self.utterances, self.sketch) == (other.utterances, other.sketch)

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint carries."""
        return asdict(self)


def _reach(sketch: tuple[int, ...]) -> float:
    """The largest hash that a sketch would hold; a small corpus's holds all."""
    return sketch[-1] if len(sketch) == SKETCHED else float("inf")


def read_fingerprint(state: Mapping[str, object]) -> Fingerprint:
    """The fingerprint that a checkpoint carries; a CheckpointError where it is none."""
    fields = {"manifest": str, "utterances": int, "hours": float, "sketch": tuple}
    sound = all(type(state.get(name)) is kind for name, kind in fields.items())
    if not sound or not all(type(number) is int for number in state["sketch"]):
        raise CheckpointError("The checkpoint does not say which corpus it was trained on as ours do. Use another one.")
    return Fingerprint(**{name: state[name] for name in fields})


def fingerprint_of(manifest: Manifest) -> Fingerprint:
    """The manifest's fingerprint, its sketch kept beside its index where it has one."""
    kept = manifest.index.folder
    sketch = _read_sketch(kept / "sketch.json") if kept else None
    if sketch is None:
        sketch = tuple(nsmallest(SKETCHED, {_hash(utterance) for utterance in manifest}))
        if kept:
            _keep_sketch(kept / "sketch.json", sketch)
    return Fingerprint(os.path.abspath(manifest.path), len(manifest), float(manifest.durations.sum()) / 3600, sketch)


def _hash(utterance: Utterance) -> int:
    """Of what stays where a corpus is moved, its audio changed to another format or its transcripts corrected."""
    stem = Path(utterance.audio_filepath).stem
    place = stem, utterance.byte_offset, utterance.offset or 0.0, round(utterance.duration, 2)
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "big")


def _read_sketch(path: Path) -> tuple[int, ...] | None:
    try:
        return tuple(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _keep_sketch(path: Path, sketch: tuple[int, ...]) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(sketch))
        os.replace(partial, path)
    except OSError:
        pass  # it is made anew at the next start
