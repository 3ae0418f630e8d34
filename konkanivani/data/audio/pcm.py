"""Samples from a stream of bytes: raw PCM, or a WAV file whose length may be unknown.

This module does not import torch.
"""

import struct
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from konkanivani.data.audio.files import MAX_CHANNELS, MAX_RATE, MIN_RATE, UNKNOWN_FROM
from konkanivani.errors import DataError

Encoding = Literal["u8", "s16le", "s24le", "s32le", "f32le", "f64le"]
PCM = 1
IEEE_FLOAT = 3
EXTENSIBLE = 0xFFFE
ENCODINGS: dict[tuple[int, int], Encoding] = {
    (PCM, 8): "u8",
    (PCM, 16): "s16le",
    (PCM, 24): "s24le",
    (PCM, 32): "s32le",
    (IEEE_FLOAT, 32): "f32le",
    (IEEE_FLOAT, 64): "f64le",
}
MAX_HEADER = 2**20  # bytes before the samples of a WAV file
# Signatures of other files, by offset. The two bytes of an MPEG frame are left out: they may be samples.
SIGNATURES = {
    (0, b"fLaC"): "FLAC",
    (0, b"OggS"): "Ogg",
    (0, b"ID3"): "MP3",
    (0, b"\x1aE\xdf\xa3"): "WebM",
    (0, b"FORM"): "AIFF",
    (0, b"RF64"): "RF64",
    (0, b"RIFX"): "RIFX (big-endian WAV)",
    (0, b".snd"): "AU",
    (0, b"dns."): "AU",
    (0, b"caff"): "CAF",
    (0, b"riff"): "W64",
    (4, b"ftyp"): "MP4 or M4A",
}
SIGNATURE_BYTES = max(offset + len(magic) for offset, magic in SIGNATURES)


@dataclass(frozen=True)
class PcmFormat:
    """Sampling rate in Hz, number of interleaved channels, and encoding of a sample."""

    rate: int
    channels: int
    encoding: Encoding

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of all channels."""
        return self.channels * {"u8": 1, "s16le": 2, "s24le": 3, "s32le": 4, "f32le": 4, "f64le": 8}[self.encoding]


def check_format(pcm: PcmFormat) -> None:
    """Raise a DataError if the format is not within the limits."""
    if not MIN_RATE <= pcm.rate <= MAX_RATE:
        raise DataError(f"The sample rate {pcm.rate} Hz is not between {MIN_RATE} and {MAX_RATE} Hz. Resample it.")
    if not 1 <= pcm.channels <= MAX_CHANNELS:
        raise DataError(f"{pcm.channels} channels are not between 1 and {MAX_CHANNELS}. Record one channel.")
    if pcm.encoding not in get_args(Encoding):
        raise DataError(f"The sample format {pcm.encoding} is unknown. Use {' or '.join(get_args(Encoding))}.")


class PcmDecoder:
    """Decoder of a byte stream that arrives in pieces of any length.

    Args:
        raw: format of the samples if the stream does not start with a WAV header.
    """

    def __init__(self, raw: PcmFormat) -> None:
        check_format(raw)
        self._raw = raw
        self._waiting = b""
        self._remaining: int | None = None  # bytes of samples that the header states; None to the end of the stream
        self.format: PcmFormat | None = None

    def decode(self, data: bytes) -> np.ndarray:
        """Return the samples (frames, channels) float32 that are complete with these bytes.

        Raises a DataError if the stream starts with the header of an unsupported file.
        """
        self._waiting += data
        if self.format is None:
            self._read_header(is_end=False)
        if self.format is None:
            return np.zeros((0, self._raw.channels), np.float32)
        size = len(self._waiting) if self._remaining is None else min(len(self._waiting), self._remaining)
        size -= size % self.format.frame_bytes
        complete = self._waiting[:size]
        self._waiting = self._waiting[size:]
        if self._remaining is not None:
            self._remaining -= size
            # Chunks after the samples, such as tags, are not audio.
            self._waiting = self._waiting[: self._remaining]
        return to_float(complete, self.format)

    def finish(self) -> np.ndarray:
        """Return the samples of a raw stream that is shorter than a header; raise if a header is cut."""
        if self.format is None:
            self._read_header(is_end=True)
        return self.decode(b"")

    @property
    def leftover(self) -> int:
        """Bytes of an incomplete sample."""
        return len(self._waiting)

    def _read_header(self, is_end: bool) -> None:
        head = self._waiting
        if len(head) < SIGNATURE_BYTES and not is_end:
            return
        for (offset, magic), name in SIGNATURES.items():
            if head.startswith(magic, offset):
                raise DataError(
                    f"Standard input is {name}, but must be WAV or raw PCM. Convert it with ffmpeg -i FILE -f wav -."
                )
        if not head.startswith(b"RIFF"):
            self.format = self._raw
            return
        if len(head) >= 12 and head[8:12] != b"WAVE":
            raise DataError("Standard input is a RIFF file other than WAV. Pipe WAV or raw PCM.")
        parsed = _parse_chunks(head)
        if parsed is not None:
            self.format, self._remaining, begin = parsed
            self._waiting = head[begin:]
        elif is_end or len(head) > MAX_HEADER:
            raise DataError("The WAV header on standard input is cut or has no samples. Pipe WAV or raw PCM.")


def _parse_chunks(head: bytes) -> tuple[PcmFormat, int | None, int] | None:
    """Return format, stated bytes of samples and their offset; None if the bytes end before the first sample."""
    position = 12
    pcm = None
    while position + 8 <= len(head):
        name, size = struct.unpack_from("<4sL", head, position)
        position += 8
        if name == b"data":
            if pcm is None:
                raise DataError("The WAV header on standard input has no format. Pipe WAV or raw PCM.")
            return pcm, size if 0 < size < UNKNOWN_FROM else None, position
        if position + size > len(head):
            return None
        if name == b"fmt ":
            pcm = _parse_format(head[position : position + size])
        position += size + size % 2
    return None


def _parse_format(fields: bytes) -> PcmFormat:
    if len(fields) < 16:
        raise DataError("The WAV header on standard input has a cut format. Pipe WAV or raw PCM.")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHLLHH", fields)
    if tag == EXTENSIBLE and len(fields) >= 26:
        (tag,) = struct.unpack_from("<H", fields, 24)  # the first bytes of the sub-format
    encoding = ENCODINGS.get((tag, bits))
    if encoding is None:
        raise DataError(
            f"The WAV on standard input has {bits}-bit samples of format {tag}, which is not supported. Use 16-bit "
            "PCM: arecord -f S16_LE, ffmpeg -c:a pcm_s16le."
        )
    pcm = PcmFormat(rate, channels, encoding)
    check_format(pcm)
    return pcm


def to_float(data: bytes, pcm: PcmFormat) -> np.ndarray:
    """Return whole samples as float32 (frames, channels) between -1 and 1."""
    if pcm.encoding == "s24le":
        # As the upper three bytes of 32-bit integers, which keeps the sign.
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = wide.view("<i4")[:, 0] / 2.0**31
    elif pcm.encoding == "u8":
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif pcm.encoding == "s16le":
        samples = np.frombuffer(data, "<i2") / 2.0**15
    elif pcm.encoding == "s32le":
        samples = np.frombuffer(data, "<i4") / 2.0**31
    else:
        samples = np.frombuffer(data, "<f4" if pcm.encoding == "f32le" else "<f8")
    return samples.astype(np.float32).reshape(-1, pcm.channels)
