"""Program of the decoder process, which runs FFmpeg in a sandbox; it imports nothing of this package.

FFmpeg is a large code base and its input is untrusted. The process can therefore open no file except the descriptor
that it receives, write no file and start no program; its memory and CPU time are limited.

python -I media_reader.py SOCKET FOLDER

FOLDER contains PyAV; it is searched last, and "" stands for none. The program answers requests in order and exits when
the socket is closed. A request is `REQUEST`: a letter and two integers.

- `o`: open the file whose descriptor is attached; the integers are its first byte and its number of bytes
- `r`: read this number of frames
- `s`: decode and discard this number of frames
- `c`: close the file

An answer is `ANSWER`, a letter and the length of the content that follows: `h` the header as JSON, `f` interleaved
float32 frames, `n` the number of discarded frames, `c` closed, `e` the reason of a failure, `i` the reason why PyAV
cannot be imported, after which the process exits. An answer with fewer frames than the request is the last one.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Generator

REQUEST = struct.Struct("<cqq")
ANSWER = struct.Struct("<cq")
MORE_MEMORY = 384 * 2**20  # bytes of address space beyond the loaded libraries
MAX_SECONDS = 60  # CPU time of one answer: at most a minute of audio, or the audio before a span
MAX_CHANNELS = 32
DISCARD_ALL = 48  # libavcodec/defs.h
# Allowed formats. None of them opens other files or URLs, as hls, concat, dash or sdp would.
DEMUXERS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "asf", "amr", "amrnb", "amrwb", "aac", "ac3", "eac3", "loas", "mp3"),
    *("avi", "flv", "mpegts", "mpeg", "caf", "ogg", "wav", "w64", "aiff", "au", "flac", "ape", "tta", "wv", "mpc"),
    *("mpc8", "dts", "tak", "voc", "rm", "gsm", "dsf", "qcp", "mlp", "truehd", "oma", "sbc", "shn", "mxf", "nut"),
)
# Formats with a length in the header. For others FFmpeg estimates it from the bit rate, which is unreliable.
DEMUXERS_WITH_LENGTHS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "asf", "avi", "caf", "wav", "flac", "ape", "tta")


class Undecodable(Exception):
    """File without decodable audio; the message is the end of a sentence."""


class FileSlice:
    """Part of a file as a read-only file object with a position of its own."""

    name = "audio"

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self.descriptor = descriptor
        self.begin = begin
        self.size = size
        self.at = 0

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end."""
        length = max(0, min(count, self.size - self.at))
        # pread, because the descriptor's position is shared with the process that sent it.
        piece = os.pread(self.descriptor, length, self.begin + self.at)
        self.at += len(piece)
        return piece

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, limited to the bounds of the slice, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = min(max(base + offset, 0), self.size)
        return self.at


