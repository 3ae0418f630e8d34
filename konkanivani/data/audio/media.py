"""Recordings in media containers, decoded by PyAV in a separate process.

A process serves one thread at a time. It exits with its parent, because the socket between them closes. A forked child
starts its own processes.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from konkanivani.data.audio.media_reader import ANSWER, MAX_SECONDS, REQUEST
from konkanivani.data.audio.paths import MEDIA_SUFFIXES
from konkanivani.data.audio.sound import AudioHeader, OpenedAudio, UnusableAudio

# --------------------
# Pool of decoder processes (media_reader.py), started on demand and reused for further files.


PROGRAM = Path(__file__).with_name("media_reader.py")
ANSWER_SECONDS = 1800.0  # for a stopped process or an unreachable disk; CPU time has a limit of its own
MAX_ANSWER_BYTES = 2**28
PIECE_BYTES = 2**20
INSTALL = ".venv/bin/python -m pip install av"


def is_installed() -> bool:
    return bool(_pyav_file())


def pyav_folder() -> str:
    """Return the folder from which this process would import PyAV; "" if there is none or it must not be searched."""
    file = _pyav_file()
    folder = os.path.dirname(os.path.dirname(file))
    # Files in the working directory may belong to the data: a module among them is never imported.
    return "" if not file or os.path.samefile(folder, os.curdir) else folder


def _pyav_file() -> str:
    spec = importlib.util.find_spec("av")
    # A folder `av` without `__init__.py` has a spec without origin.
    return "" if spec is None or spec.origin is None else os.path.abspath(spec.origin)


class ReaderFailed(Exception):
    """Death or protocol violation of the decoder process; the message is the end of a sentence."""


class Refused(Exception):
    """Request that the decoder process answered with an error; the message is the end of a sentence."""


class Reader:
    """Decoder process for one file at a time; `is_sound` means that no answer is pending, so it can be reused."""

    def __init__(self) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            try:
                self.process = subprocess.Popen(
                    # -I: PYTHON* variables and the modules in the script's folder do not affect its imports. PyAV may
                    # be in a folder that -I leaves out (PYTHONPATH, user site): the program searches it last.
                    [sys.executable, "-I", str(PROGRAM), str(child_end.fileno()), pyav_folder()],
                    pass_fds=(child_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                parent_end.close()
                raise ReaderFailed(f"the decoder process does not start: {error.strerror}") from None
        self.channel = parent_end
        self.is_sound = True
        parent_end.settimeout(ANSWER_SECONDS)

    def ask(self, kind: bytes, first: int = 0, second: int = 0, descriptor: int | None = None) -> bytearray:
        """Send a request and return the content of its answer.

        Raises:
            Refused: The process answered with an error; it remains usable unless PyAV cannot be imported.
            ReaderFailed: The process died, hung or sent invalid data.
        """
        self.is_sound = False  # stays so if this is interrupted: the late answer would be taken for the next one
        try:
            descriptors = [] if descriptor is None else [descriptor]
            socket.send_fds(self.channel, [REQUEST.pack(kind, first, second)], descriptors)
            answer, size = ANSWER.unpack(self._receive(ANSWER.size))
            if not 0 <= size <= MAX_ANSWER_BYTES:
                raise ReaderFailed("the decoder process returned invalid data")
            content = self._receive(size)
        except OSError as error:
            raise ReaderFailed(self._end(error)) from None
        if answer == b"i":
            reason = content.decode(errors="replace")
            raise Refused(f"PyAV cannot be imported ({reason}); install it again: {INSTALL}")
        self.is_sound = True
        if answer == b"e":
            raise Refused(content.decode(errors="replace"))
        return content

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Close this process's end of the socket after a fork; the decoder belongs to the parent."""
        self.channel.close()
        self.process.returncode = 0  # Popen must not wait for a process that is not a child

    def _receive(self, size: int) -> bytearray:
        received = bytearray(size)
        view = memoryview(received)
        done = 0
        while done < size:
            count = self.channel.recv_into(view[done : done + PIECE_BYTES])
            if not count:
                raise ConnectionError
            done += count
        return received

    def _end(self, error: OSError) -> str:
        """Return how the process failed, and make sure that it has exited."""
        if isinstance(error, TimeoutError):
            self.close()
            return f"the decoder process has not responded for {ANSWER_SECONDS:g} s"
        self.channel.close()
        try:
            code = self.process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.close()
            return "the decoder process does not end"
        if code == -signal.SIGXCPU:
            return f"decoding did not finish in {MAX_SECONDS} s"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"exit code {code}"
        return f"it crashed the decoder process ({name})"


