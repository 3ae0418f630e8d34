"""Headless Chromium, controlled over its DevTools protocol."""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_SECONDS = 20.0
# A container has no sandbox for root and a small /dev/shm. The other flags disable requests to Google.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", "--remote-debugging-port=0"),
)


class Browser:
    """Browser tab; `problems` are errors and warnings of the console, `hosts` the hosts that it connects to."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.problems: list[str] = []
        self.hosts: set[str | None] = set()
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=START_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._record_event(message.get("method"), message.get("params", {}))

    def _record_event(self, method: str | None, event: dict) -> None:
        if method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"])[:500])
        elif method == "Network.requestWillBeSent":
            self.hosts.add(urlsplit(event["request"]["url"]).hostname)
        elif method == "Network.webSocketCreated":
            self.hosts.add(urlsplit(event["url"]).hostname)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> object:
        """Return the value of a JavaScript expression, evaluated as a user gesture."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, timeout: float = 15.0) -> object:
        """Wait until an expression is true and return its value."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}\n{self.evaluate('document.body.innerText')}\n{self.problems}")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def choose_files(self, *paths: Path) -> None:
        """Choose files in the file input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """Start Chromium with one tab; skip the test if it is missing."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_tab(Path(profile)), max_size=None, ping_interval=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def _tab(profile: Path) -> str:
    """Return the WebSocket address of the browser's tab."""
    from urllib.request import urlopen

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            port = int((profile / "DevToolsActivePort").read_text().splitlines()[0])
            with urlopen(f"http://127.0.0.1:{port}/json/list") as response:
                return next(tab["webSocketDebuggerUrl"] for tab in json.load(response) if tab["type"] == "page")
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
