"""Interrupted verification and damaged caches: no unverified file is used."""

from pathlib import Path

import pytest

from konkanivani.errors import CheckpointError
from konkanivani.hub import RemoteFile
from konkanivani.models.hub import locate_model
from tests.hub.server import Hub

NAME = "someone/whisper-small"
WEIGHTS = "model.safetensors"


def test_an_interrupted_verification_leaves_no_file(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].lies[WEIGHTS] = "content"
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


def test_a_cached_file_of_another_size_is_downloaded_again(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes]
) -> None:
    weights = locate_model(NAME, None, "whisper").path / WEIGHTS
    weights.resolve().write_bytes(whisper_files[WEIGHTS][:100])
    hub.requests.clear()
    assert locate_model(NAME, None, "whisper").path / WEIGHTS == weights
    assert weights.read_bytes() == whisper_files[WEIGHTS] and hub.downloads() == [WEIGHTS]
