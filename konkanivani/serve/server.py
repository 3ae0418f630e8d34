"""Server of the page: access to it, its WebSocket endpoints (recording, correction, transcript), and its limits.

A web page of another site can send requests to this machine, also by pointing its own name at 127.0.0.1 (DNS
rebinding). Such requests have a foreign Host or Origin, and do not know the token.
"""

import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from konkanivani.errors import DataError, KonkaniVaniError, ResourceError, explained
from konkanivani.serve.corrections import Corrections, receive_correction, render_transcript
from konkanivani.serve.decoding_worker import BuildRecognizer, DecodingWorker
from konkanivani.serve.messages import Failure, Ready, Remove, Saved, format_message
from konkanivani.serve.session import DEFAULT_LIMITS, Limits, Session, close_unread

# --------------------
# Access: token, Host and Origin, and the static files.

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
CONTENT_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARDS = frozenset({"", "0.0.0.0", "::"})


@dataclass(frozen=True)
class Gate:
    """Check of every request.

    Args:
        token: secret first part of the path.
        names: host names under which the server is reached; the port is free, for forwarded ports.
        endpoints: paths of the WebSocket connections.
    """

    token: str
    names: frozenset[str]
    endpoints: frozenset[str]
    files: Mapping[str, bytes]

    def respond(self, request: Request) -> Response | None:
        """Return the HTTP response; None to open a WebSocket connection."""
        host = _only(request.headers, "Host")
        if host is None or _host_name(host) not in self.names:
            return _refuse(HTTPStatus.FORBIDDEN, "The page is served only to the addresses that the terminal shows.\n")
        token, slash, name = request.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return _refuse(
                HTTPStatus.FORBIDDEN, "The token in the address is wrong. Open the address in the terminal.\n"
            )
        origin = _only(request.headers, "Origin")
        if name in self.endpoints:
            # Browsers always send the Origin of a WebSocket connection.
            is_own = origin == f"http://{host}"
            return None if is_own else _refuse(HTTPStatus.FORBIDDEN, "The connection comes from another page.\n")
        if not slash:
            return _respond(HTTPStatus.PERMANENT_REDIRECT, b"", Headers(Location=f"/{self.token}/"), host)
        content = self.files.get(name or INDEX)
        if content is None:
            return _refuse(HTTPStatus.NOT_FOUND, "There is no such file.\n")
        return _respond(HTTPStatus.OK, content, Headers({"Content-Type": content_type(name or INDEX)}), host)

    def endpoint(self, request: Request) -> str:
        """Return the endpoint of an admitted WebSocket request."""
        return request.path.partition("?")[0].rpartition("/")[2]


def build_gate(token: str, host: str, endpoints: frozenset[str]) -> Gate:
    """Return the gate of a server that is bound to `host`."""
    names = LOCAL_NAMES if host in WILDCARDS else LOCAL_NAMES | {host.lower()}
    return Gate(token, names, endpoints, read_files())


def read_files() -> dict[str, bytes]:
    """Return the static files by name."""
    return {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in CONTENT_TYPES}


def content_type(name: str) -> str:
    """Return the Content-Type of a static file."""
    return CONTENT_TYPES[Path(name).suffix]


def _only(headers: Headers, name: str) -> str | None:
    """Return the value of a header that occurs once."""
    values = headers.get_all(name)
    return values[0] if len(values) == 1 else None


def _host_name(host: str) -> str | None:
    """Return the host name of a Host header without its port, in lower case; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _refuse(status: HTTPStatus, sentence: str) -> Response:
    return _respond(status, sentence.encode(), Headers({"Content-Type": "text/plain; charset=utf-8"}), "")


def _respond(status: HTTPStatus, body: bytes, headers: Headers, host: str) -> Response:
    """Return a response with the security headers; `host` is the server's own address, for WebSocket connections."""
    # Older browsers do not include WebSocket connections in 'self'.
    connect = f"'self' ws://{host}" if host else "'self'"
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers["Content-Security-Policy"] = policy
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Opener-Policy"] = "same-origin"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    headers["Cache-Control"] = "no-store"
    headers["Content-Length"] = str(len(body))
    headers["Connection"] = "close"
    return Response(status.value, status.phrase, headers, body)


# --------------------
# Server.

LISTEN = "listen"
SAVE = "save"
RENDER = "render"
TOKEN_BYTES = 16
CLOSE_SECONDS = 1.0  # for the browser's answer to the end of a connection
ACCEPT_SECONDS = 0.2
# A page sends its next file when it has the last result, a moment before the server has ended the session.
SESSION_SECONDS = 1.0
WAITING_CONNECTIONS = 512  # in the kernel, until they are accepted or refused
CLOSED = (errno.EBADF, errno.EINVAL)  # errors of `accept` after the socket was closed or shut down

Handler = Callable[[socket.socket, Any], None]


