"""Bad input on the hub: one sentence with the right exit code, nothing half written, and no token in any output."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.hub import SPARE_BYTES
from konkanivani.hub import Repository as Remote
from konkanivani.models.hub import locate_model
from tests.hub.conftest import TOKEN
from tests.hub.server import Hub, Repository

NAME = "someone/whisper-small"
WEIGHTS = "model.safetensors"


def no_sleep(_seconds: float) -> None:
    pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without pauses."""
    monkeypatch.setattr("time.sleep", no_sleep)


@pytest.fixture(autouse=True)
def _token_stays_secret(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err + caplog.text


def refuse(kind: type[KonkaniVaniError], words: str, name: str = NAME, revision: str | None = None) -> None:
    """Check that the model is refused with these words, in one sentence or two, without the token."""
    with pytest.raises(kind, match=words) as caught:
        locate_model(name, revision, "whisper")
    text = str(caught.value)
    assert TOKEN not in text and "\n" not in text and "Traceback" not in text
    # Nothing that a traceback could print leads to the request.
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)


def assert_nothing_half_written(cache: Path) -> None:
    assert not [path for path in cache.rglob("*") if path.name.endswith((".incomplete", ".partial", ".tmp"))]
    assert not list(cache.rglob(WEIGHTS))
    # Links of a snapshot lead to whole files.
    assert all(path.exists() for path in cache.rglob("snapshots/*/*"))


def test_typo_in_the_name(hub: Hub, cache: Path) -> None:
    refuse(UsageError, "no folder someone/whisper-smal, and no public repository", "someone/whisper-smal")
    assert_nothing_half_written(cache)


def test_private_repository(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].token = "hf_another"
    refuse(UsageError, "HF_TOKEN if it is private")
    hub.repositories[NAME].token = TOKEN
    assert locate_model(NAME, None, "whisper").commit  # the token of the environment opens it


def test_gated_repository(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].token = "hf_another"
    hub.repositories[NAME].is_gated = True
    refuse(ResourceError, "is gated: accept its conditions")


def test_token_that_is_no_header(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}é")
    refuse(UsageError, "HF_TOKEN, or the stored token, contains characters")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError, KeyError])
