"""Rejected utterances of a run, and the limit on their share of a manifest."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from konkanivani.console import count, is_or_are, say
from konkanivani.data.manifest import Manifest
from konkanivani.errors import DataError
from konkanivani.files import write_json_lines

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
        self._news: list[Rejection] = []
        self.count = 0

    def news(self) -> tuple[Rejection, ...]:
        """Return the rejections added by `add` since the last call, to be sent to the other ranks."""
        news = tuple(self._news)
        self._news = []
        return news

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
            self._take(rejections)

    def add(self, rejections: Iterable[Rejection]) -> None:
        """Add rejections found while reading audio and print each one that is new."""
        # An utterance is read again in each epoch: report it once.
        new = [found for found in rejections if found.row not in self._broken[found.manifest]]
        for found in new:
            say(f"Skipped: {found.audio_filepath} (row {found.row} of {found.manifest}): {found.reason}")
        self._news += new
        self._take(new)

    def _take(self, rejections: list[Rejection]) -> None:
        self.count += len(rejections)
        if self._path and rejections:
            with self._listing(), open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(found), ensure_ascii=False) + "\n" for found in rejections)
        for found in rejections:
            if found.is_broken:  # by row, so that reading it again does not count it twice
                self._broken[found.manifest][found.row] = found
        for manifest in {found.manifest for found in rejections}:
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
        told = [f"row {one.row}, {one.audio_filepath}".removesuffix(", ") + f": {one.reason}" for one in broken[:NAMED]]
        named = "".join(f"\n  {line}" for line in told)
        others = f"\n  and {count(len(broken) - NAMED, 'other')}" if len(broken) > NAMED else ""
        listed = f" (listed in {self._path})" if self._path else ""
        raise DataError(
            f"{len(broken):,} of the {count(rows, 'row')} of {manifest} {is_or_are(len(broken))} broken, more than "
            f"--max_rejected {self._most:.4g} allows:{named}{others}\n"
            f"Fix or delete them{listed}, or raise --max_rejected."
        )


def kind_of(reason: str) -> str:
    """Return the reason without the utterance's own values, such as "longer than --max_duration 20 s"."""
    return re.split(r": | \(|, not ", re.sub(r"^[\d.]+ \w+ (is|are) ", "", reason))[0]
