"""The process that decodes what FFmpeg knows: a program of its own, which imports nothing of ours.

FFmpeg is large, and what it is given comes from strangers. So it runs where it can take nothing along: no file can be
opened beside the one handed over, none written, no program started; memory and the processor's time are bounded.

python -I media_reader.py SOCKET

It answers requests one after the other and ends when the socket is closed. A request is REQUEST: a letter and two
numbers. `o`: open the file whose descriptor comes with it, from the first number's byte on, of as many as the second
says. `r`: read so many frames. `s`: decode so many and drop them. `c`: close the file. Each has one answer, ANSWER and
as many bytes as that says: `h` the header as JSON, `f` frames as float32, one channel beside the other, `n` how many
were dropped, `c` it is closed, `e` why it cannot be done. Fewer frames than asked for are the last.
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
from collections.abc import Iterator

REQUEST, ANSWER = struct.Struct("<cqq"), struct.Struct("<cq")
MORE_MEMORY = 384 * 2**20  # bytes of address space beside what the libraries take
MAX_SECONDS = 60  # of a processor for one answer, which is a minute of audio at most, or what lies before it
MAX_CHANNELS = 32
DISCARD_ALL = 48  # libavcodec/defs.h
# What is looked for in a file. None of them opens another file or an address (as hls, concat, dash or sdp do).
DEMUXERS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "asf", "amr", "amrnb", "amrwb", "aac", "ac3", "eac3", "loas", "mp3"),
    *("avi", "flv", "mpegts", "mpeg", "caf", "ogg", "wav", "w64", "aiff", "au", "flac", "ape", "tta", "wv", "mpc"),
    *("mpc8", "dts", "tak", "voc", "rm", "gsm", "dsf", "qcp", "mlp", "truehd", "oma", "sbc", "shn", "mxf", "nut"),
)
# A length stands in their headers; in others FFmpeg works it out from the bit rate, and is wrong.
DEMUXERS_WITH_LENGTHS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "asf", "avi", "caf", "wav", "flac", "ape", "tta")


class Undecodable(Exception):
    """Why there is no sound to be had; a sentence's end."""


class FileSlice:
    """The bytes of a file that are the audio's, as a file of their own; the place in it is nobody else's."""

    name = "audio"

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self.descriptor, self.begin, self.size, self.at = descriptor, begin, size, 0

    def read(self, count: int) -> bytes:
        """The next bytes, none at the end."""
        wanted = max(0, min(count, self.size - self.at))
        piece = os.pread(self.descriptor, wanted, self.begin + self.at)
        self.at += len(piece)
        return piece

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes there, or to the end that is nearest."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        self.at = min(max(base + offset, 0), self.size)
        return self.at


