"""Names on the hub in place of folders of pretrained models."""

from pathlib import Path

import pytest

from konkanivani.errors import UsageError
from konkanivani.hub import is_hub_name, locate_model
from konkanivani.inference.speech_model import read_pretrained
from tests.hub.server import Hub

NAME = "someone/whisper-small"


def test_only_the_needed_files_are_downloaded(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    located = locate_model(NAME, None, "whisper")
    assert located.commit == hub.repositories[NAME].commit
    assert sorted(hub.downloads()) == sorted(whisper_files)
    assert {path.name: path.read_bytes() for path in located.path.iterdir()} == whisper_files
    read_pretrained(NAME).check_weights()
    assert sorted(hub.downloads()) == sorted(whisper_files)


def test_plan_downloads_the_settings_alone(hub: Hub, cache: Path) -> None:
    located = locate_model(NAME, None, "settings")
    assert hub.downloads() == ["config.json"]
    assert [path.name for path in located.path.iterdir()] == ["config.json"]
    assert (locate_model(NAME, None, "whisper").path / "model.safetensors").is_file()


def test_a_local_folder_wins(hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model(NAME, None, "whisper").path == Path(NAME)
    assert hub.requests == []
    with pytest.raises(UsageError, match="is a local path"):
        locate_model(NAME, "main", "whisper")


@pytest.mark.parametrize(
    "name", ["folder", "./a/b", "/a/b", "a/b/c", "a/..", "../b", "a/b.nemo", "a--b/c", "", "a/", "~/b"]
)
def test_paths_are_no_names(name: str) -> None:
    assert not is_hub_name(name)
