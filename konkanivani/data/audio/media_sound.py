"""Audio files that libsndfile does not support, decoded sequentially by FFmpeg in a separate process."""

import importlib.util
import json
import os

import numpy as np

from konkanivani.data.audio.media_process import READERS, Reader, ReaderFailed, Refused
from konkanivani.data.audio.names import MEDIA_SUFFIXES
from konkanivani.data.audio.source import AudioHeader, OpenedAudio, UnusableAudio

INSTALL = ".venv/bin/python -m pip install av"
PIECE_SAMPLES = 2**20  # of all channels together, per request: 4 MiB of float32
DROPPED_SECONDS = 60  # skipped per request: MAX_SECONDS of media_reader.py limits the CPU time of one request
# Signatures as (offset in bytes, magic number): ISO media (MP4, QuickTime), Matroska, ASF, AMR, FLV, AVI, and so on.
BEGINNINGS = (
    *((4, name) for name in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    *((0, b"\x1aE\xdf\xa3"), (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"), (0, b"#!AMR"), (0, b"FLV\x01"), (0, b"RIFF")),
    *((0, b"OggS"), (0, b"ID3"), (0, b"\x0b\x77"), (0, b"\x00\x00\x01\xba"), (0, b"caff"), (0, b"wvpk"), (0, b"MAC ")),
    *((0, b"TTA1"), (0, b"FORM"), (0, b".RMF"), (0, b"MPCK"), (0, b"MP+"), (0, b"\x7f\xfe\x80\x01"), (0, b"tBaK")),
)


def may_be_media(opened: OpenedAudio) -> bool:
    """Return whether FFmpeg should try the file, judged by its signature or its suffix."""
    head = opened.at(0, 200)
    is_mpeg = len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0  # ADTS, MP1, MP2, MP3
    # MPEG-TS: packets of 188 bytes, each with the sync byte 0x47.
    is_stream = head[:1] == b"\x47" and head[188:189] == b"\x47"
    begins = is_mpeg or is_stream or any(head[at : at + len(name)] == name for at, name in BEGINNINGS)
    return bool(head) and (begins or os.path.splitext(opened.source.path)[1].lower() in MEDIA_SUFFIXES)


def is_installed() -> bool:
    return importlib.util.find_spec("av") is not None


class MediaSound:
    """Audio file decoded by FFmpeg.

    `header.frames` is the length that the file states (0: none), not the number of frames that can be decoded.
    """

    is_counted = False

    def __init__(self, opened: OpenedAudio, most_frames: int, most_seconds: float) -> None:
        """Open the file in a decoder process.

        A file is refused as soon as it decodes to more than `most_frames` frames or `most_seconds`.
        """
        self.source = opened.source
        self.opened = opened
        self.most_frames = most_frames
        self.reader: Reader | None = None
        self.deaths = 0
        self.done = 0
        try:
            self._begin()
            self.most_frames = min(most_frames, int(most_seconds * self.header.rate))
        except BaseException:  # KeyboardInterrupt too: the decoder process must return to the pool
            self.close()
            raise

    def read(self, count: int) -> np.ndarray:
        """Return the next `count` samples (frames, channels) float32, fewer at the end."""
        channels = self.header.channels
        pieces = [np.empty((0, channels), np.float32)]
        left = count
        while left > 0:
            wanted = min(left, max(1, PIECE_SAMPLES // channels))
            piece = np.frombuffer(self._ask(b"r", wanted), np.float32).reshape(-1, channels)
            self._go_on(len(piece))
            pieces.append(piece)
            left -= len(piece)
            if len(piece) < wanted:
                break
        # Two pieces are the empty one and all samples: no copy is needed.
        return np.concatenate(pieces) if len(pieces) != 2 else pieces[1]

    def skip(self, count: int) -> int:
        """Skip `count` frames and return how many there were."""
        left = count
        while left > 0:
            wanted = min(left, DROPPED_SECONDS * self.header.rate)
            dropped = int.from_bytes(self._ask(b"s", wanted), "little")
            self._go_on(dropped)
            left -= dropped
            if dropped < wanted:
                break
        return count - left

    def count(self) -> int:
        """Decode the whole file and return its number of frames; the length in a container's header is rarely exact."""
        return self.done + self.skip(self.most_frames + 1)

    def close(self) -> None:
        """Return the decoder process to the pool."""
        reader = self.reader
        self.reader = None
        if reader is not None:
            READERS.give_back(reader)

    def _begin(self) -> None:
        """Open the file in a decoder process and skip the frames that have been read already."""
        said = json.loads(self._ask(b"o", self.opened.begin, self.opened.size, self.opened.file.fileno()))
        # A damaged header can state a negative or absurd duration; it then counts as none.
        claimed = said["claimed"] if 0 < (said["claimed"] or 0) < 1e12 else 0
        self.header = AudioHeader(round(claimed * said["rate"]), said["rate"], said["channels"])
        done = self.done
        self.done = 0
        self.skip(done)

    def _ask(self, kind: bytes, *details: int) -> bytearray:
        try:
            self.reader = self.reader or READERS.take()
            return self.reader.ask(kind, *details)
        except Refused as refusal:
            raise UnusableAudio(self.source, str(refusal)) from None
        except ReaderFailed as failure:
            self.close()
            self.deaths += 1
            # The request is repeated once in a new process: the first may have died for another reason (out of memory).
            if self.deaths > 1:
                raise UnusableAudio(self.source, str(failure)) from None
        if kind != b"o":
            self._begin()  # the new process must open the file and return to the same frame first
        return self._ask(kind, *details)

    def _go_on(self, frames: int) -> None:
        self.done += frames
        if self.done > self.most_frames:
            seconds = self.done / self.header.rate
            raise UnusableAudio(self.source, f"its {self.opened.size} bytes decode to more than {seconds:.0f} s")
