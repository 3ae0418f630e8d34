"""Pretrained models by their name on the hub."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from konkanivani.config import PretrainedConfig
from konkanivani.errors import CheckpointError, ResourceError, UsageError
from konkanivani.hub import is_hub_name
from konkanivani.inference.speech_model import read_pretrained
from konkanivani.models.hub import FEATURES, locate_model
from tests.hub.conftest import UNNEEDED_FILES
from tests.hub.server import Hub, Repository
from tests.nemo.files import FOLDER

NAME = "someone/whisper-small"
SMALL = ["config.json", "generation_config.json"]


def test_only_needed_files_are_downloaded(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    located = locate_model(NAME, None, "whisper")
    assert located.commit == hub.repositories[NAME].commit
    needed = whisper_files | {"README.md": UNNEEDED_FILES["README.md"]}
    assert sorted(hub.downloads()) == sorted(needed)
    assert {path.name: path.read_bytes() for path in located.path.iterdir()} == needed
    read_pretrained(NAME).check_weights()
    assert sorted(hub.downloads()) == sorted(needed)


def test_settings_are_downloaded_without_weights(hub: Hub, cache: Path) -> None:
    located = locate_model(NAME, None, "settings")
    assert hub.downloads() == SMALL
    assert sorted(path.name for path in located.path.iterdir()) == SMALL
    assert (locate_model(NAME, None, "whisper").path / "model.safetensors").is_file()


def test_local_folder_is_preferred_to_hub_name(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model(NAME, None, "whisper").path == Path(NAME)
    assert hub.requests == []
    with pytest.raises(UsageError, match="is a local path"):
        locate_model(NAME, "main", "whisper")


@pytest.mark.parametrize(
    "name", ["folder", "./a/b", "/a/b", "a/b/c", "a/..", "../b", "a/b.nemo", "a--b/c", "", "a/", "~/b"]
)
def test_paths_are_not_hub_names(name: str) -> None:
    assert not is_hub_name(name)


def test_cached_model_is_used_without_network(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = locate_model(NAME, None, "whisper")
    hub.stop()
    assert locate_model(NAME, None, "whisper") == first
    assert f"cannot be reached: using {NAME} from the cache" in capfd.readouterr().err
    # A commit needs no request.
    assert locate_model(NAME, first.commit, "whisper") == first
    assert capfd.readouterr().err == ""


def test_cached_settings_alone_are_not_a_model_offline(hub: Hub, cache: Path) -> None:
    locate_model(NAME, None, "settings")
    hub.stop()
    assert locate_model(NAME, None, "settings").commit
    with pytest.raises(ResourceError, match="Connection refused"):
        locate_model(NAME, None, "whisper")


def test_complete_commit_is_used_offline_after_newer_settings(hub: Hub, cache: Path) -> None:
    first = locate_model(NAME, None, "whisper")
    hub.repositories[NAME] = Repository(hub.repositories[NAME].files | {"NEWS.md": b"moved"})
    assert locate_model(NAME, None, "settings").commit != first.commit
    hub.stop()
    assert locate_model(NAME, None, "whisper") == first


def test_branches_tags_and_commits_are_resolved(hub: Hub, cache: Path) -> None:
    commit = hub.repositories[NAME].commit
    hub.repositories[NAME].branches |= {"v1.0": commit, "refs/pr/1": commit}
    for revision in ("v1.0", "refs/pr/1", commit):
        assert locate_model(NAME, revision, "whisper").commit == commit


def test_sharded_weights_equal_single_file(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    tensors = safetensors.torch.load(whisper_files["model.safetensors"])
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = [{name: tensors[name] for name in sorted(tensors)[start::2]} for start in (0, 1)]
    index = {"weight_map": {name: file for file, part in zip(names, parts, strict=True) for name in part}}
    files = {name: data for name, data in whisper_files.items() if name != "model.safetensors"}
    files |= {file: safetensors.torch.save(part) for file, part in zip(names, parts, strict=True)}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.repositories[NAME] = Repository(files | UNNEEDED_FILES)
    pretrained = read_pretrained(NAME)
    assert set(hub.downloads()) == {*files, "README.md"}
    whole = read_pretrained(write_files(cache / "whole", whisper_files)).weights()
    assert all(torch.equal(weight, whole[name]) for name, weight in pretrained.weights().items())
    # A snapshot without one of its shards is incomplete: the shard is downloaded again.
    (pretrained.path / names[0]).unlink()
    locate_model(NAME, None, "whisper")
    assert (pretrained.path / names[0]).is_file()


def test_single_nemo_file_is_located(hub: Hub, cache: Path) -> None:
    hub.repositories["someone/parakeet"] = Repository(
        {"parakeet.nemo": (FOLDER / "parakeet.nemo").read_bytes(), "README.md": b"", "other/a.nemo": b""}
    )
    located = locate_model("someone/parakeet", None, "nemo")
    assert hub.downloads() == ["parakeet.nemo"]
    assert locate_model("someone/parakeet", located.commit, "nemo") == located
    hub.repositories["someone/two"] = Repository({"a.nemo": b"", "b.nemo": b""})
    with pytest.raises(CheckpointError, match="has 2 .nemo files"):
        locate_model("someone/two", None, "nemo")
    hub.repositories["someone/none"] = Repository({"README.md": b""})
    with pytest.raises(CheckpointError, match="has no config.json and no .nemo file"):
        locate_model("someone/none", None, "nemo")
    with pytest.raises(CheckpointError, match="of type 'whisper', and only parakeet_ctc"):
        locate_model(NAME, None, "nemo")


def test_missing_cached_files_are_downloaded(hub: Hub, cache: Path) -> None:
    first = locate_model(NAME, None, "whisper")
    for name in ("preprocessor_config.json", "tokenizer.json", "vocab.json"):
        if (first.path / name).exists():
            (first.path / name).resolve().unlink()  # the content; the name in the snapshot is a link to it
            (first.path / name).unlink()
    before = len(hub.downloads())
    for revision in (None, first.commit):
        read_pretrained(NAME, revision).vocabulary(PretrainedConfig(language="mr"))
    assert sorted(hub.downloads()[before:]) == ["preprocessor_config.json", "vocab.json"]


def start_offline(hub: Hub, files: dict[str, bytes]) -> Path:
    """Download a repository with these files, stop the hub, and return the snapshot."""
    hub.repositories[NAME] = Repository(files)
    located = locate_model(NAME, None, "whisper")
    hub.stop()
    assert locate_model(NAME, None, "whisper") == located and locate_model(NAME, located.commit, "settings") == located
    return located.path


def test_cached_byte_pairs_without_merges_are_not_a_model_offline(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes]
) -> None:
    assert "tokenizer.json" not in whisper_files
    (start_offline(hub, whisper_files) / "merges.txt").unlink()
    with pytest.raises(ResourceError, match="Connection refused"):
        locate_model(NAME, None, "whisper")


def test_cached_model_without_generation_config_is_used_only_if_the_repository_has_none(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes]
) -> None:
    generation = "generation_config.json"
    snapshot = start_offline(hub, {name: data for name, data in whisper_files.items() if name != generation})
    assert not (snapshot / generation).exists()  # and the model is complete
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    assert try_to_load_from_cache(NAME, generation, cache_dir=cache) is _CACHED_NO_EXIST
    shutil.rmtree(snapshot.parent.parent / ".no_exist")  # the cache of a program that has not asked for the file
    for needs in ("whisper", "settings"):
        with pytest.raises(ResourceError, match="Connection refused"):
            locate_model(NAME, None, needs)


def test_sharded_parakeet_is_refused_before_the_download(hub: Hub, cache: Path) -> None:
    files = {"config.json": b'{"model_type": "parakeet_ctc"}', "tokenizer.json": b"{}", FEATURES[0]: b"{}"}
    shard = "model-00001-of-00001.safetensors"
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    hub.repositories["someone/shards"] = Repository(files | {shard: b"x" * 100, "model.safetensors.index.json": index})
    message = "its weights are in several files, and a Parakeet model is read from a single model.safetensors"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            locate_model("someone/shards", None, "nemo")
    assert hub.downloads() == ["config.json"]
    hub.repositories["someone/shards"] = Repository(files | {"model.safetensors": b"x"})
    located = locate_model("someone/shards", None, "nemo")
    hub.stop()
    assert locate_model("someone/shards", None, "nemo") == located
    (located.path / "model.safetensors").rename(located.path / shard)
    (located.path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ResourceError, match="Connection refused"):  # not a complete Parakeet model
        locate_model("someone/shards", None, "nemo")


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
