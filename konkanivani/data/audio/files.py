"""Audio files by their headers and their samples: a whole file, a span of it, or a file inside a tar shard.

No torch here. Libsndfile reads what it knows; what it does not know FFmpeg reads, in a process of its own. Nothing is
decoded in this one before its header has passed the limits below.
"""

import contextlib
import hashlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from konkanivani.data.audio.channels import channel_error, select_channel
from konkanivani.data.audio.media_sound import INSTALL, MediaSound, is_installed, may_be_media
from konkanivani.data.audio.sizes import missing_share
from konkanivani.data.audio.sndfile_sound import NotKnown, SndfileSound
from konkanivani.data.audio.source import (
    AudioHeader,
    AudioSource,
    OpenedAudio,
    UnusableAudio,
    duration_tolerance,
    open_file,
    opened_audio,
)

MAX_CHANNELS = 32
MIN_RATE, MAX_RATE = 4_000, 384_000  # Hz
PIECE_BYTES = 2**20  # read at once
MAX_BYTES = 2**30  # of samples decoded at once
MAX_FILE_SECONDS = 1e6  # eleven days: a header that claims more is wrong
MAX_FRAMES_PER_BYTE = 8192  # a FLAC of silence has up to 6000: 65535 samples in a frame of 11 bytes
SPAN_ROUNDING = 0.1  # seconds by which a span may reach beyond its file: tables and manifests round

SoundReader = SndfileSound | MediaSound


class ShortAudio(UserWarning):
    """An audio file that ends before its header says, of which what there is was read."""


def content_digest(source: AudioSource) -> str:
    """The SHA-256 of the audio file's bytes as they lie there; an OSError where they cannot be read."""
    digest, left = hashlib.sha256(), source.byte_count or sys.maxsize
    with open_file(source) as file:
        file.seek(source.byte_offset)
        while piece := file.read(min(PIECE_BYTES, left)):
            left -= len(piece)
            digest.update(piece)
    return digest.hexdigest()


def read_header(source: AudioSource) -> AudioHeader:
    """The header of the audio file (not of a span of it); an UnusableAudio says why it cannot be used.

    Its frames are those that there are to read: what FFmpeg reads is decoded and counted.
    """
    with _open(source) as sound:
        header = sound.header
        frames = sound.count()
        if not frames:
            raise UnusableAudio(source, "it contains no samples")
        missing = header.missing if sound.is_counted else _missing(header.frames - frames, header)
        return replace(header, frames=frames, missing=missing)


def claimed_header(source: AudioSource) -> AudioHeader:
    """What the audio file says of itself, nothing decoded: 0 frames where it does not say; errors as of read_header."""
    with _open(source) as sound:
        return sound.header