class LimitedSocket(socket.socket):
    """Listening socket that closes connections beyond a limit, and continues after errors until it is closed."""

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._slots = threading.Semaphore(most)
        # `accept` must return now and then, or it would outlast the closed socket.
        self.settimeout(ACCEPT_SECONDS)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection within the limit."""
        while True:
            try:
                connection, address = super().accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in CLOSED:
                    raise
                # Such as a lack of file descriptors, or a network error of a connection that waits.
                time.sleep(ACCEPT_SECONDS)
                continue
            if self._slots.acquire(blocking=False):
                return connection, address
            connection.close()

    def counted(self, handler: Handler) -> Handler:
        """Return the handler of accepted connections, which frees a slot at its end."""

        def handle(connection: socket.socket, address: Any) -> None:
            try:
                handler(connection, address)
            finally:
                self._slots.release()

        return handle


class PageServer:
    """HTTP and WebSocket server of the page; `serve` runs it.

    Args:
        build_recognizer: builds the recogniser of a recording with this sample rate in Hz.
        ready: description of the model for the page.
        listening: socket of `bind`.
        host: host name in the address of the page.
        corrections: destination of corrected transcripts, None to refuse them.
    """

    def __init__(
        self,
        build_recognizer: BuildRecognizer,
        ready: Ready,
        listening: socket.socket,
        host: str,
        corrections: Corrections | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._build_recognizer = build_recognizer
        self._ready = ready
        self._corrections = corrections
        self._limits = limits
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._gate = build_gate(self._token, host, frozenset({LISTEN, SAVE, RENDER}))
        self._host = "127.0.0.1" if host in WILDCARDS else host
        self._sessions = threading.Semaphore(limits.sessions)
        self._receiving = threading.Semaphore(limits.sessions)
        self._saving = threading.Lock()
        self._connections: set[ServerConnection] = set()
        self._lock = threading.Lock()  # of the connections
        self._worker = DecodingWorker()
        self._port = listening.getsockname()[1]
        self._server = self._build_server(LimitedSocket(listening, limits.connections))

    def _build_server(self, listening: LimitedSocket) -> Server:
        # The library logs a traceback for every broken handshake.
        logger = logging.getLogger(f"{__name__}.websockets")
        logger.setLevel(logging.CRITICAL + 1)
        limits = self._limits
        server = serve(
            self._handle,
            sock=listening,
            process_request=self._process_request,
            compression=None,
            server_header=None,
            max_size=limits.message_bytes,
            open_timeout=limits.request_seconds,
            close_timeout=CLOSE_SECONDS,
            ping_interval=limits.send_seconds,
            ping_timeout=limits.send_seconds,
            logger=logger,
        )
        server.handler = listening.counted(server.handler)
        return server

    @property
    def address(self) -> str:
        """Return the address of the page, with the token."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/{self._token}/"

    def serve(self) -> None:
        """Serve until `close` is called from another thread, or until an exception such as KeyboardInterrupt."""
        self._server.serve_forever()

    def close(self) -> None:
        """Close all connections and the port."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close(CloseCode.GOING_AWAY)
        self._server.shutdown()
        self._worker.close()

    def _process_request(self, _connection: ServerConnection, request: Request) -> Response | None:
        return self._gate.respond(request)

    def _handle(self, connection: ServerConnection) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            self._answer(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        endpoint = self._gate.endpoint(connection.request)
        if endpoint == LISTEN:
            self._listen(connection)
            return
        try:
            if endpoint == SAVE:
                self._save(connection)
            else:
                render_transcript(connection, self._limits.request_seconds)
        except ConnectionClosed:
            pass
        except TimeoutError:
            close_unread(connection, CloseCode.POLICY_VIOLATION)
        except KonkaniVaniError as error:
            _say_and_close(connection, str(error), CloseCode.POLICY_VIOLATION)

    def _listen(self, connection: ServerConnection) -> None:
        if not self._sessions.acquire(timeout=SESSION_SECONDS):
            sentence = f"All {self._limits.sessions} sessions are in use. Close one, or try again later."
            _say_and_close(connection, sentence, CloseCode.TRY_AGAIN_LATER)
            return
        try:
            Session(connection, self._worker, self._build_recognizer, self._ready, self._limits).run()
        finally:
            self._sessions.release()

    def _save(self, connection: ServerConnection) -> None:
        if self._corrections is None:
            raise DataError("Corrections are not saved. Start the server with --corrections DIR.")
        # A few at a time, so that their audio does not add up in memory. A connection that waits answers no keepalive.
        with self._receiving:
            correction = receive_correction(connection, self._limits.request_seconds)
            with self._saving:
                if isinstance(correction, Remove):
                    rows = self._corrections.remove(correction.key)
                else:
                    rows = self._corrections.save(correction)
        connection.send(format_message(Saved(rows)))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a ResourceError if the address cannot be used."""
    failure = f"The page cannot be served at {host}, port {port}"
    other_host = "Give an address of this computer with --host."
    with explained(ResourceError, failure, other_host):  # a system without IPv6 has no such sockets
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # A port of a server that has just ended can be used at once.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(WAITING_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        listening.close()
        # A UnicodeError is about a name that no host can have, such as "a..b".
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            with explained(ResourceError, failure, other_host, UnicodeError):
                raise
        with explained(ResourceError, failure, "Choose another port with --port."):
            raise
    return listening


def _say_and_close(connection: ServerConnection, sentence: str, code: CloseCode) -> None:
    try:
        connection.send(format_message(Failure(sentence)))
    except ConnectionClosed:
        return
    close_unread(connection, code)
