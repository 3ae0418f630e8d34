"""Recognition of speech while a person speaks: a recogniser for it, standard input, and output as text or JSON."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import stat
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import numpy as np
import torch

from konkanivani.console import display_width, printable
from konkanivani.data.audio.pcm import PcmDecoder, PcmFormat
from konkanivani.errors import DataError, defer_interrupt, explained
from konkanivani.inference.listener import EVERY, Event, Final, Listener
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.segmentation import STEPS_A_SECOND, Piece
from konkanivani.inference.whisper_generation import FallbackDecode
from konkanivani.inference.word_times import EmissionDelay
from konkanivani.lengths import SAMPLE_RATE

PIPE_BYTES = 2**20  # read at a time from a pipe: all that waits, usually
FILE_BYTES = 2**12  # read at a time from a file, where more always waits; 0.13 s of 16-bit audio at 16 kHz
BEHIND_SECONDS = 5.0  # backlog that is reported
FULL_SHARE = 0.8  # of a pipe: reported too, since a recorder loses audio if the pipe is full
TIMED_SECONDS = 5.0
USUAL_COLUMNS = 80  # of a terminal of unknown size
NOT_READ = "Pipe audio, or redirect an audio file: konkanivani listen - < speech.wav."


class LiveOutput:
    """Printer of results: final text on stdout, line by line, and partial text on a terminal, rewritten in place.

    Args:
        is_json: print each result, partial or final, as one line of JSON instead.
    """

    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._terminal: TextIO | None = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)

    @property
    def shows_partials(self) -> bool:
        """Return whether anyone sees partial results."""
        return self._is_json or self._terminal is not None

    def show(self, events: Sequence[Event]) -> None:
        """Print results and flush."""
        for event in events:
            if self._is_json:
                print(event_line(event), flush=True)
            elif isinstance(event, Final):
                self._rewrite("")
                print(printable(event.text), flush=True)
            else:
                self._rewrite(printable(f"{event.fixed} {event.tentative}".strip()))

    def _rewrite(self, text: str) -> None:
        if self._terminal is None:
            return
        columns = _columns(self._terminal) - 1
        # The latest words, if the line is too short for all.
        while display_width(text) > columns:
            text = text[1:]
        self._terminal.write(f"\r\x1b[K{text}")
        self._terminal.flush()


def _columns(terminal: TextIO) -> int:
    """Return the width of this terminal, which `shutil.get_terminal_size` would return for stdout only."""
    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except OSError:
        columns = 0
    return columns or USUAL_COLUMNS  # serial lines and some containers state 0


def event_line(event: Event) -> str:
    """Return an event as one line of JSON."""
    kind = "final" if isinstance(event, Final) else "partial"
    return printable(json.dumps({"kind": kind, **dataclasses.asdict(event)}, ensure_ascii=False))


def for_live_speech(recognizer: Recognizer) -> Recognizer:
    """Return the recogniser without Whisper's further attempts at other temperatures, and with limited final text.

    The attempts take up to six times as long, and a text without end takes half a minute on a slow machine, while the
    speaker continues. Loops are still removed, and silence is left empty.
    """
    decode = recognizer.decode
    if isinstance(decode, FallbackDecode):
        decode = dataclasses.replace(decode, temperatures=())
    return dataclasses.replace(recognizer, decode=decode, limits_final=True)


def expected_delay(recognizer: Recognizer, every: float = EVERY) -> str:
    """Return a sentence on the delay to expect, from one timed pass of each search."""
    seconds = min(TIMED_SECONDS, recognizer.segmentation.longest / STEPS_A_SECOND)
    noise = 0.01 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(0))
    piece = Piece(noise, 0.0, 0.0, seconds, 0.0, seconds)
    recognizer.recognize_prefix(noise)  # the first pass allocates memory and compiles kernels
    started = time.perf_counter()
    recognizer.recognize_prefix(noise)
    greedy = time.perf_counter() - started
    started = time.perf_counter()
    recognizer.recognize([piece], EmissionDelay())
    final = time.perf_counter() - started
    pause = recognizer.segmentation.pause / STEPS_A_SECOND
    return (
        f"Expected delay: partial text {max(every, greedy) + greedy:.2f} s, final text {pause + final:.2f} s after the "
        f"end of a sentence ({pause:g} s of pause, {final:.2f} s of decoding {seconds:g} s)."
    )


def listen(recognizer: Recognizer, descriptor: int, raw: PcmFormat, output: LiveOutput) -> str:
    """Recognise audio from a file descriptor until its end or Ctrl-C; return a sentence on leftover bytes, or "".

    Raises a DataError if the bytes are not audio or cannot be read, after the final text of the audio before them.
    """
    live = _LiveBytes(recognizer, raw, output)
    end: KeyboardInterrupt | DataError | None = None
    is_late = False
    try:
        for data in _read_pieces(descriptor):
            with defer_interrupt():  # Ctrl-C would lose this block or its results
                live.accept(data)
            behind = live.seconds(_waiting_bytes(descriptor))
            if behind > min(BEHIND_SECONDS, FULL_SHARE * live.seconds(_capacity(descriptor))) and not is_late:
                is_late = True
                print(f"Recognition is {behind:.0f} s behind: partial text is skipped.", file=sys.stderr)
    except (KeyboardInterrupt, DataError) as error:
        end = error
    if isinstance(end, KeyboardInterrupt):
        # Spoken before Ctrl-C, but not read yet; a second Ctrl-C leaves it out.
        with contextlib.suppress(DataError):
            live.accept(_read_waiting(descriptor))
    problem = live.finish(is_whole=end is None)
    if end is not None:
        raise end
    return problem


class _LiveBytes:
    """Decoder of bytes, and the listener of their samples, whose rate is known after the header."""

    def __init__(self, recognizer: Recognizer, raw: PcmFormat, output: LiveOutput) -> None:
        self._recognizer = recognizer
        self._output = output
        self._decoder = PcmDecoder(raw)
        self._listener: Listener | None = None

    def seconds(self, count: float) -> float:
        """Return the duration of a number of bytes; 0 before the header."""
        pcm = self._decoder.format
        return 0.0 if pcm is None else count / pcm.frame_bytes / pcm.rate

    def accept(self, data: bytes) -> None:
        """Decode bytes, and print the results."""
        self._accept(self._decoder.decode(data))

    def finish(self, is_whole: bool) -> str:
        """Print the last results; return a sentence on bytes left over if the input `is_whole`, or ""."""
        if is_whole:
            self._accept(self._decoder.finish())
        if self._listener is not None:
            self._output.show(self._listener.finish())
        if is_whole and self._decoder.leftover:
            return f"The last {self._decoder.leftover} bytes are not a whole sample and were left out."
        return ""

    def _accept(self, samples: np.ndarray) -> None:
        if self._decoder.format is None:
            return
        if self._listener is None:
            every = EVERY if self._output.shows_partials else None
            self._listener = Listener(self._recognizer, self._decoder.format.rate, every)
        self._output.show(self._listener.accept(samples))


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _read_pieces(descriptor: int) -> Iterator[bytes]:
    """Yield all bytes that wait in a pipe, or the next of a file, up to its end."""
    while True:
        with explained(DataError, "Standard input cannot be read", NOT_READ):
            data = os.read(descriptor, FILE_BYTES if _is_file(descriptor) else PIPE_BYTES)
        if not data:
            return
        yield data


def _read_waiting(descriptor: int) -> bytes:
    """Return the bytes that wait in a pipe; none of a file."""
    blocks = []
    missing = _waiting_bytes(descriptor)
    while missing > 0 and (data := os.read(descriptor, missing)):
        blocks.append(data)
        missing -= len(data)
    return b"".join(blocks)


def _waiting_bytes(descriptor: int) -> int:
    """Return the number of bytes that wait in a pipe; 0 for a file."""
    if _is_file(descriptor):
        return 0
    count = bytes(4)
    with contextlib.suppress(OSError):
        count = fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def _capacity(descriptor: int) -> float:
    """Return the largest number of bytes that can wait in a pipe; infinity for other inputs."""
    with contextlib.suppress(OSError):
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    return math.inf
