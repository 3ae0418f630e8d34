"""Manifests of a corpus: reading, writing, and a fingerprint of their content."""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from konkanivani.console import count, duration_words, is_or_are, say
from konkanivani.data.audio.paths import audio_roots
from konkanivani.data.index import (
    SKETCHED,
    BadRow,
    ManifestIndex,
    TextFields,
    Utterance,
    open_index,
    parse_row,
    parse_text_row,
    row_of,
)
from konkanivani.errors import CheckpointError, DataError, ErrorCollector, explained
from konkanivani.files import write_json_lines
from konkanivani.flags import CorpusSize

# --------------------
# JSONL manifests as lazily read sequences of utterances; index.py describes a row.


MAX_TOKENIZER_TEXTS = 500_000
ADVICE = "Give the path of a JSONL manifest."


class Manifest:
    """Valid rows of a manifest in the order of the file.

    Only the index is held in memory or memory-mapped; each access reads the row from the file. `durations` (rows,) are
    in seconds; `broken` are the invalid rows. `fields` names the texts of a text-to-text
    manifest, None for speech.
    """

    def __init__(
        self, path: str, index: ManifestIndex, named_roots: tuple[str, ...] = (), fields: TextFields | None = None
    ) -> None:
        self.path = path
        self.index = index
        self.named_roots = named_roots
        self.fields = fields
        self.durations = index.durations
        self.broken = index.broken
        self._folder = os.path.dirname(path)
        self._roots = audio_roots(self._folder, named_roots)
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self.index.starts)

    def __getitem__(self, place: int) -> Utterance:
        place = range(len(self))[place]
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
        start = int(self.index.starts[place])
        row = int(self.index.rows[place])
        # pread, because forked workers share the position of an inherited descriptor.
        return self._parse(os.pread(self._file, int(self.index.sizes[place]), start), row)

    def __iter__(self) -> Iterator[Utterance]:
        return self.between(0, len(self))

    def between(self, first: int, end: int) -> Iterator[Utterance]:
        """Yield the utterances with indices `first` to `end - 1`, reading the file sequentially."""
        index = self.index
        columns = (column[first:end] for column in (index.starts, index.sizes, index.rows))
        with open(self.path, "rb") as file:
            for start, size, row in zip(*columns, strict=True):
                file.seek(start)
                yield self._parse(file.read(size), int(row))

    def _parse(self, line: bytes, row: int) -> Utterance:
        try:
            if self.fields is not None:
                return parse_text_row(line, self.fields, row)
            return parse_row(line, self._folder, row, self._roots)
        except BadRow as error:
            raise DataError(
                f"{self.path}, row {row}: {error}. The row was valid before: do not change a manifest while it "
                "is in use."
            ) from None

    def __reduce__(self) -> tuple:
        # A file descriptor cannot be pickled: the other process opens the file and maps the index itself.
        return read_manifest, (self.path, self.named_roots, self.fields)

    def __del__(self) -> None:
        file: int | None = getattr(self, "_file", None)  # __init__ may have failed before setting it
        if file is not None:
            os.close(file)


def read_manifest(path: str | Path, named_roots: tuple[str, ...] = (), fields: TextFields | None = None) -> Manifest:
    """Open the manifest at `path`; raise a `DataError` if it cannot be read or is empty.

    Audio must be in the manifest's folder or in one of the `named_roots`; rows with other paths count as broken. With
    `fields`, rows have texts and no audio.
    """
    with explained(DataError, f"The manifest {path} cannot be read", ADVICE):
        index = open_index(Path(path), named_roots, fields)
    if not len(index.starts) and not index.broken:
        required_fields = (
            "audio_filepath, duration and text" if fields is None else f"{fields.input} and {fields.target}"
        )
        raise DataError(f"The manifest {path} is empty. Each line must be a JSON object with {required_fields}.")
    return Manifest(str(path), index, named_roots, fields)


