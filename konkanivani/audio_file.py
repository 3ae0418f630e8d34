"""Audio files by their headers and their samples: a whole file, a span of it, or a file inside a tar shard.

No torch here. Nothing is decoded before its header has passed the limits below.
"""

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import soundfile

from konkanivani.audio_roots import LED_OUTSIDE, resolved_inside
from konkanivani.errors import DataError

MOST_CHANNELS = 32
LOWEST_RATE, HIGHEST_RATE = 4_000, 384_000  # Hz
PIECE_BYTES = 2**20  # read at once
MOST_BYTES = 2**30  # of samples decoded at once
LONGEST_FILE_SECONDS = 1e6  # eleven days: a header that claims more is wrong
MOST_FRAMES_A_BYTE = 8192  # a FLAC of silence has up to 6000: 65535 samples in a frame of 11 bytes


@dataclass(frozen=True)
class AudioSource:
    """Where an utterance's audio lies.

    `byte_count` > 0: the audio file is those bytes of the file at `path`, from `byte_offset` on (a tar shard's member).
    `start` None: all of the audio file, which lasts `seconds` where those are known; else the span of `seconds` from
    there on. `roots`: the folders in which the file must lie, links resolved (None: anywhere, a person named it).
    """

    path: str
    byte_offset: int = 0
    byte_count: int = 0
    start: float | None = None
    seconds: float | None = None
    roots: tuple[str, ...] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        inside = f" at byte {self.byte_offset}" if self.byte_count else ""
        span = "" if self.start is None else f" from {self.start:g} s to {self.start + self.seconds:g} s"
        return f"{self.path}{inside}{span}"


class UnusableAudio(DataError):
    """An audio file that cannot be read, or is not what is said of it; `reason` is without its name."""

    def __init__(self, source: AudioSource, reason: str) -> None:
        super().__init__(f"The audio file {source} cannot be read: {reason}. Mend the file or leave it out.")
        self.reason = reason

    def __reduce__(self) -> tuple:
        return DataError, self.args


@dataclass(frozen=True)
class AudioHeader:
    """What an audio file says of itself; `frames` samples a channel, `rate` in Hz."""

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.frames / self.rate


def duration_tolerance(seconds: float) -> float:
    """How far an audio file's duration may be from the `seconds` that are said of it, in seconds.

    Manifests round their seconds, and formats with loss add a few at the ends.
    """
    return 0.1 + 0.02 * seconds


def read_bytes(source: AudioSource) -> Iterator[bytes]:
    """The bytes of the audio file as they lie there, piece by piece; an OSError where they cannot be read."""
    left = source.byte_count or sys.maxsize
    with _open_file(source) as file:
        file.seek(source.byte_offset)
        while piece := file.read(min(PIECE_BYTES, left)):
            left -= len(piece)
            yield piece


def read_header(source: AudioSource) -> AudioHeader:
    """The header of the audio file (not of a span of it); an UnusableAudio says why it cannot be used."""
    with _open(source) as file:
        return _header(file, source)


def read_samples(source: AudioSource, most_seconds: float = float("inf")) -> tuple[np.ndarray, int]:
    """The source's samples (frames, channels) float32 and their rate in Hz; a span is all that is decoded of a file.

    Of a longer source only the first `most_seconds` are decoded; the whole of it must be there all the same.
    An UnusableAudio names the source and says what is wrong with it.
    """
    with _open(source) as file:
        header = _header(file, source)
        first, count = _span(header, source)
        count = int(min(count, most_seconds * header.rate))
        if 4 * count * header.channels > MOST_BYTES:
            raise _unusable(source, f"{count / header.rate:.0f} s of {header.channels} channels are too much at once")
        try:
            if first:
                file.seek(first)
            samples = file.read(count, dtype="float32", always_2d=True)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise _unusable(source, _undecodable(error)) from None
    if not len(samples):
        raise _unusable(source, "it holds no samples")
    if len(samples) < 0.9 * count:
        raise _unusable(source, f"it breaks off after {len(samples) / header.rate:.2f} s")
    if not np.isfinite(samples).all():
        raise _unusable(source, "it holds samples that are not numbers")
    return samples, header.rate


