"""Audio files that libsndfile supports, read in blocks from any position."""

import os

import numpy as np
import soundfile

from konkanivani.data.audio.media_reader import FileSlice
from konkanivani.data.audio.source import AudioHeader, OpenedAudio, UnusableAudio
from konkanivani.data.audio.unset_lengths import Patches, length_patches

# An MP3 frame uses bits of earlier frames (the bit reservoir). After a seek libmpg123 lacks them, prints a warning to
# stderr and decodes noise. Therefore MP3_RUN_UP seconds before a span are decoded and dropped, and spans that start
# within the first MP3_NO_JUMP seconds are reached without a seek.
MP3_RUN_UP = 1.0
MP3_NO_JUMP = 60.0
UNKNOWN_FRAMES = 2**62  # libsndfile reports at least this many frames for a FLAC of unknown length
# mpg123 estimates the length of an MP3 without Xing, Info or VBRI header from the bit rate of its first frame, and
# libsndfile stops there. Bit rates differ by a factor of at most 40 (8 to 320 kbit/s), so a file that claims to be 64
# times larger is read to its true end.
MP3_LENGTH_HEADERS = (b"Xing", b"Info", b"VBRI")
MP3_RATE_RANGE = 64
ID3_HEAD = 10  # bytes
ID3V1_TAG = 128  # bytes at the end of a file
PIECE_SAMPLES = 2**20  # of all channels together, decoded at a time if the length is unknown


class NotKnown(Exception):
    """File that libsndfile does not support, with its message."""


