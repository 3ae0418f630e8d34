"""serve.py: flags, missing package, port in use, and shutdown by signals."""

import os
import re
import signal
import time
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest

from konkanivani.serve.server import bind
from tests.conftest import WORDS, run_in_process, speak, start_script
from tests.serve.parts import finish, receive_messages, send, start_recording
from tests.timeouts import PROCESS_TIMEOUT

SERVE = "training_scripts/serve.py"


def wait_for_address(output: Path, patience: float = PROCESS_TIMEOUT) -> str:
    """Wait until the script prints its address and return it."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        match = re.search(r"http://\S+/", output.read_text() if output.exists() else "")
        if match:
            return match[0]
        time.sleep(0.1)
    raise AssertionError(output.read_text())


class RemoteServer:
    """Address of a server in another process, for `start_recording`."""

    def __init__(self, address: str) -> None:
        self.address = address


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_checkpoint_is_served_until_a_signal(base, tmp_path, number):
    output = tmp_path / "output"
    script = start_script(SERVE, "--checkpoint", str(base), "--port", "0", "--device", "cpu", output=output)
    try:
        address = wait_for_address(output)
        with urlopen(address) as page:
            assert b"<title>KonkaniVani</title>" in page.read()
        assert urlsplit(address).hostname == "127.0.0.1"
        with start_recording(RemoteServer(address)) as connection:
            send(connection, np.concatenate([speak(list(WORDS)), np.zeros(16_000, dtype=np.float32)]))
            finish(connection)
            messages = receive_messages(connection, timeout=PROCESS_TIMEOUT)
        assert (messages[0]["type"], messages[-1]["type"]) == ("ready", "finished")
        assert messages[0]["model"] == base.name and not messages[0]["can_save"]
        with start_recording(RemoteServer(address)) as connection:
            send(connection, speak(list(WORDS)))
            os.kill(script.pid, number)
            ended = time.monotonic()
            code = script.wait(PROCESS_TIMEOUT)
        assert time.monotonic() - ended < 5
    finally:
        script.kill()
    assert code in (128 + number, -number)
    assert "Traceback" not in output.read_text()


def test_port_in_use_exits_with_6_before_reading_the_model(tmp_path):
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        done = run_in_process(SERVE, "--checkpoint", str(tmp_path / "absent.pt"), "--port", port)
    assert done.returncode == 6 and f"port {port}: Address already in use. Choose another port" in done.stderr
    # Negative control: with a free port, the missing checkpoint is the error.
    assert run_in_process(SERVE, "--checkpoint", str(tmp_path / "absent.pt"), "--port", "0").returncode == 4


@pytest.mark.parametrize("version", [None, "14.2"])
def test_missing_or_old_package_names_install_command(monkeypatch, version):
    def fake_version(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", fake_version)
    done = run_in_process(SERVE, "--checkpoint", "absent.pt")
    assert done.returncode == 2 and "-m pip install 'websockets>=15'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--port", "65536"), 2, "--port must be from 0 to 65535"),
        (("--checkpoint", "a", "--pretrained", "b", "--language", "mr"), 2, "give only one"),
        (("--checkpoint", "a", "--corrections", "/dev/null"), 6, "not a writable folder"),
        (("--checkpoint", "a", "--host", "no such host"), 6, "cannot be served at no such host"),
    ],
)
def test_invalid_flags_exit_with_code_and_message(flags, code, message):
    done = run_in_process(SERVE, *flags)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
