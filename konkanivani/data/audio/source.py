"""Location of audio: files and members of tar shards, opened without blocking and never outside of their roots.

This module does not import torch.
"""

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from konkanivani.base.errors import DataError
from konkanivani.data.audio.roots import LED_OUTSIDE, resolved_inside
from konkanivani.data.audio.unicode_paths import existing_path


@dataclass(frozen=True)
class AudioSource:
    """Location of an utterance's audio.

    Args:
        path: The audio file, or the tar shard that contains it.
        byte_offset: First byte of the audio file in a tar shard.
        byte_count: Bytes of the audio file in a tar shard; 0 if `path` is the audio file.
        start: First second of the utterance in the audio file; None for the whole file.
        seconds: Duration of the utterance; None if unknown.
        roots: Folders that must contain the file after links are resolved; None for any (the user named the file).
        channel: The only channel to read, counted from 0; None for all channels.
    """

    path: str
    byte_offset: int = 0
    byte_count: int = 0
    start: float | None = None
    seconds: float | None = None
    roots: tuple[str, ...] | None = field(default=None, compare=False, repr=False)
    channel: int | None = None

    @property
    def span(self) -> tuple[float, float] | None:
        """Return the start and the duration of a part of the file, in seconds; None for the whole file."""
        if self.start is None:
            return None
        if self.seconds is None:
            raise ValueError(f"an utterance that starts at {self.start:g} s of {self.path} has no duration")
        return self.start, self.seconds

    def __str__(self) -> str:
        inside = f" at byte {self.byte_offset}" if self.byte_count else ""
        if self.span is None:
            return f"{self.path}{inside}"
        start, seconds = self.span
        return f"{self.path}{inside} from {start:g} s to {start + seconds:g} s"


class UnusableAudio(DataError):
    """Audio file that cannot be read or contradicts its manifest row; `reason` does not contain the file's name."""

    def __init__(self, source: AudioSource, reason: str) -> None:
        super().__init__(f"The audio file {source} cannot be read: {reason}. Repair the file, or leave it out.")
        self.reason = reason

    def __reduce__(self) -> tuple:
        # The default would call __init__ with the message alone; workers send errors to the training process by pickle.
        return DataError, self.args


@dataclass(frozen=True)
class AudioHeader:
    """Header of an audio file: `frames` samples per channel, `rate` in Hz.

    `missing` is the number of seconds that the header states beyond the end of the file.
    """

    frames: int
    rate: int
    channels: int
    missing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def duration_tolerance(seconds: float) -> float:
    """Return the allowed difference, in seconds, between an audio file's duration and its stated `seconds`."""
    # Manifests round durations, and lossy formats pad both ends.
    return 0.1 + 0.02 * seconds


@dataclass(frozen=True)
class OpenedAudio:
    """Open audio file: a range of `size` bytes in `file`.

    The path is not resolved again, so replacing the file in the meantime has no effect.
    """

    source: AudioSource
    file: io.BufferedReader
    begin: int
    size: int

    def at(self, place: int, count: int) -> bytes:
        """Return at most `count` bytes from byte `place` on; none past the end or on a read error."""
        if not 0 <= place < self.size:
            return b""
        try:
            return os.pread(self.file.fileno(), min(count, self.size - place), self.begin + place)
        except OSError:
            return b""


@contextlib.contextmanager
def opened_audio(source: AudioSource) -> Iterator[OpenedAudio]:
    """Open the source's file for the duration of the block; raise `UnusableAudio` if that fails."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open_file(source))
            size = os.fstat(file.fileno()).st_size
        except (OSError, ValueError) as error:
            reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise UnusableAudio(source, reason) from None
        if source.byte_count and source.byte_offset + source.byte_count > size:
            raise UnusableAudio(source, f"its shard ends at byte {size}")
        begin = source.byte_offset if source.byte_count else 0
        yield OpenedAudio(source, file, begin, source.byte_count or size)


def open_file(source: AudioSource) -> io.BufferedReader:
    """Open the regular file that contains the audio.

    A path that exists only in another Unicode normal form is accepted. Anything that is not a regular file, or is
    outside of the source's roots, is never opened.

    Raises:
        UnusableAudio: The path is not a regular file, or is outside of the roots.
        OSError: The file does not exist or cannot be opened.
    """
    path = existing_path(source.path)
    if source.roots is not None:
        inside = resolved_inside(path, source.roots)
        if inside is None:
            raise UnusableAudio(source, LED_OUTSIDE)
        path = inside
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnusableAudio(source, "it is not a file")
    # A pipe or a terminal may have replaced the file since the check above. With these flags the open does not block,
    # and a terminal does not become the controlling one.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableAudio(source, "it is not a file")
    return file
