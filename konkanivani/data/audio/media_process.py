"""Pool of decoder processes (media_reader.py), started on demand and reused for further files.

A process serves one thread at a time. It exits with its parent, because the socket between them closes. A forked child
starts its own processes.
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
ANSWER_SECONDS = 1800.0  # for a stopped process or an unreachable disk; CPU time has a limit of its own
MAX_ANSWER_BYTES = 2**28
PIECE_BYTES = 2**20


class ReaderFailed(Exception):
    """Death or protocol violation of the decoder process; the message is the end of a sentence."""


class Refused(Exception):
    """Request that the decoder process answered with an error; the message is the end of a sentence."""


class Reader:
    """Decoder process for one file at a time; `is_sound` means that no answer is pending, so it can be reused."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    # -I: PYTHON* variables and the modules in the script's folder do not affect its imports.
                    [sys.executable, "-I", str(PROGRAM), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise ReaderFailed(f"the decoder process does not start: {error.strerror}") from None
        self.channel = ours
        self.is_sound = True
        ours.settimeout(ANSWER_SECONDS)

    def ask(self, kind: bytes, first: int = 0, second: int = 0, descriptor: int | None = None) -> bytearray:
        """Send a request and return the content of its answer.

        Raises:
            Refused: The process answered with an error and remains usable.
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
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

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

    def _begin_anew(self) -> None:
        """Reset the pool after a fork: the decoder processes belong to the parent."""
        readers = self._all
        # A new lock: another thread of the parent may have held the old one during the fork.
        self._lock = threading.Lock()
        self._idle: list[Reader] = []
        self._all = set()
        for reader in readers:
            reader.forget()


READERS = Readers()  # one pool per process, shared by all threads