class MediaDecoder:
    """Decoder of a file's best audio stream, at the sample rate and channel layout of its first frame."""

    def __init__(self, window: FileSlice) -> None:
        options = {"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "none", "max_streams": "64"}
        self.container = av.open(window, "r", options=options, metadata_errors="replace")
        stream = self.container.streams.best("audio")
        if not isinstance(stream, av.AudioStream):
            raise Undecodable("it contains no audio" + (", only video" if self.container.streams.video else ""))
        if stream.codec_context is None:
            raise Undecodable("FFmpeg does not support its audio codec")
        for unused in self.container.streams:
            if unused is not stream:
                with contextlib.suppress(AttributeError, ValueError):  # old PyAV versions cannot discard a stream
                    unused.discard = DISCARD_ALL  # type: ignore[assignment]  # PyAV converts an int to its enum
        stream.codec_context.thread_count = 1  # RLIMIT_CPU and RLIMIT_AS count all threads
        self.claimed = self._claimed_seconds(stream)
        self.pending = bytearray()
        self.has_ended = False
        self.decoded = self._decode(stream)
        first = next(self.decoded, None)
        if first is None:
            raise Undecodable("none of its audio can be decoded")
        self.rate = first.sample_rate
        self.layout = first.layout
        self.channels = self.layout.nb_channels
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise Undecodable(f"{self.channels} channels exceed the limit of {MAX_CHANNELS}")
        self.pieces = self._convert(first)

    def header(self) -> bytes:
        """Return the sample rate, the channels and the stated length in seconds (or null) as JSON."""
        return json.dumps({"rate": self.rate, "channels": self.channels, "claimed": self.claimed}).encode()

    def read(self, count: int) -> bytes:
        """Return the next `count` frames as interleaved float32, fewer at the end."""
        byte_count = 4 * self.channels * count
        while len(self.pending) < byte_count and (piece := next(self.pieces, None)) is not None:
            self.pending += piece
        block = bytes(self.pending[:byte_count])
        del self.pending[:byte_count]
        return block

    def skip(self, count: int) -> int:
        """Discard the next `count` frames and return how many there were."""
        size = 4 * self.channels
        done = 0
        while done < count:
            if not self.pending and (piece := next(self.pieces, None)) is not None:
                self.pending += piece
            if not self.pending:
                break
            dropped = min(len(self.pending) // size, count - done)
            del self.pending[: dropped * size]
            done += dropped
        return done

    def close(self) -> None:
        self.pieces.close()
        self.decoded.close()
        self.container.close()
        del self.pieces, self.decoded

    def _claimed_seconds(self, stream: "av.AudioStream") -> float | None:
        if self.container.format.name not in DEMUXERS_WITH_LENGTHS:
            return None
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        has_one_stream = len(self.container.streams) == 1  # with several, it is the longest stream's duration
        return self.container.duration / av.time_base if self.container.duration and has_one_stream else None

    def _decode(self, stream: "av.AudioStream") -> Generator["av.AudioFrame", None, None]:
        """Yield the stream's frames; skip undecodable packets, as players do, and stop at a demuxing error."""
        packets = self.container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except (av.FFmpegError, NotImplementedError):
                continue
            yield from (frame for frame in frames if frame.samples > 0 and frame.sample_rate > 0)

    def _convert(self, first: "av.AudioFrame") -> Generator[bytes, None, None]:
        """Yield the frames as packed float32; resample them if the stream changes its rate or layout midway."""
        kind = None
        resampler = None
        for frame in itertools.chain([first], self.decoded):
            frame_kind = (frame.format.name, frame.layout.name, frame.sample_rate)
            if resampler is None or frame_kind != kind:
                if resampler is not None:
                    yield from map(_bytes_of, resampler.resample(None))
                kind = frame_kind
                resampler = av.AudioResampler(format="flt", layout=self.layout, rate=self.rate)
            frame.pts = None  # not needed, and some PyAV versions reject discontinuous timestamps
            yield from map(_bytes_of, resampler.resample(frame))
        # is_passthrough is missing from PyAV's stubs.
        if resampler is not None and not resampler.is_passthrough:  # type: ignore[attr-defined]
            yield from map(_bytes_of, resampler.resample(None))


def _bytes_of(frame: "av.AudioFrame") -> bytes:
    """Return a packed frame's samples without the padding of its buffer."""
    return memoryview(frame.planes[0])[: 4 * frame.samples * frame.layout.nb_channels].tobytes()


def serve(channel: socket.socket) -> None:
    """Answer requests until the socket is closed."""
    sound = None
    descriptor = -1
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST.size, 1)
        if not message:
            return
        kind, first, second = REQUEST.unpack(message)
        # RLIMIT_CPU counts from the start of the process: move the soft limit so that each request has MAX_SECONDS.
        times = os.times()
        used = int(times.user + times.system) + 1
        limit(resource.RLIMIT_CPU, used + MAX_SECONDS, resource.RLIM_INFINITY)
        try:
            if kind == b"o":
                descriptor = descriptors[0]
                sound = MediaDecoder(FileSlice(descriptor, first, second))
                answer = b"h"
                content = sound.header()
            elif kind == b"r":
                answer = b"f"
                content = _opened(sound).read(first)
            elif kind == b"s":
                answer = b"n"
                content = struct.pack("<q", _opened(sound).skip(first))
            else:
                if sound is not None:
                    sound.close()
                sound = None
                gc.collect()  # a file that could not be opened may leave reference cycles
                os.close(descriptor)
                answer = b"c"
                content = b""
        except MemoryError:
            answer = b"e"
            content = b"it takes more memory than a recording can need"
        except Undecodable as error:
            answer = b"e"
            content = str(error).encode()
        except Exception as error:  # libraries raise anything for a damaged file
            answer = b"e"
            content = f"FFmpeg: {getattr(error, 'strerror', None) or error}".encode()
        channel.sendall(ANSWER.pack(answer, len(content)))
        channel.sendall(content)


def _opened(sound: MediaDecoder | None) -> MediaDecoder:
    if sound is None:
        raise Undecodable("no file is open")
    return sound


def enter_sandbox(channel: int) -> None:
    """Limit memory, open files and file size, and ignore signals that only the training process should handle."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/statm", encoding="ascii") as file:
        used_memory = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, most in (
        (resource.RLIMIT_AS, used_memory + MORE_MEMORY),
        (resource.RLIMIT_NOFILE, channel + 2),  # one more than the socket: the received file
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        limit(kind, most, most)


def limit(kind: int, soft: int, hard: int) -> None:
    """Set a resource limit; a lower hard limit, as of `ulimit -t` on login nodes, cannot be raised and is kept."""
    present = resource.getrlimit(kind)[1]
    if present != resource.RLIM_INFINITY:  # which is -1
        soft = min(soft, present)
        hard = present if hard == resource.RLIM_INFINITY else min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def refuse(channel: socket.socket, reason: str) -> None:
    """Answer the first request with the reason why PyAV cannot be imported, and exit."""
    socket.recv_fds(channel, REQUEST.size, 1)
    content = reason.encode(errors="replace")
    channel.sendall(ANSWER.pack(b"i", len(content)) + content)
    sys.exit(1)


if __name__ == "__main__":
    if sys.argv[2]:
        sys.path.append(sys.argv[2])
    try:
        import av
    except ImportError as error:
        refuse(socket.socket(fileno=int(sys.argv[1])), str(error))

    for name in ("video", "audio", "subtitles"):  # PyAV imports these lazily, which the sandbox would prevent
        for part in ("stream", "codeccontext"):
            with contextlib.suppress(ImportError):  # other PyAV versions have other modules
                importlib.import_module(f"av.{name}.{part}")
    channel = socket.socket(fileno=os.dup2(int(sys.argv[1]), 3))
    if int(sys.argv[1]) != 3:
        os.close(int(sys.argv[1]))
    enter_sandbox(3)
    serve(channel)
