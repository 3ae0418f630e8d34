"""Access to the page: token, Host and Origin, and its static files.

A web page of another site can send requests to this machine, also by pointing its own name at 127.0.0.1 (DNS
rebinding). Such requests have a foreign Host or Origin, and do not know the token.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

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
