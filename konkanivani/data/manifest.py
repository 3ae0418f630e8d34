"""JSONL manifests as lazily read sequences of utterances; utterance.py describes a row."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from konkanivani.base.auto_defaults import CorpusSize
from konkanivani.base.errors import DataError, ErrorCollector, explained
from konkanivani.base.files import write_json_lines
from konkanivani.data.audio.roots import audio_roots
from konkanivani.data.index import ManifestIndex, open_index
from konkanivani.data.utterance import BadRow, Utterance, parse_row, row_of

MAX_TOKENIZER_TEXTS = 500_000
ADVICE = "Give the path of a JSONL manifest."


class Manifest:
    """Valid rows of a manifest in the order of the file.

    Only the index is held in memory or memory-mapped; each access reads the row from the file. `durations` (rows,) are
    in seconds; `broken` are the invalid rows.
    """

    def __init__(self, path: str, index: ManifestIndex, named_roots: tuple[str, ...] = ()) -> None:
        self.path = path
        self.index = index
        self.named_roots = named_roots
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
            return parse_row(line, self._folder, row, self._roots)
        except BadRow as error:
            raise DataError(
                f"{self.path}, row {row}: {error}. The row was valid before: do not change a manifest while it "
                "is in use."
            ) from None

    def __reduce__(self) -> tuple:
        # A file descriptor cannot be pickled: the other process opens the file and maps the index itself.
        return read_manifest, (self.path, self.named_roots)

    def __del__(self) -> None:
        file: int | None = getattr(self, "_file", None)  # __init__ may have failed before setting it
        if file is not None:
            os.close(file)


def read_manifest(path: str | Path, named_roots: tuple[str, ...] = ()) -> Manifest:
    """Open the manifest at `path`; raise a `DataError` if it cannot be read or is empty.

    Audio must be in the manifest's folder or in one of the `named_roots`; rows with other paths count as broken.
    """
    with explained(DataError, f"The manifest {path} cannot be read", ADVICE):
        index = open_index(Path(path), named_roots)
    if not len(index.starts) and not index.broken:
        raise DataError(
            f"The manifest {path} is empty. Each line must be a JSON object with audio_filepath, duration and text."
        )
    return Manifest(str(path), index, named_roots)


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
    """Return the hours and utterances of the valid rows, and the number of distinct words if the corpus is small."""
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