def test_errors_that_contain_the_token(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    error = kind(f"Illegal header value 'Bearer {TOKEN}'")
    assert TOKEN in str(error)  # negative control

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", fail)
    refuse(ResourceError, "failed: ")


def test_no_network(hub: Hub, cache: Path) -> None:
    hub.stop()
    refuse(ResourceError, "Connection refused. Check the network")
    assert not cache.exists() or not list(cache.rglob("*.json"))


def test_unknown_host(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://user:secret@no-such-host.invalid")
    refuse(ResourceError, "http://no-such-host.invalid failed: .*(not known|resolution|resolve)")


def test_proxy_that_answers_html(hub: Hub, cache: Path) -> None:
    hub.is_proxy = True
    refuse(ResourceError, "not the hub.s but probably the login page of a proxy")
    assert_nothing_half_written(cache)


def test_proxy_that_answers_html_for_files(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Remote.listing

    def then_proxy(self: Remote) -> object:
        found = listing(self)
        hub.is_proxy = True
        return found

    monkeypatch.setattr(Remote, "listing", then_proxy)
    refuse(ResourceError, "failed")
    assert_nothing_half_written(cache)


def test_download_that_is_cut(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.repositories[NAME].lies[WEIGHTS] = "cut"
    refuse(ResourceError, f"the download of {WEIGHTS} from .* failed")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # no warnings of the library, and no bar without a terminal
    assert_nothing_half_written(cache)
    del hub.repositories[NAME].lies[WEIGHTS]
    assert (locate_model(NAME, None, "whisper").path / WEIGHTS).is_file()


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json", "vocab.json"])
def test_file_with_other_content(hub: Hub, cache: Path, file: str, whisper_files: dict[str, bytes]) -> None:
    if file not in whisper_files:
        hub.repositories[NAME] = Repository(whisper_files | {file: b"{}"})
    hub.repositories[NAME].lies[file] = "content"
    refuse(CheckpointError, f"its {file} differs in size or digest")
    assert not list(cache.rglob(file))
    assert_nothing_half_written(cache)


def test_file_with_a_lying_size(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].lies[WEIGHTS] = "size"
    refuse(CheckpointError, f"its {WEIGHTS} does not have the size")
    assert_nothing_half_written(cache)


@pytest.mark.parametrize("etag", ["../../../escaped", "/tmp/escaped", "..", "a\\b", ""])
def test_digest_that_is_a_path(hub: Hub, cache: Path, etag: str) -> None:
    hub.repositories[NAME].lies[WEIGHTS] = f"etag {etag}"
    with pytest.raises((CheckpointError, ResourceError)):
        locate_model(NAME, None, "whisper")
    assert not list(cache.parent.parent.rglob("escaped*"))
    assert WEIGHTS not in hub.downloads()
    assert_nothing_half_written(cache)


def test_more_than_the_disk_holds(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].lies[WEIGHTS] = "huge"
    refuse(ResourceError, "needs 1,000,000,000 MB, and .* Free disk space")
    assert WEIGHTS not in hub.downloads()


def test_disk_that_fills_up(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    refuse(ResourceError, "is full: .* was not downloaded")
    assert_nothing_half_written(cache)


def test_disk_space_is_compared_with_the_listing(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=SPARE_BYTES + 10))
    refuse(ResourceError, "MB free")
    assert hub.downloads() == []


def test_only_pickle(hub: Hub, cache: Path, whisper_files: dict[str, bytes]) -> None:
    files = {name: data for name, data in whisper_files.items() if name != WEIGHTS}
    hub.repositories[NAME] = Repository(files | {"pytorch_model.bin": b"\x80\x04"})
    refuse(CheckpointError, "only in pytorch_model.bin, which is pickle .* save_pretrained")
    assert "pytorch_model.bin" not in hub.downloads()


@pytest.mark.parametrize("file", ["../../../escaped.json", "/tmp/escaped.json", "a/../../b", "a//b", "..\\b", "."])
def test_file_name_outside_of_the_folder(hub: Hub, cache: Path, whisper_files: dict[str, bytes], file: str) -> None:
    hub.repositories[NAME] = Repository(whisper_files | {file: b"{}"})
    refuse(CheckpointError, "outside of the folder")
    assert hub.downloads() == []


def test_revision_that_does_not_exist(hub: Hub, cache: Path) -> None:
    refuse(UsageError, "has no branch, tag or commit v9", revision="v9")
    refuse(UsageError, "has no branch, tag or commit 0{40}", revision="0" * 40)
    refuse(UsageError, "is not the name of a branch", revision="../../main")


@pytest.mark.parametrize(
    "config", [b"{}", b"[]", b"not JSON", b"\xff", json.dumps({"model_type": "wav2vec2"}).encode(), b"[" * 10**5]
)
def test_unsupported_model_type(hub: Hub, cache: Path, whisper_files: dict[str, bytes], config: bytes) -> None:
    hub.repositories[NAME] = Repository(whisper_files | {"config.json": config})
    refuse(CheckpointError, "only whisper or t5 or mt5 is supported")
    assert hub.downloads() == ["config.json"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_other_answers(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr("tests.hub.server.Handler._list", lambda self, *_: self._refuse(status, ""))
    with pytest.raises((ResourceError, UsageError)) as caught:
        locate_model(NAME, None, "whisper")
    assert TOKEN not in str(caught.value)


def malformed(change: Callable[[dict[str, object]], object]) -> Callable[..., None]:
    """Return a server's listing with one change."""

    def answer(self: object, name: str, repository: Repository, commit: str) -> None:
        body: dict[str, object] = {"id": name, "sha": commit, "siblings": [{"rfilename": "config.json"}], "tags": []}
        change(body)
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    return answer


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("sha"),
        lambda body: body.update(sha="../../x"),
        lambda body: body.update(siblings=[{}]),
        lambda body: body.update(siblings="x"),
        lambda body: body.update(siblings=[{"rfilename": 5}]),
        lambda body: body.clear(),
    ],
)
def test_malformed_listing(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, object]], object]
) -> None:
    monkeypatch.setattr("tests.hub.server.Handler._list", malformed(change))
    with pytest.raises((ResourceError, CheckpointError)):
        locate_model(NAME, None, "whisper")
    assert_nothing_half_written(cache)


def test_without_the_package(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    refuse(ResourceError, "needs the package `huggingface_hub`.* copy the files by hand")
