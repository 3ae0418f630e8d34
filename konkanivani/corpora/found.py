"""Utterances of a corpus as found, their splits, and rows that are refused.

A drawn split is a pure function of the seed and of the names and durations of speakers or utterances; it does not
depend on the order of rows.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

# --------------------
# Interface between the format readers and the preparation: corpus folder, unchecked utterances and unusable rows.


@dataclass(frozen=True)
class SpeechFolder:
    """Input of a format reader: the corpus folder and the options of the command line ("": not given).

    Audio that a table stores as bytes is written to files in `embedded_audio`; no other reader writes anything.
    `audio_root` is the folder that contains the audio (None: `path`). The preparation sets both.
    """

    path: Path
    table: str = ""
    audio_column: str = ""
    text_column: str = ""
    speaker_column: str = ""
    split_column: str = ""
    embedded_audio: Path = Path("audio")
    audio_root: Path | None = None
    channel_column: str = ""

    def name_of(self, file: Path) -> str:
        """Return `file` relative to the corpus folder, or unchanged if it is outside."""
        return str(file.relative_to(self.path)) if file.is_relative_to(self.path) else str(file)

    def table_path(self) -> Path:
        """Return the path of `--table`: in the corpus folder if it exists there, else in the current directory."""
        inside = self.path / self.table
        return inside if inside.exists() else Path(self.table)


@dataclass(frozen=True)
class FoundUtterance:
    """An utterance as row `row` (counted from 1) of `file` describes it.

    Attributes:
        split: `train`, `valid`, `test`, or "" if the corpus defines none.
        byte_count: If positive, the audio is this part of the file at `audio`, from `byte_offset`.
        seconds: Duration of the span that starts at `start`; None for everything from there on.
        file_seconds: Duration of the whole audio file according to the corpus.
        channel: The only channel to use, from 0; None for the mean of all channels.
        is_channel_label: The channel is a label that a mono file may have, too (Kaldi).
        removed: Format characters that were removed from the text.
    """

    file: str
    row: int
    audio: Path
    text: str
    id: str = ""
    speaker: str = ""
    split: str = ""
    byte_offset: int = 0
    byte_count: int = 0
    start: float = 0.0
    seconds: float | None = None
    file_seconds: float | None = None
    channel: int | None = None
    is_channel_label: bool = False
    removed: tuple[str, ...] = ()

    def lasting(self, offset: float | None, duration: float | None) -> "FoundUtterance":
        """Return a copy with the duration of a row: of a span if there is an offset, else of the whole file."""
        if offset is None:
            # The whole file is used; the stated duration only serves to check its header.
            return replace(self, file_seconds=duration)
        return replace(self, start=offset, seconds=duration)

    def refused(self, kind: str, reason: str) -> "RefusedRow":
        """Return this row as a row that cannot be used."""
        return RefusedRow(self.file, self.row, kind, reason, str(self.audio))


@dataclass(frozen=True)
class RefusedRow:
    """A row that is left out, with its location, the kind of reason (rows are counted by kind) and the reason.

    An expected row is listed but does not count as damage: the authors of the corpus leave such rows out, too.
    """

    file: str
    row: int
    kind: str
    reason: str
    audio_filepath: str = ""
    is_expected: bool = False


Found = Iterator[FoundUtterance | RefusedRow]


# --------------------
# Split assignment: by the names in a corpus, or drawn in hash order.


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
