"""Data sets on the hub as --source of prepare_data.py: configurations, revisions, offline use, invalid input."""

import json
from pathlib import Path

import pytest

from konkanivani.corpora.huggingface import DatasetName, _matches, locate_dataset, parse_dataset_name
from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.files import cache_folder
from tests.conftest import run_script
from tests.corpora.test_formats import huggingface_parquet
from tests.hub.conftest import TOKEN
from tests.hub.server import Hub, Repository, files_in

NAME = "someone/speech"
FLAGS = ("--format", "huggingface", "--audio_column", "speech", "--text_column", "words")
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="session")
def parquet_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return one Parquet file per split."""
    folder = tmp_path_factory.mktemp("parquet") / "corpus"
    huggingface_parquet(folder)
    return {name.split("/")[1].split("-")[0]: data for name, data in files_in(folder).items()}


@pytest.fixture(autouse=True)
def own_cache_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "own"))


def rename_splits(pattern: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {pattern.format(split): data for split, data in files.items()}


def run_prepare_data(tmp_path: Path, source: str, code: int, output: str = "out") -> str:
    done = run_script(
        "training_scripts/prepare_data.py", *FLAGS, "--source", source, "--output", str(tmp_path / output)
    )
    words = done.stdout + done.stderr
    assert done.returncode == code, words
    assert TOKEN not in words and "Traceback" not in words
    if code:
        assert not (tmp_path / output).exists() and len(done.stderr.strip().splitlines()) == 1
    return words


def test_configuration_of_dataset_card_is_prepared_and_cached(
    hub: Hub, cache: Path, tmp_path: Path, parquet_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [{"split": split, "path": [f"rows/mr-{split}*"]} for split in SPLITS]
    card = {"configs": [{"config_name": "mr_in", "data_files": paths}, {"config_name": "hi_in", "data_files": "hi/*"}]}
    others = {"hi/train-0.parquet": b"another language", "speech.py": b"raise SystemExit(9)", "README.md": b""}
    repository = Repository(rename_splits("rows/mr-{}.parquet", parquet_files) | others, card=card)
    hub.repositories[NAME] = repository
    label = f"{NAME}:mr_in@{repository.commit}"
    assert label in run_prepare_data(tmp_path, f"{NAME}:mr_in", 0)
    assert sorted(hub.downloads()) == sorted(rename_splits("rows/mr-{}.parquet", parquet_files))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["source"] == label
    assert {split["name"]: split["utterances"] for split in report["splits"]} == {"train": 8, "valid": 2, "test": 2}
    assert not (tmp_path / "out" / "tables").exists()
    # The label in the report is a valid --source, which needs neither the branch nor the network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert label in run_prepare_data(tmp_path, label, 0, "again")
    assert hub.requests == []
    manifests = [(tmp_path / folder / "train.jsonl").read_bytes() for folder in ("out", "again")]
    assert manifests[0] == manifests[1]


def test_cached_dataset_is_used_without_network(
    hub: Hub, cache: Path, parquet_files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    files = rename_splits("mr_in/{}.parquet", parquet_files) | {"hi_in/train.parquet": b""}
    hub.repositories[NAME] = Repository(files)
    first = locate_dataset(DatasetName(NAME, "mr_in"))
    hub.stop()
    assert locate_dataset(DatasetName(NAME, "mr_in")) == first
    assert "cannot be reached: using someone/speech from the cache" in capfd.readouterr().err
    with pytest.raises(ResourceError, match="Connection refused"):
        locate_dataset(DatasetName(NAME, "hi_in"))
    # A file is removed from the cache, which is then incomplete.
    next(iter(first.files.values())).unlink()
    with pytest.raises(ResourceError, match="Connection refused"):
        locate_dataset(DatasetName(NAME, "mr_in"))


@pytest.mark.parametrize(
    "pattern, config, others",
    [
        ("data/{}-00000-of-00001.parquet", "", {}),
        ("mr_in/{}/0000.parquet", "mr_in", {"hi_in/train/0000.parquet": b""}),
        ("data/mr_in-{}.parquet", "mr_in", {"data/hi_in-train.parquet": b""}),
    ],
)
def test_configuration_is_found_by_folder_or_file_name(
    hub: Hub, cache: Path, parquet_files: dict[str, bytes], pattern: str, config: str, others: dict[str, bytes]
) -> None:
    files = rename_splits(pattern, parquet_files)
    hub.repositories[NAME] = Repository(files | others)
    assert set(locate_dataset(DatasetName(NAME, config)).files) == set(files)


def test_parquet_conversion_branch_is_used(hub: Hub, cache: Path, parquet_files: dict[str, bytes]) -> None:
    class Converted(Repository):
        """Repository whose main branch has only a script and an archive."""

        def at(self, commit: str) -> dict[str, bytes]:
            return self.files if commit == self.commit else {"speech.py": b"code", "data/mr.tar.gz": b""}

    repository = Converted(rename_splits("mr_in/{}/0000.parquet", parquet_files))
    repository.branches = {"main": "1" * 40, "refs/convert/parquet": repository.commit}
    hub.repositories[NAME] = repository
    tables = locate_dataset(DatasetName(NAME, "mr_in"))
    assert tables.commit == repository.commit and len(tables.files) == 3
    assert locate_dataset(DatasetName(NAME)).commit == repository.commit  # the only configuration
    with pytest.raises(UsageError, match="no configuration kok. Give one of mr_in, such as someone/speech:mr_in"):
        locate_dataset(DatasetName(NAME, "kok"))
    repository = Converted({"mr_in/partial-train/0000.parquet": parquet_files["train"]})
    repository.branches = {"main": "1" * 40, "refs/convert/parquet": repository.commit}
    hub.repositories[NAME] = repository
    with pytest.raises(CheckpointError, match="converted only a part"):
        locate_dataset(DatasetName(NAME, "mr_in"))


def test_invalid_sources_exit_with_one_line(
    hub: Hub, cache: Path, tmp_path: Path, parquet_files: dict[str, bytes]
) -> None:
    hub.repositories[NAME] = Repository({"speech.py": b"", "a.csv": b""})
    assert "has no Parquet files" in run_prepare_data(tmp_path, NAME, 2)
    assert "no public repository someone/typo" in run_prepare_data(tmp_path, "someone/typo:mr", 2)
    assert "has no branch, tag or commit v9" in run_prepare_data(tmp_path, f"{NAME}@v9", 2)
    assert "is not the name of a branch" in run_prepare_data(tmp_path, f"{NAME}@../main", 2)
    assert "or a name on the hub such as google/fleurs:mr_in" in run_prepare_data(tmp_path, "a/b/c", 2)
    hub.repositories[NAME] = Repository({"train.parquet": b"PAR1 no table"})
    commit = hub.repositories[NAME].commit
    assert f"{NAME}@{commit}/train.parquet cannot be read as Parquet" in run_prepare_data(tmp_path, NAME, 3)


CARD = {"configs": [{"config_name": "a", "data_files": [{"split": "../../x", "path": "*"}]}]}


@pytest.mark.parametrize(
    "files, faults, card, kind, words",
    [
        ({"../x.parquet": b""}, {}, {}, CheckpointError, "outside of the folder"),
        ({"x.parquet": b"1"}, {}, CARD, CheckpointError, "declares a split whose name is outside"),
        ({"x.parquet": b"12"}, {"x.parquet": "size"}, {}, CheckpointError, "does not have the size"),
        ({"x.parquet": b"12"}, {"x.parquet": "content"}, {}, CheckpointError, "differs in size or digest"),
        ({"x.parquet": b"12"}, {"x.parquet": "cut"}, {}, ResourceError, "the download of x.parquet"),
        ({"x.parquet": b"12"}, {"x.parquet": "huge"}, {}, ResourceError, "Free disk space"),
        ({"x.parquet": b"1"}, {}, {"configs": [{"config_name": "a"}, {"config_name": "b"}]}, UsageError, "several"),
    ],
)
def test_invalid_repositories_are_rejected(
    hub: Hub,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    faults: dict[str, str],
    card: dict[str, object],
    kind: type[KonkaniVaniError],
    words: str,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.repositories[NAME] = Repository(files, faults=faults, card=card)
    with pytest.raises(kind, match=words):
        locate_dataset(DatasetName(NAME))
    assert not [path for path in cache.rglob("*") if path.name in ("x.parquet", "x") or ".incomplete" in path.name]
    own = cache_folder()
    assert own is None or not list(own.rglob("*.json"))


@pytest.mark.parametrize("card", [{"configs": 5}, {"configs": [None, {}, {"config_name": 3}]}, {"configs": "x"}])
def test_malformed_card_is_ignored(hub: Hub, cache: Path, card: dict[str, object]) -> None:
    hub.repositories[NAME] = Repository({"train.parquet": b"1"}, card=card)
    assert set(locate_dataset(DatasetName(NAME)).files) == {"train.parquet"}


def test_dataset_names_are_parsed() -> None:
    assert parse_dataset_name("google/fleurs:mr_in@v1") == DatasetName("google/fleurs", "mr_in", "v1")
    assert parse_dataset_name("google/fleurs") == DatasetName("google/fleurs")
    for text in ("fleurs", "/google/fleurs", "google/fleurs:", "google/fleurs@", "a/b:../c", "./a/b", "a/b/c:d"):
        assert parse_dataset_name(text) is None


@pytest.mark.parametrize(
    "pattern, matched",
    [
        ("*.parquet", ["a.parquet"]),
        ("mr/*.parquet", ["mr/a.parquet"]),
        ("mr/**", ["mr/a.parquet", "mr/new/a.parquet"]),
        ("**/a.parquet", ["a.parquet", "mr/a.parquet", "mr/new/a.parquet"]),
        ("**", ["a.parquet", "mr/a.parquet", "mr/new/a.parquet"]),
        ("mr", []),
        ("**/" * 40 + "b", []),
    ],
)
def test_asterisk_does_not_match_a_slash(pattern: str, matched: list[str]) -> None:
    names = ["a.parquet", "mr/a.parquet", "mr/new/a.parquet"]
    assert [name for name in names if _matches(name, pattern)] == matched


def test_configuration_excludes_files_of_others(hub: Hub, cache: Path) -> None:
    entries = [{"config_name": "default", "data_files": "*.parquet"}, {"config_name": "mr", "data_dir": "mr"}]
    files = {"train.parquet": b"one", "mr/train.parquet": b"two", "mr/more/test.parquet": b"three"}
    hub.repositories[NAME] = Repository(files, card={"configs": entries})
    assert list(locate_dataset(DatasetName(NAME)).files) == ["train.parquet"]
    assert len(locate_dataset(DatasetName(NAME, "mr")).files) == 2
