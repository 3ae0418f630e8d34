"""Fixtures: a loopback hub with a Whisper model, and a cache in a temporary folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.server import Hub, Repository, files_in, running_hub
from tests.whisper.small_model import write_model

TOKEN = "hf_ThisTokenMustNeverBePrinted"
# Files of a Whisper repository that are not needed; one of them is pickle.
UNNEEDED_FILES = {
    "README.md": b"# Model",
    "pytorch_model.bin": b"\x80\x04pickle",
    "model.fp32-00001-of-00002.safetensors": b"another variant",
    "flax_model.msgpack": b"flax",
}


@pytest.fixture(scope="session")
def whisper_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a small random Whisper model."""
    return files_in(write_model(tmp_path_factory.mktemp("hub") / "whisper"))


@pytest.fixture
def hub(whisper_files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub() as server:
        server.repositories["someone/whisper-small"] = Repository(whisper_files | UNNEEDED_FILES)
        yield server


@pytest.fixture
def cache(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configure `huggingface_hub` in this process and its children for the loopback hub and an empty cache."""
    from huggingface_hub import constants

    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return home / "hub"
