"""Access control of the page: token, Host, Origin, headers, static files, and many connections."""

import errno
import http.client
import re
import socket
import time
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus

from konkanivani.errors import ResourceError
from konkanivani.serve.server import CONTENT_TYPES, STATIC, LimitedSocket, PageServer, bind
from konkanivani.serve.session import Limits
from tests.conftest import ROOT
from tests.serve.parts import connect_to, running_server


def get(server: PageServer, path: str, **headers: str) -> http.client.HTTPResponse:
    """Return the response to GET of a path below the token."""
    parts = urlsplit(server.address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.putrequest("GET", parts.path + path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.body = response.read()
    return response


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def test_every_static_file_is_served_with_its_type_and_safe_headers(server):
    for path in STATIC.iterdir():
        response = get(server, path.name)
        assert response.status == 200 and response.body == path.read_bytes()
        assert response.getheader("Content-Type") == CONTENT_TYPES[path.suffix]
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert response.getheader("Referrer-Policy") == "no-referrer"
        policy = response.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert get(server, "").body == (STATIC / "index.html").read_bytes()
    assert get(server, "", Host="localhost:1234").status == 200


def test_page_has_no_other_host_and_no_inline_script():
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.[a-z]+[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?![^>]*\ssrc=)", index)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8010", "127.0.0.1.evil.example", "", "[::1", "127.0.0.1@evil.example", "0.0.0.0"],
)
def test_foreign_host_header_is_rejected(server, host):
    response = get(server, "", Host=host)
    assert response.status == 403 and b"<html" not in response.body


def test_two_host_headers_or_none_are_rejected(server):
    parts = urlsplit(server.address)
    for lines in ([f"Host: {parts.netloc}"] * 2, []):
        with socket.create_connection((parts.hostname, parts.port)) as client:
            client.sendall("\r\n".join([f"GET {parts.path} HTTP/1.1", *lines, "", ""]).encode())
            assert client.recv(100).startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


@pytest.mark.parametrize(
    "token", ["", "x", "%00", "\u0915".encode().decode("latin-1").encode("ascii", "replace").decode()]
)
def test_wrong_token_is_rejected(server, token):
    for path in (f"/{token}/", f"/{token}/page.js", f"/{token}/listen", f"/{token}"):
        parts = urlsplit(server.address)
        connection = http.client.HTTPConnection(parts.netloc, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 403
        connection.close()


def test_tokens_differ_between_servers(server):
    with running_server() as other:
        tokens = [urlsplit(each.address).path for each in (server, other)]
    assert len(set(tokens)) == 2 and all(len(token) >= 22 for token in tokens)


def test_paths_outside_the_static_files_do_not_exist(server):
    for path in ("../server.py", "..%2fserver.py", "static/page.js", "etc/passwd", "page.js/", "%70age.js"):
        assert get(server, path).status == 404
    assert get(server, "page.js?1").status == 200


def test_address_without_final_slash_is_redirected(server):
    parts = urlsplit(server.address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.request("GET", parts.path.rstrip("/"))
    response = connection.getresponse()
    assert response.status == 308 and response.getheader("Location") == parts.path
    connection.close()


@pytest.mark.parametrize("endpoint", ["listen", "save", "render"])
@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "https://127.0.0.1", "http://localhost:9999"])
def test_foreign_origin_cannot_connect(server, endpoint, origin):
    with pytest.raises(InvalidStatus) as raised:
        connect_to(server, endpoint, origin=origin)
    assert raised.value.response.status_code == 403
    with connect_to(server, endpoint) as connection:  # negative control
        assert connection.response.status_code == 101


# The start of the response; requests that are not HTTP get none.
BROKEN_REQUESTS = {
    b"POST / HTTP/1.1\r\n\r\n": b"HTTP/1.1 403 ",
    b"\0" * 100: b"",
    b"GET / HTTP/9\r\n\r\n": b"",
    b"GET " + b"a" * 100_000: b"HTTP/1.1 414 ",
}


def test_invalid_requests_close_only_their_connection():
    with running_server(limits=Limits(request_seconds=0.5)) as server:
        parts = urlsplit(server.address)
        for request, expected in BROKEN_REQUESTS.items():
            with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
                client.sendall(request)
                response = client.recv(100)
                assert response[: max(1, len(expected))] == expected
        assert get(server, "").status == 200


def test_server_responds_despite_a_thousand_connections():
    with running_server(limits=Limits(request_seconds=1.0)) as server:
        parts = urlsplit(server.address)
        clients = []
        for _ in range(1000):
            client = socket.socket()
            client.settimeout(10)
            client.connect((parts.hostname, parts.port))
            clients.append(client)
        # Idle connections are closed after 1 s, those above the limit immediately.
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                assert get(server, "").status == 200
                break
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
        else:
            pytest.fail("the server does not respond any more")
        for client in clients:
            client.close()


def test_port_in_use_raises_resource_error():
    with running_server() as server:
        port = urlsplit(server.address).port
        with pytest.raises(ResourceError, match=f"port {port}: Address already in use.*--port"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", 0).close()  # negative control


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b"])
def test_wrong_host_advises_another_host(host):
    with pytest.raises(ResourceError, match=r"cannot be served at .*: .*\. Give an address .* with --host\.$"):
        bind(host, 0)


def test_server_continues_after_an_error_of_accept(monkeypatch):
    accept = LimitedSocket._accept
    errors = [OSError(errno.ECONNABORTED, "aborted"), OSError(errno.EPERM, "forbidden")]

    def fail_at_first(listening: LimitedSocket) -> object:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(LimitedSocket, "_accept", fail_at_first)
    with running_server() as server:
        assert get(server, "").status == 200 and errors == []


def test_server_listens_only_on_loopback(server):
    port = urlsplit(server.address).port
    listening = [
        line.split()[1]
        for line in open("/proc/net/tcp", encoding="ascii")
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_package_contains_every_static_file():
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    patterns = [line.strip() for line in setup.split("[options.package_data]")[1].split("[")[0].splitlines()]
    assert {f"serve/static/*{path.suffix}" for path in STATIC.iterdir()} <= set(patterns)