class SndfileSound:
    """Audio file decoded by libsndfile.

    If `is_counted`, `header.frames` is the number of frames that can be read. Otherwise the file does not state its
    length (as a streamed FLAC, whose STREAMINFO has 0 total samples), `header.frames` is 0, and the frames must be
    decoded to count them.
    """

    def __init__(self, opened: OpenedAudio, most_frames: int, most_seconds: float) -> None:
        """Open the file. A file of unknown length is refused as soon as it decodes to more frames or seconds.

        Raises:
            NotKnown: libsndfile does not support the format.
        """
        self.source = opened.source
        self.size = opened.size
        self.done = 0
        patches = length_patches(opened)
        if patches or self.source.byte_count:
            self.file = _open_file(_Member(opened, patches))
        else:
            self.file = _open_file(opened.file.fileno())
        self.is_counted = self.file.frames < UNKNOWN_FRAMES
        if self.file.format == "MP3" and not _has_length_header(opened):
            self.file.close()
            self.file = _open_file(_Member(opened, patches, opened.size * MP3_RATE_RANGE))
            self.is_counted = False
        frames = self.file.frames if self.is_counted else 0
        self.header = AudioHeader(frames, self.file.samplerate, self.file.channels)
        self.most_frames = min(most_frames, int(most_seconds * self.header.rate))
        can_seek = soundfile.SoundFile.seekable(self.file)  # not _Forward's; libsndfile cannot seek in GSM 6.10
        self.skips_by_decoding = not (self.is_counted and can_seek)

    def read(self, count: int) -> np.ndarray:
        """Return the next `count` samples (frames, channels) float32, fewer at the end."""
        if self.is_counted:
            return self._decode(count)
        # In pieces: soundfile allocates `count` frames in advance, which may be eleven days.
        pieces = [np.empty((0, self.header.channels), np.float32)]
        left = count
        while left > 0:
            wanted = min(left, max(1, PIECE_SAMPLES // self.header.channels))
            piece = self._decode(wanted)
            pieces.append(piece)
            left -= len(piece)
            if len(piece) < wanted:
                break
        return np.concatenate(pieces) if len(pieces) != 2 else pieces[1]

    def skip(self, count: int) -> int:
        """Skip `count` frames and return how many there were."""
        if self.skips_by_decoding:
            return self._decode_and_drop(count)
        rate = self.header.rate
        run_up = 0
        if self.file.format == "MP3":
            run_up = count if count <= MP3_NO_JUMP * rate else round(MP3_RUN_UP * rate)
        if run_up < count:
            try:
                self.file.seek(count - run_up)
            except (OSError, RuntimeError, ValueError) as error:
                raise UnusableAudio(self.source, str(error).removeprefix("Error : ").rstrip(".")) from None
        return count - run_up + (len(self.read(run_up)) if run_up else 0)

    def count(self) -> int:
        """Return the number of frames; a file of unknown length is decoded to its end."""
        if self.is_counted:
            return self.header.frames
        return self.done + self._decode_and_drop(self.most_frames + 1)

    def close(self) -> None:
        self.file.close()

    def _decode_and_drop(self, count: int) -> int:
        left = count
        while left > 0:
            wanted = min(left, max(1, PIECE_SAMPLES // self.header.channels))
            dropped = len(self._decode(wanted))
            left -= dropped
            if dropped < wanted:
                break
        return count - left

    def _decode(self, count: int) -> np.ndarray:
        try:
            samples = self.file.read(count, dtype="float32", always_2d=True)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            reason = str(error).removeprefix("Error : ").rstrip(".") or "it cannot be decoded"
            raise UnusableAudio(self.source, reason) from None
        self.done += len(samples)
        if not self.is_counted and self.done > self.most_frames:
            seconds = self.done / self.header.rate
            raise UnusableAudio(self.source, f"its {self.size} bytes decode to more than {seconds:.0f} s")
        return samples


def _open_file(file: "int | _Member") -> "_Forward":
    """Open a descriptor or a file object with libsndfile; raise `NotKnown` if it does not support the format."""
    try:
        return _Forward(file, closefd=False)
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # soundfile's own errors are RuntimeErrors
        is_its_own = isinstance(error, soundfile.LibsndfileError)
        raise NotKnown(str(error).rsplit(": ", 1)[-1].rstrip(".") if is_its_own else str(error)) from None


def _has_length_header(opened: OpenedAudio) -> bool:
    """Return whether an MP3's first frame, after an optional ID3v2 tag, states the number of frames."""
    begin = 0
    head = opened.at(0, ID3_HEAD)
    if head[:3] == b"ID3" and len(head) == ID3_HEAD:
        # ID3v2 sizes are synchsafe integers: 7 bits per byte.
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        begin = ID3_HEAD + size
    frame = opened.at(begin, 2**12)
    return any(name in frame for name in MP3_LENGTH_HEADERS)


class _Member(FileSlice):
    """File object of `claimed_size` bytes for a member of a tar shard, or for a file with a patched header."""

    def __init__(self, opened: OpenedAudio, patches: Patches, claimed_size: int = 0) -> None:
        super().__init__(opened.file.fileno(), opened.begin, opened.size)
        self.patches = patches
        self.claimed_size = claimed_size or opened.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, limited to 0 and `claimed_size`, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.claimed_size}[whence]
        self.at = min(max(base + offset, 0), self.claimed_size)
        return self.at

    def read(self, count: int) -> bytes:
        """Return the next bytes, with the patches applied."""
        first = self.at
        if first >= max(self.size, self.claimed_size - ID3V1_TAG):
            # mpg123 looks for an ID3v1 tag at the claimed end and fails if it cannot read there: return zeros.
            self.at = min(first + count, self.claimed_size)
            return bytes(self.at - first)
        try:
            piece = super().read(count)
        except OSError:
            return b""  # the end of the file: an exception in this callback would only be printed by cffi
        for place, content in self.patches.items():
            begin = max(place, first)
            end = min(place + len(content), first + len(piece))
            if begin < end:
                piece = piece[: begin - first] + content[begin - place : end - place] + piece[end - first :]
        return piece


class _Forward(soundfile.SoundFile):
    """Sound file in which soundfile does not seek after each block."""

    def seekable(self) -> bool:
        # After a read, soundfile seeks a seekable file to the position that it already has. In an MP3 even that drops
        # the bit reservoir: libmpg123 prints a warning to stderr and decodes noise.
        return False
