"""A recording session: samples from the page, results to the page through an outbox."""

import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.sync.server import ServerConnection

from konkanivani.errors import DataError
from konkanivani.inference.listener import Final, Partial
from konkanivani.serve.decoding_worker import BuildRecognizer, DecodingWorker, Recording, Result
from konkanivani.serve.messages import (
    Failure,
    Finish,
    Finished,
    Progress,
    Ready,
    ServerMessage,
    Start,
    format_message,
    parse_message,
    parse_samples,
)


def close_unread(connection: ServerConnection, code: CloseCode) -> None:
    """Close a connection on which the browser may still be sending; its messages are discarded."""
    # The browser's answer comes after its unread messages. Without it the socket would be reset, and the browser could
    # lose the server's last message.
    threading.Thread(target=_discard, args=(connection,), daemon=True).start()
    connection.close(code)


def _discard(connection: ServerConnection) -> None:
    try:
        while True:
            connection.recv()
    except ConnectionClosed:
        pass


class Outbox:
    """Messages to one browser, sent by their own thread, so that a slow browser delays nothing else.

    An unsent partial result or progress is replaced by the next one, so that only final results can pile up.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._wake = threading.Condition()
        self._unsent: deque[ServerMessage] = deque()
        self._is_closed = False
        self._sending_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: ServerMessage) -> None:
        """Append a message."""
        replaced: tuple[type, ...] = ()
        if isinstance(message, Partial | Final):
            replaced = (Partial,)
        elif isinstance(message, Progress):
            replaced = (Progress,)
        with self._wake:
            still_unsent = [unsent for unsent in self._unsent if not isinstance(unsent, replaced)]
            self._unsent = deque([*still_unsent, message])
            self._wake.notify()

    def blocked_seconds(self) -> float:
        """Return how long the current message has been waiting for the browser to read."""
        since = self._sending_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float) -> None:
        """Send the remaining messages, for up to `timeout` seconds; after that, cut the connection."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.cut()
            self._thread.join()

    def cut(self) -> None:
        """Shut the socket down, which ends a blocked `send`."""
        try:
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._unsent or self._is_closed)
                if not self._unsent:
                    return
                message = self._unsent.popleft()
            self._sending_since = time.monotonic()
            try:
                self._connection.send(format_message(message))
            except (ConnectionClosed, OSError):
                return
            self._sending_since = None


POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """Limits of the server; seconds, bytes and counts."""

    sessions: int = 4
    connections: int = 64
    message_bytes: int = 2**20
    backlog_seconds: float = 30.0
    idle_seconds: float = 60.0
    send_seconds: float = 10.0
    request_seconds: float = 5.0


DEFAULT_LIMITS = Limits()


class Session:
    """One recording over one WebSocket connection.

    Args:
        build_recognizer: called with the sample rate in Hz.
        ready: answer to the page's start.
    """

    def __init__(
        self,
        connection: ServerConnection,
        worker: DecodingWorker,
        build_recognizer: BuildRecognizer,
        ready: Ready,
        limits: Limits,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._build_recognizer = build_recognizer
        self._ready = ready
        self._limits = limits
        self._outbox = Outbox(connection)
        self._recording: Recording | None = None
        self._sample_rate = 0
        self._is_complete = False
        self._is_ended = False  # by the recogniser
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Exchange messages until the recording ends, the page leaves, or a limit is exceeded."""
        code = CloseCode.NORMAL_CLOSURE
        try:
            while not self._is_ended:
                self._check_limits()
                try:
                    message = self._connection.recv(timeout=POLL_SECONDS)
                except TimeoutError:
                    continue
                self._handle(message)
        except ConnectionClosed:
            pass
        except DataError as error:
            self._outbox.put(Failure(str(error)))
            code = CloseCode.POLICY_VIOLATION
        finally:
            if self._recording is not None:
                self._recording.cancel()
            self._outbox.close(self._limits.send_seconds)
        close_unread(self._connection, code)

    def _check_limits(self) -> None:
        limits = self._limits
        if self._recording is not None and self._recording.backlog > limits.backlog_seconds:
            raise DataError(
                f"The server is too slow for this recording: {limits.backlog_seconds:g} s of audio are waiting. Use a "
                "smaller model, --decode greedy, or fewer sessions at the same time."
            )
        if self._outbox.blocked_seconds() > limits.send_seconds:
            self._outbox.cut()
        # The page sends no more while its audio waits here.
        if self._recording is not None and self._recording.is_behind:
            self._heard_at = time.monotonic()
        if not self._is_complete and time.monotonic() - self._heard_at > limits.idle_seconds:
            raise DataError(f"No audio arrived for {limits.idle_seconds:g} s, so the session was closed. Start again.")

    def _handle(self, message: str | bytes) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, bytes):
            self._add(message)
            return
        command = parse_message(message)
        if isinstance(command, Start):
            self._start(command.sample_rate)
        elif isinstance(command, Finish) and self._recording is not None:
            self._is_complete = True
            self._recording.complete()
            self._worker.schedule(self._recording)
        else:
            raise DataError("The page sent a message at the wrong time. Reload the page.")

    def _start(self, sample_rate: int) -> None:
        if self._recording is not None:
            raise DataError(
                f"The sample rate changed from {self._sample_rate} to {sample_rate} Hz during the recording. Start a "
                "new recording."
            )
        self._sample_rate = sample_rate
        self._recording = Recording(self._build_recognizer, sample_rate, self._deliver)
        self._outbox.put(self._ready)

    def _add(self, message: bytes) -> None:
        samples = parse_samples(message)
        if self._recording is None or self._is_complete:
            raise DataError("The page sent audio before the start or after the end of a recording. Reload the page.")
        self._recording.add(samples)
        self._worker.schedule(self._recording)

    def _deliver(self, result: Result) -> None:
        self._outbox.put(result)
        if isinstance(result, Finished | Failure):
            self._is_ended = True