def read_blocks(source: AudioSource, seconds: float) -> Iterator[np.ndarray]:
    """An audio file of any length, block by block of about so many seconds: samples (frames, channels) float32.

    An UnusableAudio says what is wrong with it, as soon as that is seen: a file that breaks off does so at its end.
    """
    with _open(source) as file:
        header, done = _header(file, source), 0
        while done < header.frames:
            count = min(max(1, int(seconds * header.rate)), header.frames - done)
            try:
                samples = file.read(count, dtype="float32", always_2d=True)
            except (OSError, RuntimeError, ValueError, MemoryError) as error:
                raise _unusable(source, _undecodable(error)) from None
            done += len(samples)
            if len(samples) < count and done < 0.9 * header.frames:
                raise _unusable(source, f"it breaks off after {done / header.rate:.2f} s")
            if not np.isfinite(samples).all():
                raise _unusable(source, "it holds samples that are not numbers")
            if not len(samples):
                return
            yield samples


def _undecodable(error: Exception) -> str:
    return str(error).removeprefix("Error : ").rstrip(".") or "it cannot be decoded"


def _span(header: AudioHeader, source: AudioSource) -> tuple[int, int]:
    """The first frame to read and how many; an UnusableAudio where the file does not hold what is said of it."""
    if source.start is None:
        said = header.seconds if source.seconds is None else source.seconds
        if abs(header.seconds - said) > duration_tolerance(said):
            raise _unusable(source, f"it lasts {header.seconds:.2f} s, not the {source.seconds:.2f} s of its row")
        return 0, header.frames
    first, count = round(source.start * header.rate), round(source.seconds * header.rate)
    if first >= header.frames or first + count > header.frames + 0.1 * header.rate:
        raise _unusable(source, f"it ends at {header.seconds:.2f} s")
    return first, min(count, header.frames - first)


class _Window(io.RawIOBase):
    """The bytes of a shard's member as a file of their own; only what is asked for is read.

    Positions outside it are moved to its ends, and a disk that fails ends it: what is raised here, cffi prints.
    """

    def __init__(self, file: io.BufferedReader, begin: int, size: int) -> None:
        self.file, self.begin, self.size, self.at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = min(max(base + offset, 0), self.size)
        return self.at

    def readinto(self, target: memoryview) -> int:
        wanted = memoryview(target)[: self.size - self.at]
        try:
            self.file.seek(self.begin + self.at)
            count = self.file.readinto(wanted)
        except OSError:
            count = 0
        self.at += count
        return count


def _open_file(source: AudioSource) -> io.BufferedReader:
    """The regular file that holds the audio; an UnusableAudio or an OSError where there is none, or none allowed.

    What is no file, or lies outside, is never opened; where one takes a file's place in between, that does no harm.
    """
    path = source.path if source.roots is None else resolved_inside(source.path, source.roots)
    if path is None:
        raise _unusable(source, LED_OUTSIDE)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _unusable(source, "it is no file")
    file = open(path, "rb", opener=_open_without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _unusable(source, "it is no file")
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


@contextlib.contextmanager
def _open(source: AudioSource) -> Iterator[soundfile.SoundFile]:
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(_open_file(source))
            size = os.fstat(file.fileno()).st_size
            if source.byte_count and source.byte_offset + source.byte_count > size:
                raise _unusable(source, f"its shard ends at byte {size}")
        except (OSError, ValueError) as error:
            reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
            raise _unusable(source, reason) from None
        try:
            inside = _Window(file, source.byte_offset, source.byte_count) if source.byte_count else None
            # What has been opened is read, whatever has the name by now.
            sound = opened.enter_context(soundfile.SoundFile(inside or file.fileno(), closefd=False))
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # soundfile's own errors are RuntimeErrors
            is_its_own = isinstance(error, soundfile.LibsndfileError)
            reason = str(error).rsplit(": ", 1)[-1].rstrip(".") if is_its_own else error
            raise _unusable(source, f"it cannot be opened as audio ({reason})") from None
        yield sound


def _header(file: soundfile.SoundFile, source: AudioSource) -> AudioHeader:
    header = AudioHeader(file.frames, file.samplerate, file.channels)
    if not 1 <= header.channels <= MOST_CHANNELS:
        raise _unusable(source, f"{header.channels} channels are more than {MOST_CHANNELS}")
    if not LOWEST_RATE <= header.rate <= HIGHEST_RATE:
        raise _unusable(source, f"{header.rate} Hz is not between {LOWEST_RATE} and {HIGHEST_RATE} Hz")
    if header.frames <= 0:
        raise _unusable(source, "it holds no samples")
    if header.seconds > LONGEST_FILE_SECONDS:
        raise _unusable(source, f"its header claims {header.seconds / 3600:.0f} hours")
    size = source.byte_count or os.path.getsize(source.path)
    if header.frames > MOST_FRAMES_A_BYTE * size:
        raise _unusable(source, f"its header claims {header.seconds:.0f} s, which {size} bytes cannot hold")
    return header


def _unusable(source: AudioSource, reason: object) -> UnusableAudio:
    return UnusableAudio(source, str(reason))