class MediaDecoder:
    """The first sound of a file, at the rate and with the channels that its first frame has."""

    def __init__(self, window: FileSlice) -> None:
        options = {"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "none", "max_streams": "64"}
        self.container = av.open(window, options=options, metadata_errors="replace")
        stream = self.container.streams.best("audio")
        if stream is None:
            raise Undecodable("it contains no audio" + (", only video" if self.container.streams.video else ""))
        if stream.codec_context is None:
            raise Undecodable("FFmpeg does not support its audio codec")
        for other in self.container.streams:
            if other is not stream:
                with contextlib.suppress(AttributeError, ValueError):  # older ones hand over what nobody asks for
                    other.discard = DISCARD_ALL
        stream.codec_context.thread_count = 1
        self.claimed = self._claimed_seconds(stream)
        self.resampler, self.pending, self.has_ended = None, bytearray(), False
        self.decoded = self._decode(stream)
        self.first = next(self.decoded, None)
        if self.first is None:
            raise Undecodable("none of its audio can be decoded")
        self.rate, self.layout = self.first.sample_rate, self.first.layout
        self.channels = self.layout.nb_channels
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise Undecodable(f"{self.channels} channels exceed the limit of {MAX_CHANNELS}")
        self.pieces = self._convert()

    def header(self) -> bytes:
        """Rate, channels, and what the header says of the length in seconds, or null."""
        return json.dumps({"rate": self.rate, "channels": self.channels, "claimed": self.claimed}).encode()

    def read(self, count: int) -> bytes:
        """The next `count` frames as float32, fewer at the end."""
        wanted = 4 * self.channels * count
        while len(self.pending) < wanted and (piece := next(self.pieces, None)) is not None:
            self.pending += piece
        taken = bytes(self.pending[:wanted])
        del self.pending[:wanted]
        return taken

    def skip(self, count: int) -> int:
        """How many of the next `count` frames there were."""
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
        self.pieces = self.decoded = self.first = self.resampler = None

    def _claimed_seconds(self, stream: "av.audio.stream.AudioStream") -> float | None:
        if self.container.format.name not in DEMUXERS_WITH_LENGTHS:
            return None
        if stream.duration is not None:
            return float(stream.duration * stream.time_base)
        is_single_process = len(self.container.streams) == 1  # else it is the longest stream's
        return self.container.duration / av.time_base if self.container.duration and is_single_process else None

    def _decode(self, stream: "av.audio.stream.AudioStream") -> Iterator["av.AudioFrame"]:
        """The stream's frames; what cannot be decoded is left out, as a player does, and broken ends are ends."""
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

    def _convert(self) -> Iterator[bytes]:
        """The frames as packed float32 of one rate and layout; where a stream changes them, it is resampled."""
        (first, self.first), kind = (self.first, None), None
        for frame in itertools.chain([first], self.decoded):
            found = (frame.format.name, frame.layout.name, frame.sample_rate)
            if found != kind:
                if self.resampler is not None:
                    yield from map(_bytes_of, self.resampler.resample(None))
                kind = found
                self.resampler = av.AudioResampler(format="flt", layout=self.layout, rate=self.rate)
            frame.pts = None
            yield from map(_bytes_of, self.resampler.resample(frame))
        if self.resampler is not None and not self.resampler.is_passthrough:
            yield from map(_bytes_of, self.resampler.resample(None))


def _bytes_of(frame: "av.AudioFrame") -> bytes:
    """A packed frame's samples; its buffer may be longer."""
    return memoryview(frame.planes[0])[: 4 * frame.samples * frame.layout.nb_channels].tobytes()


def serve(channel: socket.socket) -> None:
    """Answers requests until the socket is closed."""
    sound, descriptor = None, -1
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST.size, 1)
        if not message:
            return
        kind, first, second = REQUEST.unpack(message)
        times = os.times()  # from now on the process may take so many seconds of a processor
        used = int(times.user + times.system) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + MAX_SECONDS, resource.RLIM_INFINITY))
        try:
            if kind == b"o":
                descriptor = descriptors[0]
                sound = MediaDecoder(FileSlice(descriptor, first, second))
                answer, content = b"h", sound.header()
            elif kind == b"r":
                answer, content = b"f", sound.read(first)
            elif kind == b"s":
                answer, content = b"n", struct.pack("<q", sound.skip(first))
            else:
                if sound is not None:
                    sound.close()
                sound = None
                gc.collect()  # of what could not be opened
                os.close(descriptor)
                answer, content = b"c", b""
        except MemoryError:
            answer, content = b"e", b"it takes more memory than a recording can need"
        except Undecodable as error:
            answer, content = b"e", str(error).encode()
        except Exception as error:  # whatever a library makes of such a file
            answer, content = b"e", f"FFmpeg: {getattr(error, 'strerror', None) or error}".encode()
        channel.sendall(ANSWER.pack(answer, len(content)))
        channel.sendall(content)


def enter_sandbox(channel: int) -> None:
    """No further file, no writing, little memory; what stops the training process is for that one to hear."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for limit, most in (
        (resource.RLIMIT_AS, taken + MORE_MEMORY),
        (resource.RLIMIT_NOFILE, channel + 2),  # the one that is handed over
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    import av

    for name in ("video", "audio", "subtitles"):  # what PyAV would import later, where no file can be opened any more
        for part in ("stream", "codeccontext"):
            with contextlib.suppress(ImportError):  # where another version has it elsewhere
                importlib.import_module(f"av.{name}.{part}")
    channel = socket.socket(fileno=os.dup2(int(sys.argv[1]), 3))
    if int(sys.argv[1]) != 3:
        os.close(int(sys.argv[1]))
    enter_sandbox(3)
    serve(channel)