def read_samples(source: AudioSource, most_seconds: float = float("inf")) -> tuple[np.ndarray, int]:
    """The source's samples (frames, channels) float32 and their rate in Hz; a span is all that is decoded of a file
    that libsndfile knows, and what lies before it too of another.

    Of a longer source only the first `most_seconds` are decoded; the whole of it must be there all the same.
    Of a source with a `channel` only that one is returned: (frames, 1).
    An UnusableAudio names the source and says what is wrong with it.
    """
    with _open(source) as sound:
        header = sound.header
        first, count = _span(header, source, sound.is_counted)
        kept = int(min(count, most_seconds * header.rate))
        claimed = min(kept, header.frames)
        if 4 * claimed * header.channels > MAX_BYTES:
            raise _too_much(claimed, source, header)
        if first:
            first = sound.skip(first)
        samples = sound.read(min(kept, MAX_BYTES // (4 * header.channels) + 1))
        if 4 * samples.size > MAX_BYTES:
            raise _too_much(len(samples), source, header)
        if not sound.is_counted:
            _check_length(first, len(samples) + sound.skip(count - kept), header, source)
    samples = select_channel(samples, source.channel)
    if not len(samples):
        raise UnusableAudio(source, "it contains no samples")
    if sound.is_counted and len(samples) < 0.9 * kept:
        raise UnusableAudio(source, f"it is truncated after {len(samples) / header.rate:.2f} s")
    if not np.isfinite(samples).all():
        raise UnusableAudio(source, "it contains NaN or infinite samples")
    return samples, header.rate


def read_blocks(source: AudioSource, seconds: float) -> Iterator[np.ndarray]:
    """An audio file of any length, block by block of about so many seconds: samples (frames, channels) float32, of the
    source's channel alone if it names one.

    An UnusableAudio says what is wrong with it, as soon as that is seen. One that ends before its header says is read
    as far as it goes, with a ShortAudio.
    """
    with _open(source) as sound:
        header, done = sound.header, 0
        count = max(1, int(seconds * header.rate))
        _warn_of_missing(header.missing, source)
        while True:
            samples = sound.read(min(count, header.frames - done) if sound.is_counted else count)
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
    _warn_of_missing(_missing(header.frames - done, header), source)


def _missing(frames: int, header: AudioHeader) -> float:
    """The seconds of so many frames, 0 where that is no more than what formats add and round."""
    seconds = frames / header.rate
    return seconds if seconds > duration_tolerance(header.seconds) else 0.0


def _warn_of_missing(seconds: float, source: AudioSource) -> None:
    if seconds:
        warnings.warn(
            f"The audio file {source} is truncated: it is {seconds:.1f} s shorter than its header states.",
            ShortAudio,
            stacklevel=3,
        )


def _span(header: AudioHeader, source: AudioSource, is_counted: bool) -> tuple[int, int]:
    """The first frame to read and how many; an UnusableAudio where a counted file does not hold what is said of it."""
    if source.start is None and not is_counted:
        longest = MAX_FILE_SECONDS if source.seconds is None else source.seconds + duration_tolerance(source.seconds)
        return 0, int(longest * header.rate) + 1
    if source.start is None:
        said = header.seconds if source.seconds is None else source.seconds
        if abs(header.seconds - said) > duration_tolerance(said):
            raise _other_length(header.seconds, header.missing, source)
        return 0, header.frames
    first, count = round(source.start * header.rate), round(source.seconds * header.rate)
    if is_counted and (first >= header.frames or first + count > header.frames + SPAN_ROUNDING * header.rate):
        raise UnusableAudio(source, f"it ends at {header.seconds:.2f} s")
    return first, min(count, header.frames - first) if is_counted else count


def _check_length(first: int, found: int, header: AudioHeader, source: AudioSource) -> None:
    """Raises an UnusableAudio where `found` frames from the `first` on are not what is said of the file."""
    seconds, rate = (first + found) / header.rate, header.rate
    if source.start is not None and (not found or found < round(source.seconds * rate) - SPAN_ROUNDING * rate):
        raise UnusableAudio(source, f"it ends at {seconds:.2f} s")
    if source.start is None and source.seconds is not None:
        if abs(seconds - source.seconds) > duration_tolerance(source.seconds):
            missing = _missing(header.frames - found, header) if seconds < source.seconds else 0.0
            raise _other_length(seconds, missing, source)


def _other_length(seconds: float, missing: float, source: AudioSource) -> UnusableAudio:
    cut = f": it is {missing:.1f} s shorter than its header states" if missing else ""
    return UnusableAudio(source, f"it lasts {seconds:.2f} s, not {source.seconds:.2f} s as in its row{cut}")


def _too_much(frames: int, source: AudioSource, header: AudioHeader) -> UnusableAudio:
    return UnusableAudio(
        source, f"{frames / header.rate:.0f} s of {header.channels} channels are too much for one read"
    )


@contextlib.contextmanager
def _open(source: AudioSource) -> Iterator[SoundReader]:
    """The source's sound, its header within the limits."""
    with opened_audio(source) as opened:
        with contextlib.closing(_sound_of(opened)) as sound:
            _check_header(sound, opened)
            if sound.is_counted:
                missing = missing_share(opened) * sound.header.frames
                sound.header = replace(sound.header, missing=_missing(round(missing), sound.header))
            yield sound


def _sound_of(opened: OpenedAudio) -> SoundReader:
    try:
        return SndfileSound(opened, MAX_FRAMES_PER_BYTE * opened.size, MAX_FILE_SECONDS)
    except NotKnown as error:
        reason = f"it cannot be opened as audio ({error})"
    if not may_be_media(opened):
        raise UnusableAudio(opened.source, reason)
    if not is_installed():
        other = f"ffmpeg -i {opened.source.path} audio.wav"
        raise UnusableAudio(opened.source, f"{reason}; PyAV may support it: {INSTALL} (or convert it to WAV: {other})")
    try:
        return MediaSound(opened, MAX_FRAMES_PER_BYTE * opened.size, MAX_FILE_SECONDS)
    except UnusableAudio as error:
        is_known = not error.reason.startswith("FFmpeg: ")
        raise UnusableAudio(opened.source, error.reason if is_known else f"{reason[:-1]}; {error.reason})") from None


def _check_header(sound: SoundReader, opened: OpenedAudio) -> None:
    header, source = sound.header, opened.source
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
