"""What a format finds in a corpus: utterances as the corpus gives them, unchecked, and rows that it cannot use."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class SpeechFolder:
    """What a format is asked to read: the corpus's folder, and what the command line says about it ("": nothing).

    Audio that a table holds as bytes is written to files in `embedded_audio`; no other format writes anything.
    Audio may lie in `audio_root` (None: where `path` is). The preparation says where both are.
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
        """`file` relative to the corpus's folder, where it lies in it."""
        return str(file.relative_to(self.path)) if file.is_relative_to(self.path) else str(file)

    def table_path(self) -> Path:
        """Where --table lies: in the corpus's folder, else where the command was started."""
        inside = self.path / self.table
        return inside if inside.exists() else Path(self.table)


@dataclass(frozen=True)
class FoundUtterance:
    """An utterance as row `row` (from 1) of `file` gives it.

    `byte_count` > 0: its audio is a part of the file at `audio`. `seconds` is the length of a span that begins at
    `start`, None for all that follows. `file_seconds` is how long the corpus says the whole audio file is. `split` is
    `train`, `valid`, `test`, or empty where the corpus gives none. `channel` is the only channel to use, from 0 (None:
    the mean of all); `is_channel_label` if it is a label that a file of one channel may carry too (Kaldi).
    `removed` are the format characters that were removed from its text.
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
        """This with what a row says of its seconds: with an offset they are a span's, else the whole file's."""
        if offset is None:
            return replace(self, file_seconds=duration)
        return replace(self, start=offset, seconds=duration)

    def refused(self, kind: str, reason: str) -> "RefusedRow":
        """This row as one that cannot be used."""
        return RefusedRow(self.file, self.row, kind, reason, str(self.audio))


@dataclass(frozen=True)
class RefusedRow:
    """A row that is left out: where it stands, the kind of reason (they are counted by kind) and the reason.

    An expected one is listed, but does not count as damage: the corpus's own makers leave such rows out too.
    """

    file: str
    row: int
    kind: str
    reason: str
    audio_filepath: str = ""
    is_expected: bool = False


Found = Iterator[FoundUtterance | RefusedRow]
