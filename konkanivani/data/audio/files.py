"""Recordings as files: opening and reading of segments, from a path or from standard input.

libsndfile reads the formats that it supports; FFmpeg reads the others in a separate process. This process decodes a
file only after its header has passed the limits below. This module does not import torch.
"""

import contextlib
import hashlib
import math
import os
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from konkanivani.data.audio.media import INSTALL, MediaSound, is_installed, may_be_media
from konkanivani.data.audio.sound import (
    AudioHeader,
    AudioSource,
    DamagedAudio,
    NotKnown,
    OpenedAudio,
    SndfileSound,
    UnusableAudio,
    duration_tolerance,
    iterate_chunks,
    open_file,
    opened_audio,
)
from konkanivani.errors import DataError, ResourceError, explained

# --------------------
# Channel selection for recordings with one speaker per channel; channels are counted from 0.


MEAN = "omit it for the mean of all channels"
NO_COLUMN = "none"
"""Value of --channel_column for not reading channels from a table."""


def as_label(value: object) -> str:
    """Return a row's label as text, such as a speaker's name or number; "" for null and false."""
    return "" if value is None or value is False else str(value)


def parse_channel(fields: Mapping[str, object]) -> int | None:
    """Return the channel of a JSON row; None if it has none, which means the average of all channels.

    The field is `channel`, or NeMo's `channel_selector`, in which `"average"` is allowed too. Raise a `ValueError` for
    any other value: a bool, a float, a string or a negative number is never rounded or converted.
    """
    name = "channel" if fields.get("channel") is not None else "channel_selector"
    value = fields.get(name)
    if value is None or (name == "channel_selector" and value == "average"):
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be the number of a channel, from 0, not {value!r:.200}: {MEAN}")
    return value


def parse_channel_cell(cell: object, column: str) -> int | None:
    """Return the channel in a table's cell, None if it is empty; raise a `ValueError` as `parse_channel` does.

    The cells of a text table are strings of digits, the cells of a typed table are integers.
    """
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    # A bool is an int, but its repr is not decimal, so that it is rejected below.
    text = cell.strip() if isinstance(cell, str) else repr(cell)
    if isinstance(cell, (int, str)) and text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    raise ValueError(
        f"its column {column} must be the number of a channel, from 0, not {cell!r:.200}: leave it empty for "
        f"the mean of all channels, or give --channel_column {NO_COLUMN} if the column is something else"
    )


def channel_error(channel: int | None, channels: int) -> str:
    """Return an error message if a file with `channels` channels lacks `channel`; otherwise an empty string."""
    if channel is None or channel < channels:
        return ""
    holds = "1 channel" if channels == 1 else f"{channels} channels"
    return f"it has no channel {channel}: it has {holds}, counted from 0"


def select_channel(samples: np.ndarray, channel: int | None) -> np.ndarray:
    """Return the channel's samples (frames, 1), or `samples` (frames, channels) if `channel` is None."""
    # A copy, so that the memory of the other channels can be freed.
    return samples if channel is None else np.ascontiguousarray(samples[:, channel : channel + 1])


# --------------------
# Standard input stored in a temporary file, because a pipe cannot seek.


SIGN = "-"  # path that stands for standard input
STDIN_LIMIT = 2**32  # maximum size of a WAV file
PIECE_BYTES = 2**20


@contextlib.contextmanager
def spooled_input() -> Iterator[Path]:
    """Store standard input in a file; yield a path that this process and its children can open.

    Raises:
        DataError: Standard input exceeds `STDIN_LIMIT`.
        ResourceError: There is not enough disk space.
    """
    failure = f"Standard input cannot be stored in {tempfile.gettempdir()}"
    # The file has no directory entry: nothing remains on the disk however the process ends.
    with tempfile.TemporaryFile() as file:
        with explained(ResourceError, failure, "Free disk space there, or set TMPDIR to another folder."):
            while piece := sys.stdin.buffer.read(PIECE_BYTES):
                file.write(piece)
                if file.tell() > STDIN_LIMIT:
                    raise DataError(
                        f"Standard input exceeds {STDIN_LIMIT / 2**30:.0f} GiB. Save it as a file and give its path."
                    )
            file.flush()
        # /dev/fd would name the child's own descriptors; /proc/PID/fd names this process's.
        folder = Path("/proc", str(os.getpid()), "fd")
        yield (folder if folder.is_dir() else Path("/dev/fd")) / str(file.fileno())


# --------------------
# Detection of truncated files: the number of bytes of samples that a header states, compared with the file's size.
#
# libsndfile reads a truncated file without an error, as if it were complete, so the header is parsed here.


