"""Reading headers and samples of audio files: a whole file, a span of it, or a member of a tar shard.

libsndfile reads the formats that it supports; FFmpeg reads the others in a separate process. This process decodes a
file only after its header has passed the limits below. This module does not import torch.
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
# Hz
MIN_RATE = 4_000
MAX_RATE = 384_000
PIECE_BYTES = 2**20  # per read
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
    left = source.byte_count or sys.maxsize
    with open_file(source) as file:
        file.seek(source.byte_offset)
        while piece := file.read(min(PIECE_BYTES, left)):
            left -= len(piece)
            digest.update(piece)
    return digest.hexdigest()


def read_header(source: AudioSource) -> AudioHeader:
    """Return the header of the whole audio file; raise `UnusableAudio` if the file cannot be used.

    `frames` is the number of frames that can be read: a file that FFmpeg reads is decoded to count them.
    """
    with _open(source) as sound:
        header = sound.header
        frames = sound.count()
        if not frames:
            raise UnusableAudio(source, "it contains no samples")
        missing = header.missing if sound.is_counted else _missing(header.frames - frames, header)
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
        kept = int(min(count, most_seconds * header.rate))
        claimed = min(kept, header.frames)
        if 4 * claimed * header.channels > MAX_BYTES:
            raise _too_much(claimed, source, header)
        if first:
            # libsndfile seeks to the start of a span; FFmpeg decodes everything before it.
            first = sound.skip(first)
        # One frame above the limit, so that a file of unknown length that exceeds it is noticed.
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
    """Yield an audio file of any length in blocks of about `seconds`: samples (frames, channels) float32.

    If the source names a channel, the blocks are (frames, 1). A file that is shorter than its header states is read to
    its end, with a `ShortAudio` warning. `UnusableAudio` is raised at the block where the error is found.
    """
    with _open(source) as sound:
        header = sound.header
        done = 0
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


def _span(header: AudioHeader, source: AudioSource, is_counted: bool) -> tuple[int, int]:
    """Return the first frame and the number of frames to read; raise `UnusableAudio` if a counted file is too short."""
    span = source.span
    if span is None and not is_counted:
        # Unknown length: read up to the row's duration and its tolerance; _check_length compares the result.
        longest = MAX_FILE_SECONDS if source.seconds is None else source.seconds + duration_tolerance(source.seconds)
        return 0, int(longest * header.rate) + 1
    if span is None:
        said = header.seconds if source.seconds is None else source.seconds
        if abs(header.seconds - said) > duration_tolerance(said):
            raise _other_length(header.seconds, header.missing, source)
        return 0, header.frames
    start, seconds = span
    first = round(start * header.rate)
    count = round(seconds * header.rate)
    if is_counted and (first >= header.frames or first + count > header.frames + SPAN_ROUNDING * header.rate):
        raise UnusableAudio(source, f"it ends at {header.seconds:.2f} s")
    return first, min(count, header.frames - first) if is_counted else count


def _check_length(first: int, found: int, header: AudioHeader, source: AudioSource) -> None:
    """Raise `UnusableAudio` if `found` frames after the first `first` contradict the source's span or duration."""
    seconds = (first + found) / header.rate
    rate = header.rate
    span = source.span
    if span is not None and (not found or found < round(span[1] * rate) - SPAN_ROUNDING * rate):
        raise UnusableAudio(source, f"it ends at {seconds:.2f} s")
    if span is None and source.seconds is not None:
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
    """Open the source with libsndfile or FFmpeg and check its header against the limits."""
    with opened_audio(source) as opened:
        with contextlib.closing(_sound_of(opened)) as sound:
            _check_header(sound, opened)
            if sound.is_counted:
                # libsndfile shortens the length of a truncated file silently.
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
