"""Where audio lies: files and members of tar shards, opened without waiting and never outside of their roots.

No torch here.
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
    """Where an utterance's audio lies.

    `byte_count` > 0: the audio file is those bytes of the file at `path`, from `byte_offset` on (a tar shard's member).
    `start` None: all of the audio file, which lasts `seconds` where those are known; else the span of `seconds` from
    there on. `roots`: the folders in which the file must lie, links resolved (None: anywhere, a person named it).
    `channel`: the only channel to read, from 0 (None: all of them).
    """

    path: str
    byte_offset: int = 0
    byte_count: int = 0
    start: float | None = None
    seconds: float | None = None
    roots: tuple[str, ...] | None = field(default=None, compare=False, repr=False)
    channel: int | None = None

    def __str__(self) -> str:
        inside = f" at byte {self.byte_offset}" if self.byte_count else ""
        span = "" if self.start is None else f" from {self.start:g} s to {self.start + self.seconds:g} s"
        return f"{self.path}{inside}{span}"


class UnusableAudio(DataError):
    """An audio file that cannot be read, or is not what is said of it; `reason` is without its name."""

    def __init__(self, source: AudioSource, reason: str) -> None:
        super().__init__(f"The audio file {source} cannot be read: {reason}. Repair the file, or leave it out.")
        self.reason = reason

    def __reduce__(self) -> tuple:
        return DataError, self.args


@dataclass(frozen=True)
class AudioHeader:
    """What an audio file says of itself; `frames` samples a channel, `rate` in Hz.

    `missing`: so many seconds more its header claims than the file has bytes for.
    """

    frames: int
    rate: int
    channels: int
    missing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def duration_tolerance(seconds: float) -> float:
    """How far an audio file's duration may be from the `seconds` that are said of it, in seconds.

    Manifests round their seconds, and formats with loss add a few at the ends.
    """
    return 0.1 + 0.02 * seconds


@dataclass(frozen=True)
class OpenedAudio:
    """An audio file that has been opened: `size` bytes of `file` from `begin` on. What the name leads to by now is
    nobody's concern.
    """

    source: AudioSource
    file: io.BufferedReader
    begin: int
    size: int

    def at(self, place: int, count: int) -> bytes:
        """At most so many of its bytes from there on; none beyond its end or where they cannot be read."""
        if not 0 <= place < self.size:
            return b""
        try:
            return os.pread(self.file.fileno(), min(count, self.size - place), self.begin + place)
        except OSError:
            return b""


@contextlib.contextmanager
def opened_audio(source: AudioSource) -> Iterator[OpenedAudio]:
    """The source's file for as long as the block; an UnusableAudio where there is none."""
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
    """The regular file that holds the audio; an UnusableAudio or an OSError where there is none, or none allowed.

    A name that is only there in another Unicode normal form is that file. What is no file, or lies outside, is never
    opened; where one takes a file's place in between, that does no harm.
    """
    path = existing_path(source.path)
    if source.roots is not None:
        path = resolved_inside(path, source.roots)
    if path is None:
        raise UnusableAudio(source, LED_OUTSIDE)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnusableAudio(source, "it is not a file")
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableAudio(source, "it is not a file")
    return file
