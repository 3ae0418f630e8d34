"""Open recordings: metadata and blocks of samples. This module does not import torch."""

import contextlib
import io
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import soundfile

from konkanivani.data.audio.media_reader import FileSlice
from konkanivani.data.audio.paths import LED_OUTSIDE, existing_path, resolved_inside
from konkanivani.errors import DataError

# --------------------
# Location of audio: files and members of tar shards, opened without blocking and never outside of their roots.


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


class DamagedAudio(UnusableAudio):
    """Audio file that the decoder cannot read any further, as a truncated FLAC."""


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


# --------------------
# Chunks of containers.


MAX_CHUNKS = 1000


def iterate_chunks(opened: OpenedAudio, shape: str, begin: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, content offset and stated length in bytes of each chunk from an offset on.

    `shape` is the struct format of a chunk's header.
    """
    size = struct.calcsize(shape)
    is_w64 = size == 24
    is_caf = size == 12
    for _ in range(MAX_CHUNKS):
        head = opened.at(begin, size)
        if len(head) < size:
            return
        name, claimed = struct.unpack(shape, head)
        yield name, begin + size, claimed - size if is_w64 else claimed
        if claimed == 0 and is_w64:
            return  # would repeat the same chunk
        # W64 lengths include the chunk's header and are padded to 8 bytes; RIFF and AIFF pad to 2 bytes, CAF does not.
        if is_w64:
            begin += -(-claimed // 8) * 8
        else:
            begin += size + claimed + (0 if is_caf else claimed % 2)


# --------------------
# Containers with unset length fields, as written by killed recorders and into pipes.
#
# Programs that cannot seek back, or were stopped before they could, leave 0 (or all ones) in the header. FFmpeg reads
# such files to their end; libsndfile reports an empty file or refuses it. `length_patches` returns the header bytes
# that make libsndfile read to the end; they are replaced while reading, the file itself is never changed.


TO_THE_END = 0xFFFFFFFF  # libsndfile reads a WAV, AIFF or AU with this length to the end of the file
UNSET_64 = (0, 2**63 - 1, 2**64 - 1)
DS64_SIZES = 20  # offset of ds64's three fields: size of the RIFF chunk, size of the data chunk, number of frames

Patches = dict[int, bytes]


def length_patches(opened: OpenedAudio) -> Patches:
    """Return the header bytes to replace, by offset in the file; empty if the lengths are set."""
    head = opened.at(0, 16)
    if head[:4] in (b"RIFF", b"RIFX") and head[8:12] == b"WAVE":
        order = "<" if head[:4] == b"RIFF" else ">"
        return _chunk_patches(opened, order, b"data", fixed_bytes=0)
    if head[:4] == b"RF64" and head[8:16] == b"WAVEds64":
        return _ds64_patches(opened)
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        # The 8 bytes are SSND's own fields, offset and block size.
        return _chunk_patches(opened, ">", b"SSND", fixed_bytes=8)
    if head[:4] == b"caff":
        return _caf_patches(opened)
    if head[:4] in (b".snd", b"dns."):
        order = ">" if head[:4] == b".snd" else "<"
        begin, claimed = struct.unpack(f"{order}2L", opened.at(4, 8).ljust(8, b"\xff"))
        if claimed == 0 and opened.size > begin:
            return {8: struct.pack(f"{order}L", TO_THE_END)}
    return {}


def _chunk_patches(opened: OpenedAudio, order: str, name: bytes, fixed_bytes: int) -> Patches:
    """Return the patch of the sample chunk of a WAV or AIFF, in which `fixed_bytes` precede the samples."""
    for chunk_name, begin, claimed in iterate_chunks(opened, f"{order}4sL", 12):
        if chunk_name != name:
            continue
        if claimed in (0, fixed_bytes) and _holds_samples(opened, begin + fixed_bytes, f"{order}4sL"):
            return {begin - 4: struct.pack(f"{order}L", TO_THE_END)}
        break
    return {}


def _ds64_patches(opened: OpenedAudio) -> Patches:
    """Return the patch of an RF64's ds64 chunk."""
    fields = opened.at(DS64_SIZES, 24)
    if len(fields) < 24:
        return {}
    riff, data, frames = struct.unpack("<3Q", fields)
    for name, begin, claimed in iterate_chunks(opened, "<4sL", 12):
        if name != b"data":
            continue
        is_unset = data in UNSET_64 and claimed in (0, TO_THE_END)
        if is_unset and _holds_samples(opened, begin, "<4sL"):
            patches = {DS64_SIZES: struct.pack("<2Q", opened.size - 8, opened.size - begin)}
            patches[begin - 4] = struct.pack("<L", TO_THE_END)  # means that the length is in ds64
            return patches
        break
    return {}


def _caf_patches(opened: OpenedAudio) -> Patches:
    """Return the patch of a CAF's data chunk, in which a length of -1 means "to the end of the file".

    A length beyond the end of the file is patched too.
    """
    for name, begin, claimed in iterate_chunks(opened, ">4sQ", 8):
        if name != b"data":
            continue
        is_unset = claimed in (*UNSET_64, 4)  # 4: the chunk's own field alone, the edit count
        is_truncated = not is_unset and claimed > opened.size - begin  # libsndfile refuses such a file
        if is_truncated or is_unset and _holds_samples(opened, begin + 4, ">4sQ"):
            return {begin - 8: struct.pack(">Q", opened.size - begin)}
        break
    return {}


def _holds_samples(opened: OpenedAudio, start: int, shape: str) -> bool:
    """Return whether the bytes from `start` on are samples, not empty or a list of chunks up to the end of the file.

    A list of chunks means that the file was closed properly and contains no samples.
    """
    # Chunk names must be ASCII: digital silence would otherwise look like a list of empty chunks.
    position = start
    for name, content, claimed in iterate_chunks(opened, shape, start):
        if not all(0x20 <= character < 0x7F for character in name):
            return True
        position = content + claimed + claimed % 2
        if position >= opened.size:
            break
    return position < opened.size or position > opened.size + 1


# --------------------
# Audio files that libsndfile supports, read in blocks from any position.


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
        remaining = count
        while remaining > 0:
            block_size = min(remaining, max(1, PIECE_SAMPLES // self.header.channels))
            piece = self._decode(block_size)
            pieces.append(piece)
            remaining -= len(piece)
            if len(piece) < block_size:
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
        remaining = count
        while remaining > 0:
            block_size = min(remaining, max(1, PIECE_SAMPLES // self.header.channels))
            dropped = len(self._decode(block_size))
            remaining -= dropped
            if dropped < block_size:
                break
        return count - remaining

    def _decode(self, count: int) -> np.ndarray:
        try:
            samples = self.file.read(count, dtype="float32", always_2d=True)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            reason = str(error).removeprefix("Error : ").rstrip(".") or "it cannot be decoded"
            kind = DamagedAudio if isinstance(error, soundfile.LibsndfileError) else UnusableAudio
            raise kind(self.source, reason) from None
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
