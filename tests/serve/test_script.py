"""The script that serves the page: flags, missing package, port in use, and its end."""

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
from tests.patience import PATIENCE
from tests.serve.parts import finish, results, send, start

SERVE = "training_scripts/serve.py"


def address_in(output: Path, patience: float = PATIENCE) -> str:
    """Return the address that the script has printed."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = re.search(r"http://\S+/", output.read_text() if output.exists() else "")
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(output.read_text())


class Served:
    """Address of a server in another process, for `start`."""

    def __init__(self, address: str) -> None:
        self.address = address


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_checkpoint_is_served_until_a_signal(base, tmp_path, number):
    output = tmp_path / "output"
    script = start_script(SERVE, "--checkpoint", str(base), "--port", "0", "--device", "cpu", output=output)
    try:
        address = address_in(output)
        with urlopen(address) as page:
            assert b"<title>KonkaniVani</title>" in page.read()
        assert urlsplit(address).hostname == "127.0.0.1"
        with start(Served(address)) as connection:
            send(connection, np.concatenate([speak(list(WORDS)), np.zeros(16_000, dtype=np.float32)]))
            finish(connection)
            messages = results(connection, timeout=PATIENCE)
        assert (messages[0]["type"], messages[-1]["type"]) == ("ready", "finished")
        assert messages[0]["model"] == base.name and not messages[0]["can_save"]
        with start(Served(address)) as connection:
            send(connection, speak(list(WORDS)))
            os.kill(script.pid, number)
            ended = time.monotonic()
            code = script.wait(PATIENCE)
        assert time.monotonic() - ended < 5
    finally:
        script.kill()
    assert code in (128 + number, -number)
    assert "Traceback" not in output.read_text()


def test_a_port_in_use_ends_with_exit_code_6_before_the_model_is_read(tmp_path):
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        done = run_in_process(SERVE, "--checkpoint", str(tmp_path / "absent.pt"), "--port", port)
    assert done.returncode == 6 and f"port {port}: Address already in use. Choose another port" in done.stderr
    # Negative control: at a free port the missing checkpoint is the problem.
    assert run_in_process(SERVE, "--checkpoint", str(tmp_path / "absent.pt"), "--port", "0").returncode == 4


@pytest.mark.parametrize("version", [None, "14.2"])
def test_a_missing_or_old_package_is_named_with_its_command(monkeypatch, version):
    def answer(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", answer)
    done = run_in_process(SERVE, "--checkpoint", "absent.pt")
    assert done.returncode == 2 and "-m pip install 'websockets>=15'" in done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (("--port", "65536"), 2, "--port must be from 0 to 65535"),
        (("--checkpoint", "a", "--pretrained", "b", "--language", "mr"), 2, "give only one"),
        (("--checkpoint", "a", "--corrections", "/dev/null"), 6, "not a writable folder"),
        (("--checkpoint", "a", "--host", "no such host"), 6, "cannot be served at no such host"),
    ],
)
def test_flags_that_cannot_work_are_a_sentence(flags, code, sentence):
    done = run_in_process(SERVE, *flags)
    assert done.returncode == code and sentence in done.stderr and "Traceback" not in done.stderr
