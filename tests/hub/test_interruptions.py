"""Interrupted verification and damaged caches: no unverified file is used."""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from konkanivani.errors import CheckpointError, ResourceError
from konkanivani.hub import MARKER, RemoteFile, Repository
from konkanivani.models.hub import locate_model
from tests.conftest import ROOT
from tests.hub.server import Hub, git_id
from tests.timeouts import PROCESS_TIMEOUT

NAME = "someone/whisper-small"
WEIGHTS = "model.safetensors"


def test_interrupted_verification_leaves_no_file(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].faults[WEIGHTS] = "content"
    verify = RemoteFile.is_sound

    def interrupt(file: RemoteFile, path: Path) -> bool:
        if file.name == WEIGHTS:
            raise KeyboardInterrupt
        return verify(file, path)

    monkeypatch.setattr(RemoteFile, "is_sound", interrupt)
    with pytest.raises(KeyboardInterrupt):
        locate_model(NAME, None, "whisper")
    assert list(cache.rglob("config.json")) and not list(cache.rglob(WEIGHTS))
    monkeypatch.setattr(RemoteFile, "is_sound", verify)
    with pytest.raises(CheckpointError, match="differs in size or digest"):
        locate_model(NAME, None, "whisper")


def test_cached_file_of_wrong_size_is_downloaded_again(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    weights = locate_model(NAME, None, "whisper").path / WEIGHTS
    weights.resolve().write_bytes(whisper_files[WEIGHTS][:100])
    hub.requests.clear()
    assert locate_model(NAME, None, "whisper").path / WEIGHTS == weights
    assert weights.read_bytes() == whisper_files[WEIGHTS] and hub.downloads() == [WEIGHTS]


KILLED_BEFORE_VERIFICATION = """
import os, signal
from konkanivani.hub import RemoteFile
from konkanivani.models.hub import locate_model

verify = RemoteFile.is_sound
RemoteFile.is_sound = lambda file, path: (
    os.kill(os.getpid(), signal.SIGKILL) if file.name == "model.safetensors" else verify(file, path)
)
locate_model("someone/whisper-small", None, "whisper")
"""


def kill_before_verification(hub: Hub) -> None:
    """Download weights with wrong content in a process that is killed by SIGKILL before it verifies them."""
    hub.repositories[NAME].faults[WEIGHTS] = "content"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_VERIFICATION], cwd=ROOT, timeout=PROCESS_TIMEOUT, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_unverified_file_after_sigkill_is_not_used(hub: Hub, cache: Path) -> None:
    kill_before_verification(hub)
    (weights,) = cache.rglob(WEIGHTS)
    commit = hub.repositories[NAME].commit
    hub.repositories[NAME].faults.clear()
    good = locate_model(NAME, commit, "whisper").path / WEIGHTS
    assert good == weights and good.read_bytes() == hub.repositories[NAME].files[WEIGHTS]
    assert not list(cache.rglob(f"{MARKER}*"))


def test_unverified_file_is_not_used_without_network(hub: Hub, cache: Path) -> None:
    kill_before_verification(hub)
    commit = hub.repositories[NAME].commit
    hub.stop()
    with pytest.raises(ResourceError, match="Connection refused"):
        locate_model(NAME, commit, "whisper")
    assert not list(cache.rglob(WEIGHTS))


def test_negative_control_without_marker_unverified_file_is_used(hub: Hub, cache: Path) -> None:
    kill_before_verification(hub)
    (marker,) = cache.rglob(f"{MARKER}*")
    marker.unlink()
    located = locate_model(NAME, hub.repositories[NAME].commit, "whisper")
    assert set((located.path / WEIGHTS).read_bytes()) == {0}


@pytest.mark.parametrize("name", ["../../../precious", "/precious", "", "a\0b"])
def test_marker_with_path_outside_cache_deletes_nothing(hub: Hub, cache: Path, name: str) -> None:
    folder = locate_model(NAME, None, "whisper").path
    (cache.parent / "precious").write_bytes(b"1")
    (folder.parents[1] / f"{MARKER}0").write_bytes(name.encode())
    before = sorted(cache.parent.rglob("[!.]*"))
    locate_model(NAME, None, "whisper")
    assert sorted(cache.parent.rglob("[!.]*")) == before and not list(cache.rglob(f"{MARKER}*"))


def test_download_waits_for_lock_of_another_process(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    located = locate_model(NAME, None, "whisper")
    (located.path / WEIGHTS).unlink()
    descriptor = os.open(located.path.parents[1], os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    lock = fcntl.flock

    def wait(file: int, operation: int) -> None:
        """Release the other lock when the exclusive lock is requested."""
        if operation == fcntl.LOCK_EX:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        lock(file, operation)

    monkeypatch.setattr("konkanivani.hub.fcntl.flock", wait)
    assert locate_model(NAME, None, "whisper") == located
    os.close(descriptor)
    assert f"Another process is downloading {NAME}" in capfd.readouterr().err


def serve_wrong_etag_for_weights(hub: Hub, cache: Path) -> Path:
    """Make the hub send the ETag of another cached file for the weights; return the path of that file."""
    settings = locate_model(NAME, None, "settings").path / "config.json"
    blob = settings.resolve()
    # Name another cached file by its SHA-256, as Git LFS does.
    other = blob.with_name(hashlib.sha256(blob.read_bytes()).hexdigest())
    blob.rename(other)
    settings.unlink()
    settings.symlink_to(other)
    hub.repositories[NAME].faults[WEIGHTS] = f"etag {other.name}"
    return other


def test_etag_of_another_cached_file_is_rejected(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    other = serve_wrong_etag_for_weights(hub, cache)
    with pytest.raises(CheckpointError, match=f"states '{other.name[:50]}.* as the digest of its {WEIGHTS}"):
        locate_model(NAME, None, "whisper")
    assert other.read_bytes() == whisper_files["config.json"]
    (card,) = cache.rglob("README.md")
    card.unlink()
    hub.repositories[NAME].faults = {"README.md": f"etag {git_id(b'other')}"}
    with pytest.raises(CheckpointError, match="as the digest of its README.md"):
        locate_model(NAME, None, "whisper")
    # An ETag in another format, as of a mirror, is not compared as a digest.
    hub.repositories[NAME].faults = {WEIGHTS: "etag 65f2-1a"}
    assert (locate_model(NAME, None, "whisper").path / WEIGHTS).is_file()


def test_negative_control_without_etag_check_other_file_is_deleted(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = serve_wrong_etag_for_weights(hub, cache)
    monkeypatch.setattr(Repository, "_check_etag", lambda *_: None)
    with pytest.raises(CheckpointError, match="differs in size or digest"):
        locate_model(NAME, None, "whisper")
    assert not other.exists()