class Readers:
    """Pool of this process's decoder processes, busy and idle."""

    def __init__(self) -> None:
        self._all: set[Reader] = set()
        self._reset_after_fork()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def take(self) -> Reader:
        """Return a decoder process for exclusive use until `give_back`; raise `ReaderFailed` if none can be started."""
        with self._lock:
            while self._idle:
                reader = self._idle.pop()
                if reader.process.poll() is None:
                    return reader
                self._all.discard(reader)  # killed while idle, for example by the OOM killer
                reader.channel.close()
        reader = Reader()
        with self._lock:
            self._all.add(reader)
        return reader

    def give_back(self, reader: Reader) -> None:
        """Keep the decoder process for the next file, or end it if an answer is pending."""
        with contextlib.suppress(ReaderFailed, Refused):
            if reader.is_sound:
                reader.ask(b"c")
        with self._lock:
            if reader.is_sound:
                self._idle.append(reader)
                return
            self._all.discard(reader)
        reader.close()

    def _reset_after_fork(self) -> None:
        """Reset the pool after a fork: the decoder processes belong to the parent."""
        readers = self._all
        # A new lock: another thread of the parent may have held the old one during the fork.
        self._lock = threading.Lock()
        self._idle: list[Reader] = []
        self._all = set()
        for reader in readers:
            reader.forget()


READERS = Readers()  # one pool per process, shared by all threads


# --------------------
# Audio files that libsndfile does not support, decoded sequentially by FFmpeg in a separate process.


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
        remaining = count
        while remaining > 0:
            block_size = min(remaining, max(1, PIECE_SAMPLES // channels))
            piece = np.frombuffer(self._request(b"r", block_size), np.float32).reshape(-1, channels)
            self._go_on(len(piece))
            pieces.append(piece)
            remaining -= len(piece)
            if len(piece) < block_size:
                break
        # Two pieces are the empty one and all samples: no copy is needed.
        return np.concatenate(pieces) if len(pieces) != 2 else pieces[1]

    def skip(self, count: int) -> int:
        """Skip `count` frames and return how many there were."""
        remaining = count
        while remaining > 0:
            block_size = min(remaining, DROPPED_SECONDS * self.header.rate)
            dropped = int.from_bytes(self._request(b"s", block_size), "little")
            self._go_on(dropped)
            remaining -= dropped
            if dropped < block_size:
                break
        return count - remaining

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
        answer = json.loads(self._request(b"o", self.opened.begin, self.opened.size, self.opened.file.fileno()))
        # A damaged header can state a negative or absurd duration; it then counts as none.
        claimed = answer["claimed"] if 0 < (answer["claimed"] or 0) < 1e12 else 0
        self.header = AudioHeader(round(claimed * answer["rate"]), answer["rate"], answer["channels"])
        done = self.done
        self.done = 0
        self.skip(done)

    def _request(self, kind: bytes, *details: int) -> bytearray:
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
        return self._request(kind, *details)

    def _go_on(self, frames: int) -> None:
        self.done += frames
        if self.done > self.most_frames:
            seconds = self.done / self.header.rate
            raise UnusableAudio(self.source, f"its {self.opened.size} bytes decode to more than {seconds:.0f} s")
