"""A file that libsndfile knows, read from its beginning or from a place in it, block by block."""

import numpy as np
import soundfile

from konkanivani.data.audio.media_reader import FileSlice
from konkanivani.data.audio.source import AudioHeader, OpenedAudio, UnusableAudio

# An MP3's frame needs bits of those before it. Where libmpg123 jumps into the middle it has none of them, says so on
# stderr and makes noise of it: so much is decoded before a span, in seconds, and none is jumped over where that is all.
MP3_RUN_UP, MP3_NO_JUMP = 1.0, 60.0


class NotKnown(Exception):
    """Libsndfile knows no such file; its words for it."""


class SndfileSound:
    """What libsndfile decodes of a file. Where `is_counted`, `header.frames` is how many there are to read."""

    is_counted = True

    def __init__(self, opened: OpenedAudio) -> None:
        """Raises a NotKnown where libsndfile does not know what that is."""
        self.source = opened.source
        inside = _Member(opened.file.fileno(), opened.begin, opened.size) if self.source.byte_count else None
        try:
            self.file = _Forward(inside or opened.file.fileno(), closefd=False)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # soundfile's own errors are RuntimeErrors
            is_its_own = isinstance(error, soundfile.LibsndfileError)
            raise NotKnown(str(error).rsplit(": ", 1)[-1].rstrip(".") if is_its_own else str(error)) from None
        self.header = AudioHeader(self.file.frames, self.file.samplerate, self.file.channels)

    def read(self, count: int) -> np.ndarray:
        """The next samples (frames, channels) float32, `count` of them, fewer at the end."""
        try:
            return self.file.read(count, dtype="float32", always_2d=True)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            reason = str(error).removeprefix("Error : ").rstrip(".") or "it cannot be decoded"
            raise UnusableAudio(self.source, reason) from None

    def skip(self, count: int) -> int:
        """Goes on by so many frames from the beginning; how many there were."""
        rate, run_up = self.header.rate, 0
        if self.file.format == "MP3":
            run_up = count if count <= MP3_NO_JUMP * rate else round(MP3_RUN_UP * rate)
        if run_up < count:
            try:
                self.file.seek(count - run_up)
            except (OSError, RuntimeError, ValueError) as error:
                raise UnusableAudio(self.source, str(error).removeprefix("Error : ").rstrip(".")) from None
        return count - run_up + (len(self.read(run_up)) if run_up else 0)

    def count(self) -> int:
        return self.header.frames

    def close(self) -> None:
        self.file.close()


class _Member(FileSlice):
    """A shard's member as a file; a disk that fails ends it, for what is raised here cffi prints."""

    def read(self, count: int) -> bytes:
        try:
            return super().read(count)
        except OSError:
            return b""


class _Forward(soundfile.SoundFile):
    """A file of which soundfile does not say after each block where it is, as if libsndfile had not read it.

    To MP3 that is a jump: the bits that the next frame takes from those before it are gone, and libmpg123 says so on
    stderr and makes noise of it.
    """

    def seekable(self) -> bool:
        return False
