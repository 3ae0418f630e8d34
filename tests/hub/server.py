"""Loopback server with the part of the hub protocol that downloads with `huggingface_hub` need."""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?")
RESOLVE = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Files of one commit; `faults` maps a file to the name of the fault in its response."""

    files: dict[str, bytes]
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    card: dict[str, object] = field(default_factory=dict)
    is_gated: bool = False
    faults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        content = repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.files.items()))
        self.commit = hashlib.sha1(content.encode()).hexdigest()
        self.branches = {"main": self.commit} | self.branches

    def at(self, commit: str) -> dict[str, bytes]:
        """Return the files of a commit."""
        return self.files

    def commit_of(self, revision: str) -> str | None:
        """Resolve a branch, tag or commit; return None if it does not exist."""
        return self.commit if revision == self.commit else self.branches.get(revision)


def is_large(name: str) -> bool:
    """Return whether Git LFS stores the file."""
    return name.endswith((".safetensors", ".nemo", ".bin", ".parquet"))


def git_id(data: bytes) -> str:
    """Return git's object id of a file."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class Hub(ThreadingHTTPServer):
    """Server with its repositories and a list of the received requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.is_proxy = False
        self.has_stalled = threading.Event()
        self.connections: list[socket.socket] = []

    def stop(self) -> None:
        """Close the port and all keep-alive connections."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the downloaded files."""
        return [
            line.split("/resolve/")[1].split("/", 1)[1]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        ]


class Handler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client's ACK of the headers
    server: Hub

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def _respond(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        if self.server.is_proxy:
            return self._send(200, b"<html>Please log in to the network</html>", {"Content-Type": "text/html"})
        if result := RESOLVE.fullmatch(path):
            name, revision, file = result.groups()
        elif result := API.fullmatch(path):
            _, name, _, revision, file = result.groups()
        else:
            return self._send_error(404, "")
        repository = self.server.repositories.get(name)
        if repository is None:
            return self._send_error(401, "RepoNotFound")
        if repository.token is not None and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._send_error(
                403 if repository.is_gated else 401, "GatedRepo" if repository.is_gated else "RepoNotFound"
            )
        commit = repository.commit_of(unquote(revision or "main"))
        if commit is None:
            return self._send_error(404, "RevisionNotFound")
        if path.startswith("/api/"):
            return self._list(name, repository, commit)
        return self._resolve(repository, commit, unquote(file))

    def _list(self, name: str, repository: Repository, commit: str) -> None:
        siblings = []
        for file, data in repository.at(commit).items():
            size = len(data)
            fault = repository.faults.get(file, "")
            entry = {"rfilename": file, "size": size, "blobId": git_id(data)}
            if is_large(file):
                sha256 = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 130}
            if fault == "huge":
                entry["size"] = 10**15
            siblings.append(entry)
        body = {"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings, "tags": []}
        body["cardData"] = repository.card
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repository: Repository, commit: str, file: str) -> None:
        files = repository.at(commit)
        if file not in files:
            return self._send_error(404, "EntryNotFound")
        data = files[file]
        fault = repository.faults.get(file, "")
        etag = hashlib.sha256(data).hexdigest() if is_large(file) else git_id(data)
        if fault.startswith("etag "):
            etag = fault.removeprefix("etag ")
        if fault == "content":
            data = b"\0" * len(data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if is_large(file):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data) + (fault == "size"))}
        if fault == "stalled" and self.command == "GET":
            return self._stall(data, headers)
        if fault == "cut" and self.command == "GET":
            return self._cut_connection(data, headers)
        start = int((match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) and match[1] or 0)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers)

    def _stall(self, data: bytes, headers: dict[str, str]) -> None:
        """Send half of the file, then wait until the client closes the connection."""
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.server.has_stalled.set()
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True

    def _cut_connection(self, data: bytes, headers: dict[str, str]) -> None:
        """Send half of the file and reset the connection."""
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        # With a linger time of 0, closing sends RST.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _send_error(self, status: int, code: str) -> None:
        self._send(status, json.dumps({"error": "rejected"}).encode(), {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run the hub in a thread during the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
