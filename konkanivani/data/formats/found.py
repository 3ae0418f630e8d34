"""Interface between the format readers and the preparation: corpus folder, unchecked utterances and unusable rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path


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