# Lengths from here on, or 0, are placeholders of programs that did not know the length.
UNKNOWN_FROM = 0x7FFF0000  # in fields of 32 bits
UNKNOWN_FROM_64 = 2**62
W64_DATA = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"
NIST_HEADER = 4096  # bytes that are searched for the length; most headers have 1024
NIST_FIELDS = rb"^(channel_count|sample_n_bytes|sample_count) -i (\d{1,15})\s"


def missing_share(opened: OpenedAudio) -> float:
    """Return the missing bytes of samples, divided by those that the file has; 0 if its header does not state them.

    Headers of WAV, RF64, W64, AIFF, AU, CAF and NIST SPHERE are known.
    """
    begin, claimed, unknown_from = _stated_bytes(opened)
    available = opened.size - begin
    return claimed / available - 1 if 0 < available < claimed < unknown_from else 0.0


def _stated_bytes(opened: OpenedAudio) -> tuple[int, int, int]:
    """Return the offset of the samples, their stated bytes, and from which value on these are a placeholder."""
    head = opened.at(0, 40)
    name = head[:4]
    if name in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        begin, claimed = _find_chunk(opened, ">4sL" if name == b"RIFX" else "<4sL", 12, b"data")
        if name == b"RF64" and head[12:16] == b"ds64" and claimed == 0xFFFFFFFF:
            return begin, int.from_bytes(head[28:36], "little"), UNKNOWN_FROM_64
        return begin, claimed, UNKNOWN_FROM
    if name == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return *_find_chunk(opened, ">4sL", 12, b"SSND"), UNKNOWN_FROM
    if name == b"riff" and head[24:28] == b"wave":
        return *_find_chunk(opened, "<16sQ", 40, W64_DATA), UNKNOWN_FROM_64
    if name == b"caff":
        begin, claimed = _find_chunk(opened, ">4sQ", 8, b"data")
        return begin + 4, claimed - 4, UNKNOWN_FROM_64  # without the chunk's own field, the edit count
    if name in (b".snd", b"dns.") and len(head) >= 12:
        begin, claimed = struct.unpack_from(">2L" if name == b".snd" else "<2L", head, 4)
        return begin, claimed, UNKNOWN_FROM
    if head.startswith(b"NIST_1A\n") and head[8:15].strip().isdigit():
        begin = int(head[8:15])
        fields = dict(re.findall(NIST_FIELDS, opened.at(0, min(begin, NIST_HEADER)), re.MULTILINE))
        claimed = math.prod(map(int, fields.values())) if len(fields) == 3 else 0
        return begin, claimed, UNKNOWN_FROM_64
    return 0, 0, 0


def _find_chunk(opened: OpenedAudio, shape: str, first: int, name: bytes) -> tuple[int, int]:
    """Return the content offset and the stated length of the chunk of this name; zeros if there is none."""
    chunks = iterate_chunks(opened, shape, first)
    return next(((begin, claimed) for chunk, begin, claimed in chunks if chunk == name), (0, 0))


# --------------------
# Reading headers and samples of audio files: a whole file, a span of it, or a member of a tar shard.


MAX_CHANNELS = 32
# Hz
MIN_RATE = 4_000
MAX_RATE = 384_000
MAX_BYTES = 2**30  # of decoded samples per read
MAX_FILE_SECONDS = 1e6  # 11.6 days: a header that states more is damaged
MAX_FRAMES_PER_BYTE = 8192  # silence in FLAC reaches 6000: 65535 samples in a frame of 11 bytes
SPAN_ROUNDING = 0.1  # seconds that a span may extend past the end of its file: tables and manifests round

SoundReader = SndfileSound | MediaSound


class ShortAudio(UserWarning):
    """Warning about an audio file that is shorter than its header states and was read to its end."""


def content_digest(source: AudioSource) -> str:
    """Return the SHA-256 of the audio file's encoded bytes; raise an `OSError` if it cannot be read."""
    digest = hashlib.sha256()
    remaining = source.byte_count or sys.maxsize
    with open_file(source) as file:
        file.seek(source.byte_offset)
        while piece := file.read(min(PIECE_BYTES, remaining)):
            remaining -= len(piece)
            digest.update(piece)
    return digest.hexdigest()


def read_header(source: AudioSource) -> AudioHeader:
    """Return the header of the whole audio file; raise `UnusableAudio` if the file cannot be used.

    `frames` is the number of frames that can be read if the file is decoded to count them: one that FFmpeg reads, or
    that does not state its length. Otherwise it is the stated number, reduced to the size of the file where samples
    are not compressed; a truncated MP3 or FLAC has fewer, which is found when its samples are read.
    """
    with _open(source) as sound:
        header = sound.header
        frames = sound.count()
        if not frames:
            raise UnusableAudio(source, "it contains no samples")
        missing = header.missing if sound.is_counted else _missing_seconds(header.frames - frames, header)
        return replace(header, frames=frames, missing=missing)


