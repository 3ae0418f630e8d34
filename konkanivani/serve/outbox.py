"""Messages on their way to a browser."""

import socket
import threading
import time
from collections import deque

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.sync.server import ServerConnection

from konkanivani.inference.listener import Final, Partial
from konkanivani.serve.messages import Progress, ServerMessage, format_message


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
            kept = [unsent for unsent in self._unsent if not isinstance(unsent, replaced)]
            self._unsent = deque([*kept, message])
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
