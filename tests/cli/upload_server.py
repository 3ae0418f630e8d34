"""Loopback HTTP server with the part of the Hugging Face hub protocol that uploads need."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


@dataclass
class Repository:
    """Model repository: files, and the number of commits."""

    is_private: bool
    pipeline_tag: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


@dataclass(frozen=True)
class Response:
    """HTTP response of the server; status 0 closes the connection."""

    status: int
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0


@dataclass
class FakeHub:
    """State of the server: repositories, all requests, and fixed responses by a part of method and path."""

    address: str = ""
    upload_mode: str = "regular"
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    responses: dict[str, Response] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    def respond(self, method: str, path: str, body: bytes) -> Response:
        """Return the response to a request."""
        self.requests.append(f"{method} {path}")
        for part, response in self.responses.items():
            if part in f"{method} {path}":
                return response
        if path == "/api/validate-yaml":
            return _json({"warnings": [{"message": "a warning"}], "errors": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.startswith("/blob/"):
            self.blobs[path.rpartition("/")[2]] = body
            return Response(200)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        owner, name, *rest = path.removeprefix("/api/models/").split("/")
        result = self.repositories.get(f"{owner}/{name}")
        if result is None:
            return Response(404, b'{"error": "Repository not found"}', (("X-Error-Code", "RepoNotFound"),))
        if rest in ([], ["revision", "main"]):
            return _json(self._info(f"{owner}/{name}", result))
        if rest[0] == "preupload":
            return _json({"files": [self._mode(result, file) for file in json.loads(body)["files"]]})
        assert rest[0] == "commit", path
        return self._commit(f"{owner}/{name}", result, body)

    def _create(self, request: dict) -> Response:
        name = f"{request['organization']}/{request['name']}"
        if name in self.repositories:
            return Response(409, b'{"error": "You already created this model repo"}')
        self.repositories[name] = Repository(request.get("visibility") == "private")
        return _json({"url": f"{self.address}/{name}"})

    def _info(self, name: str, result: Repository) -> dict:
        files = [{"rfilename": file} for file in result.files]
        info = {"id": name, "modelId": name, "sha": result.commit, "private": result.is_private, "siblings": files}
        return info | ({"pipeline_tag": result.pipeline_tag} if result.pipeline_tag else {})

    def _mode(self, result: Repository, file: dict) -> dict:
        is_large = self.upload_mode == "lfs" and file["path"].endswith(".safetensors")
        known = result.files.get(file["path"])
        oid = None
        if known is not None:
            header = b"" if is_large else b"blob %d\0" % len(known)
            oid = hashlib.new("sha256" if is_large else "sha1", header + known).hexdigest()
        mode = "lfs" if is_large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _batch(self, request: dict) -> Response:
        objects = [
            thing | {"actions": {"upload": {"href": f"{self.address}/blob/{thing['oid']}"}}}
            for thing in request["objects"]
        ]
        return _json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, result: Repository, body: bytes) -> Response:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                result.files[value["path"]] = base64.b64decode(value["content"])
            if entry["key"] == "lfsFile":
                content = self.blobs[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"] and len(content) == value["size"]
                result.files[value["path"]] = content
        result.commits += 1
        return _json({"commitUrl": f"{self.address}/{name}/commit/{result.commit}", "commitOid": result.commit})


def _json(value: object) -> Response:
    return Response(200, json.dumps(value).encode(), (("Content-Type", "application/json"),))


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Yield the state of a server that runs in a thread until the end of the block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization") or "")
            response = hub.respond(self.command, self.path.partition("?")[0], body)
            hub.stopping.wait(response.delay)
            if response.status == 0:
                self.close_connection = True
                return
            self.send_response(response.status)
            for name, value in response.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        do_GET = do_POST = do_PUT = handle_request

        def log_message(self, *_: object) -> None:
            """Disable the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stopping.set()
        server.shutdown()
        server.server_close()