def read_recordings(path: str | Path, named_roots: tuple[str, ...] = ()) -> list[Utterance]:
    """Return all rows of a manifest of recordings without transcripts; raise a `DataError` that names invalid rows.

    As in `read_manifest`, audio must be in the manifest's folder or in one of the `named_roots`.
    """
    with explained(DataError, f"The manifest {path} cannot be read", ADVICE):
        if not Path(path).is_file() and Path(path).exists() and not Path(path).is_dir():
            raise OSError("it is not a file")  # reading a pipe would block
        lines = Path(path).read_bytes().split(b"\n")
    sounds = []
    folder = os.path.dirname(path)
    problems = ErrorCollector()
    roots = audio_roots(folder, named_roots)
    for row, line in ((row, line) for row, line in enumerate(lines, start=1) if line.strip()):
        try:
            sounds.append(parse_row(line, folder, row, roots, needs_text=False))
        except BadRow as error:
            problems.add(DataError(f"{path}, row {row}: {error}. Fix or delete the row."))
    problems.raise_all()
    if not sounds:
        raise DataError(f"The manifest {path} is empty. Each line must be a JSON object with audio_filepath, duration.")
    return sounds


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write one JSON line per utterance to a temporary file and rename it to `path`."""
    write_json_lines(Path(path), map(row_of, utterances))


def measure_corpus_size(manifest: Manifest) -> CorpusSize:
    """Return the hours and utterances of the valid rows, and the number of distinct words if the corpus is small.

    A corpus of texts has no hours and counts as large.
    """
    if manifest.fields is not None:
        return CorpusSize(math.inf, len(manifest))
    amount = CorpusSize(float(manifest.durations.sum()) / 3600, len(manifest.durations))
    # Only for a small corpus: this reads every transcript.
    words = {word for text in iterate_texts(manifest) for word in text.split()} if amount.is_little else ()
    return dataclasses.replace(amount, words=len(words))


def no_text(manifest: Manifest) -> DataError:
    """Return the error for a manifest without any text to train a tokenizer on."""
    return DataError(
        f"All transcripts of {manifest.path} are empty after normalisation. Write the transcripts into the rows' text."
    )


def iterate_texts(manifest: Manifest) -> Iterator[str]:
    """Yield the transcripts for tokenizer training: all, or `MAX_TOKENIZER_TEXTS` at equal distances."""
    if len(manifest) <= MAX_TOKENIZER_TEXTS:
        return (utterance.text for utterance in manifest)
    places = np.linspace(0, len(manifest) - 1, MAX_TOKENIZER_TEXTS).astype(np.int64)
    return (manifest[int(place)].text for place in places)


# --------------------
# Fingerprint of a corpus from hashes of its utterances, which identifies it after it is moved or extended.


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
        hours = f", {duration_words(self.hours)}" if self.hours else ""
        return f"{self.manifest} ({count(self.utterances, 'utterance')}{hours})"

    def shared(self, other: "Fingerprint") -> float:
        """Estimate the share of the smaller corpus's utterances that are also in the other corpus."""
        own_marks, other_marks = self._comparable(other)
        return len(own_marks & other_marks) / max(1, min(len(own_marks), len(other_marks)))

    def is_unchanged(self, other: "Fingerprint") -> bool:
        """Return whether the other corpus has the same number of utterances and no detectable difference."""
        return self.utterances == other.utterances and self.change_to(other) is None

    def change_to(self, other: "Fingerprint") -> CorpusChange | None:
        """Return the difference to the other corpus; None if both sketches show no difference."""
        own_marks, other_marks = self._comparable(other)
        difference = other.utterances - self.utterances  # known exactly
        is_exact = min(self.reach, other.reach) == float("inf")
        if is_exact:
            # Hashes are a set, whereas a row that occurs twice counts as two utterances: correct by the difference.
            added = max(len(other_marks - own_marks), len(own_marks - other_marks) + difference)
        else:
            # Estimate the removed utterances from this sketch's sample; the difference of the sizes is exact.
            added = max(0, round(len(own_marks - other_marks) / max(1, len(own_marks)) * self.utterances) + difference)
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
    # Texts have no durations: the zeros in the index are not read from the disk.
    hours = float(manifest.durations.sum()) / 3600 if manifest.fields is None else 0.0
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


# --------------------
# Rejected utterances of a run, and the limit on their share of a manifest.


NAMED = 3


@dataclass(frozen=True)
class Rejection:
    """Rejected utterance with its manifest, its row (from 1) and the reason.

    With `is_broken` the data is defective; otherwise the utterance is longer, shorter or faster than training allows.
    """

    manifest: str
    row: int
    audio_filepath: str
    reason: str
    is_broken: bool