def claimed_header(source: AudioSource) -> AudioHeader:
    """Return the header as the audio file states it, without decoding: 0 frames if unknown. Raise as `read_header`."""
    with _open(source) as sound:
        return sound.header


def read_samples(source: AudioSource, most_seconds: float = float("inf")) -> tuple[np.ndarray, int]:
    """Return the source's samples (frames, channels) float32 and their rate in Hz.

    At most the first `most_seconds` are returned, but the file must contain the whole source. If the source names a
    `channel`, only that one is returned: (frames, 1). Raise `UnusableAudio` with the reason if the source is unusable.
    """
    with _open(source) as sound:
        header = sound.header
        first, count = _span(header, source, sound.is_counted)
        frames_to_read = int(min(count, most_seconds * header.rate))
        claimed = min(frames_to_read, header.frames)
        if 4 * claimed * header.channels > MAX_BYTES:
            raise _size_error(claimed, source, header)
        if first:
            # libsndfile seeks to the start of a span; FFmpeg decodes everything before it.
            first = sound.skip(first)
        # One frame above the limit, so that a file of unknown length that exceeds it is noticed.
        samples = sound.read(min(frames_to_read, MAX_BYTES // (4 * header.channels) + 1))
        if 4 * samples.size > MAX_BYTES:
            raise _size_error(len(samples), source, header)
        if not sound.is_counted:
            _check_length(first, len(samples) + sound.skip(count - frames_to_read), header, source)
    samples = select_channel(samples, source.channel)
    if not len(samples):
        raise UnusableAudio(source, "it contains no samples")
    # Of the frames to read, not of the file: 2 % of an hour would hide the loss of a whole span.
    missing = (frames_to_read - len(samples)) / header.rate
    if sound.is_counted and missing > duration_tolerance(frames_to_read / header.rate):
        raise UnusableAudio(source, f"it is truncated after {len(samples) / header.rate:.2f} s")
    if not np.isfinite(samples).all():
        raise UnusableAudio(source, "it contains NaN or infinite samples")
    return samples, header.rate


def read_blocks(source: AudioSource, seconds: float) -> Iterator[np.ndarray]:
    """Yield an audio file of any length in blocks of about `seconds`: samples (frames, channels) float32.

    If the source names a channel, the blocks are (frames, 1). A file that is shorter than its header states is read to
    its end, and one that cannot be decoded after a block up to there, with a `ShortAudio` warning. Other errors raise
    `UnusableAudio` at the block where they are found.
    """
    with _open(source) as sound:
        header = sound.header
        done = 0
        count = max(1, int(seconds * header.rate))
        _warn_of_missing(header.missing, source)
        while True:
            try:
                samples = sound.read(min(count, header.frames - done) if sound.is_counted else count)
            except DamagedAudio as error:
                if not done:
                    raise
                _warn_of_damage(done / header.rate, error.reason, source)
                return
            samples = select_channel(samples, source.channel)
            done += len(samples)
            if not np.isfinite(samples).all():
                raise UnusableAudio(source, "it contains NaN or infinite samples")
            if len(samples):
                yield samples
            if not len(samples) or done == header.frames and sound.is_counted:
                break
    if not done:
        raise UnusableAudio(source, "it contains no samples")
    _warn_of_missing(_missing_seconds(header.frames - done, header), source)


def _missing_seconds(frames: int, header: AudioHeader) -> float:
    """Return the seconds of these missing frames; 0 within the tolerance for padding and rounding."""
    seconds = frames / header.rate
    return seconds if seconds > duration_tolerance(header.seconds) else 0.0


def _warn_of_missing(seconds: float, source: AudioSource) -> None:
    if seconds:
        warnings.warn(
            f"The audio file {source} is truncated: it is {seconds:.1f} s shorter than its header states.",
            ShortAudio,
            stacklevel=3,
        )


def _warn_of_damage(seconds: float, reason: str, source: AudioSource) -> None:
    warnings.warn(
        f"The audio file {source} is truncated or damaged: it can be decoded for {seconds:.1f} s ({reason}).",
        ShortAudio,
        stacklevel=3,
    )


def _span(header: AudioHeader, source: AudioSource, is_counted: bool) -> tuple[int, int]:
    """Return the first frame and the number of frames to read; raise `UnusableAudio` if a counted file is too short."""
    span = source.span
    if span is None and not is_counted:
        # Unknown length: read up to the row's duration and its tolerance; _check_length compares the result.
        longest = MAX_FILE_SECONDS if source.seconds is None else source.seconds + duration_tolerance(source.seconds)
        return 0, int(longest * header.rate) + 1
    if span is None:
        stated = header.seconds if source.seconds is None else source.seconds
        if abs(header.seconds - stated) > duration_tolerance(stated):
            raise _length_error(header.seconds, header.missing, source)
        return 0, header.frames
    start, seconds = span
    first = round(start * header.rate)
    count = round(seconds * header.rate)
    if is_counted and (first >= header.frames or first + count > header.frames + SPAN_ROUNDING * header.rate):
        raise UnusableAudio(source, f"it ends at {header.seconds:.2f} s")
    return first, min(count, header.frames - first) if is_counted else count


def _check_length(first: int, frames: int, header: AudioHeader, source: AudioSource) -> None:
    """Raise `UnusableAudio` if `frames` frames after the first `first` contradict the source's span or duration."""
    seconds = (first + frames) / header.rate
    rate = header.rate
    span = source.span
    if span is not None and (not frames or frames < round(span[1] * rate) - SPAN_ROUNDING * rate):
        raise UnusableAudio(source, f"it ends at {seconds:.2f} s")
    if span is None and source.seconds is not None:
        if abs(seconds - source.seconds) > duration_tolerance(source.seconds):
            missing = _missing_seconds(header.frames - frames, header) if seconds < source.seconds else 0.0
            raise _length_error(seconds, missing, source)


def _length_error(seconds: float, missing: float, source: AudioSource) -> UnusableAudio:
    cut = f": it is {missing:.1f} s shorter than its header states" if missing else ""
    return UnusableAudio(source, f"it lasts {seconds:.2f} s, not {source.seconds:.2f} s as in its row{cut}")


def _size_error(frames: int, source: AudioSource, header: AudioHeader) -> UnusableAudio:
    return UnusableAudio(
        source, f"{frames / header.rate:.0f} s of {header.channels} channels are too much for one read"
    )


@contextlib.contextmanager
def _open(source: AudioSource) -> Iterator[SoundReader]:
    """Open the source with libsndfile or FFmpeg and check its header against the limits."""
    with opened_audio(source) as opened:
        with contextlib.closing(_sound_of(opened)) as sound:
            _check_header(sound, opened)
            if sound.is_counted:
                # libsndfile shortens the length of a truncated file silently.
                missing = missing_share(opened) * sound.header.frames
                sound.header = replace(sound.header, missing=_missing_seconds(round(missing), sound.header))
            yield sound


def _sound_of(opened: OpenedAudio) -> SoundReader:
    try:
        return SndfileSound(opened, MAX_FRAMES_PER_BYTE * opened.size, MAX_FILE_SECONDS)
    except NotKnown as error:
        reason = f"it cannot be opened as audio ({error})"
    if not may_be_media(opened):
        raise UnusableAudio(opened.source, reason)
    if not is_installed():
        conversion = f"ffmpeg -i {opened.source.path} audio.wav"
        raise UnusableAudio(
            opened.source, f"{reason}; PyAV may support it: {INSTALL} (or convert it to WAV: {conversion})"
        )
    try:
        return MediaSound(opened, MAX_FRAMES_PER_BYTE * opened.size, MAX_FILE_SECONDS)
    except UnusableAudio as error:
        # FFmpeg's own messages are rarely clear alone: add libsndfile's reason.
        is_known = not error.reason.startswith("FFmpeg: ")
        raise UnusableAudio(opened.source, error.reason if is_known else f"{reason[:-1]}; {error.reason})") from None


def _check_header(sound: SoundReader, opened: OpenedAudio) -> None:
    header = sound.header
    source = opened.source
    if not 1 <= header.channels <= MAX_CHANNELS:
        raise UnusableAudio(source, f"{header.channels} channels exceed the limit of {MAX_CHANNELS}")
    absent = channel_error(source.channel, header.channels)
    if absent:
        raise UnusableAudio(source, absent)
    if not MIN_RATE <= header.rate <= MAX_RATE:
        raise UnusableAudio(source, f"{header.rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz")
    if header.frames <= 0 and sound.is_counted:
        raise UnusableAudio(source, "it contains no samples")
    if header.seconds > MAX_FILE_SECONDS:
        raise UnusableAudio(source, f"its header states {header.seconds / 3600:.0f} hours")
    if header.frames > MAX_FRAMES_PER_BYTE * opened.size:
        raise UnusableAudio(source, f"its header states {header.seconds:.0f} s, too much for {opened.size} bytes")
