"""The processes that decode with FFmpeg, from outside: started where one is needed, kept for the next file.

Each thread that reads has one for itself while it reads. They end with the process that they belong to, for they wait
at a socket of its; a process that is forked starts its own.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from konkanivani.data.audio.media_reader import ANSWER, MAX_SECONDS, REQUEST

PROGRAM = Path(__file__).with_name("media_reader.py")
ANSWER_SECONDS = 1800.0  # one that is stopped, or waits for a disk that is gone; its work has a limit of its own
MAX_ANSWER_BYTES = 2**28
PIECE_BYTES = 2**20


class ReaderFailed(Exception):
    """The process has ended, or says what it should not; what became of it as a sentence's end."""


class Refused(Exception):
    """The process says why it cannot do it; a sentence's end."""


class Reader:
    """A process that decodes one file at a time. `is_sound`: its answers have all been read, another file may come."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", str(PROGRAM), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise ReaderFailed(f"the decoder process does not start: {error.strerror}") from None
        self.channel, self.is_sound = ours, True
        ours.settimeout(ANSWER_SECONDS)

    def ask(self, kind: bytes, first: int = 0, second: int = 0, descriptor: int | None = None) -> bytearray:
        """The answer's content. Raises Refused, or ReaderFailed where there will be none any more."""
        self.is_sound = False
        try:
            descriptors = [] if descriptor is None else [descriptor]
            socket.send_fds(self.channel, [REQUEST.pack(kind, first, second)], descriptors)
            answer, size = ANSWER.unpack(self._receive(ANSWER.size))
            if not 0 <= size <= MAX_ANSWER_BYTES:
                raise ReaderFailed("the decoder process returned invalid data")
            content = self._receive(size)
        except OSError as error:
            raise ReaderFailed(self._end(error)) from None
        self.is_sound = True
        if answer == b"e":
            raise Refused(content.decode(errors="replace"))
        return content

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Lets go of it without a word: it is another process's."""
        self.channel.close()
        self.process.returncode = 0  # nobody waits for it here

    def _receive(self, size: int) -> bytearray:
        received = bytearray(size)
        view, done = memoryview(received), 0
        while done < size:
            count = self.channel.recv_into(view[done : done + PIECE_BYTES])
            if not count:
                raise ConnectionError
            done += count
        return received

    def _end(self, error: OSError) -> str:
        """What has become of the process; it is gone after this."""
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
    """The processes of this one: those at work, and those that have nothing to do."""

    def __init__(self) -> None:
        self._all: set[Reader] = set()
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def take(self) -> Reader:
        """One that is nobody else's until it is given back; a ReaderFailed where none can be started."""
        with self._lock:
            while self._idle:
                reader = self._idle.pop()
                if reader.process.poll() is None:
                    return reader
                self._all.discard(reader)  # killed meanwhile, as where memory ran out
                reader.channel.close()
        reader = Reader()
        with self._lock:
            self._all.add(reader)
        return reader

    def give_back(self, reader: Reader) -> None:
        """It waits for the next file, or is ended where it is in the middle of something."""
        with contextlib.suppress(ReaderFailed, Refused):
            if reader.is_sound:
                reader.ask(b"c")
        with self._lock:
            if reader.is_sound:
                self._idle.append(reader)
                return
            self._all.discard(reader)
        reader.close()

    def _begin_anew(self) -> None:
        """With none; those of the process that this one was forked from are that one's."""
        readers = self._all
        self._lock, self._idle, self._all = threading.Lock(), [], set()
        for reader in readers:
            reader.forget()


READERS = Readers()  # a process has these children and no others, whoever asks