class Rejections:
    """Rejected utterances of a run, listed in a file; a `DataError` ends the run if too large a share is broken."""

    def __init__(self, path: Path | None, most: float) -> None:
        """Create an empty collection.

        Args:
            path: File for the list; None for no list.
            most: Largest allowed share of broken rows in a manifest, 0 to 1.
        """
        self._path = path
        self._most = most
        self._rows: dict[str, int] = {}
        self._broken: dict[str, dict[int, Rejection]] = {}
        self._new: list[Rejection] = []
        self.count = 0

    def news(self) -> tuple[Rejection, ...]:
        """Return the rejections added by `add` since the last call, to be sent to the other ranks."""
        new_rejections = tuple(self._new)
        self._new = []
        return new_rejections

    def begin(self, manifest: Manifest) -> None:
        """Add a manifest's broken rows; must precede any other rejection from this manifest."""
        if self._path and not self._rows:
            with self._listing():
                write_json_lines(self._path, ())  # empties the list of an earlier run
        self._rows[manifest.path], self._broken[manifest.path] = len(manifest) + len(manifest.broken), {}
        self.add_many([Rejection(manifest.path, b.row, b.audio_filepath, b.reason, True) for b in manifest.broken])

    def add_many(self, rejections: list[Rejection]) -> None:
        """Add rejections found before any audio is read, all from one manifest, and print their number by kind."""
        if rejections:
            where = f", listed in {self._path}" if self._path else ""
            manifest = rejections[0].manifest
            left_out = f"{count(len(rejections), 'utterance')} of {manifest} {is_or_are(len(rejections))} skipped"
            kinds = Counter(kind_of(rejection.reason) for rejection in rejections)
            say(f"{left_out}{where}:" + "".join(f"\n  {times:,} x {kind}" for kind, times in kinds.items()))
            self._record(rejections)

    def add(self, rejections: Iterable[Rejection]) -> None:
        """Add rejections found while reading audio and print each one that is new."""
        # An utterance is read again in each epoch: report it once.
        new = [rejection for rejection in rejections if rejection.row not in self._broken[rejection.manifest]]
        for rejection in new:
            say(
                f"Skipped: {rejection.audio_filepath} (row {rejection.row} of {rejection.manifest}): {rejection.reason}"
            )
        self._new += new
        self._record(new)

    def _record(self, rejections: list[Rejection]) -> None:
        self.count += len(rejections)
        if self._path and rejections:
            with self._listing(), open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(rejection), ensure_ascii=False) + "\n" for rejection in rejections)
        for rejection in rejections:
            if rejection.is_broken:  # by row, so that reading it again does not count it twice
                self._broken[rejection.manifest][rejection.row] = rejection
        for manifest in {rejection.manifest for rejection in rejections}:
            self._check(manifest)

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        """Report a list that cannot be written (for example on a full disk) without ending the run."""
        try:
            yield
        except OSError as error:
            say(f"{self._path} cannot be written ({error.strerror}); the list of skipped utterances is incomplete.")

    def _check(self, manifest: str) -> None:
        broken = list(self._broken[manifest].values())
        rows = self._rows[manifest]
        if len(broken) <= self._most * rows:
            return
        lines = [
            f"row {rejection.row}, {rejection.audio_filepath}".removesuffix(", ") + f": {rejection.reason}"
            for rejection in broken[:NAMED]
        ]
        broken_lines = "".join(f"\n  {line}" for line in lines)
        omitted = f"\n  and {count(len(broken) - NAMED, 'other')}" if len(broken) > NAMED else ""
        listed = f" (listed in {self._path})" if self._path else ""
        raise DataError(
            f"{len(broken):,} of the {count(rows, 'row')} of {manifest} {is_or_are(len(broken))} broken, more than "
            f"--max_rejected {self._most:.4g} allows:{broken_lines}{omitted}\n"
            f"Fix or delete them{listed}, or raise --max_rejected."
        )


def kind_of(reason: str) -> str:
    """Return the reason without the utterance's own values, such as "longer than --max_duration 20 s"."""
    return re.split(r": | \(|, not ", re.sub(r"^[\d.]+ \w+ (is|are) ", "", reason))[0]
