"""Invalid input from the hub: one message of the right error class, no partial file, and no token in any output."""

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
def _no_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable pauses between retries."""
    monkeypatch.setattr("time.sleep", no_sleep)


@pytest.fixture(autouse=True)
def _token_is_not_printed(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err + caplog.text


def assert_rejected(kind: type[KonkaniVaniError], words: str, name: str = NAME, revision: str | None = None) -> None:
    """Check that locating the model raises `kind` with these words, in one line and without the token."""
    with pytest.raises(kind, match=words) as caught:
        locate_model(name, revision, "whisper")
    text = str(caught.value)
    assert TOKEN not in text and "\n" not in text and "Traceback" not in text
    # No exception that a traceback would print refers to the request.
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)


def assert_no_partial_files(cache: Path) -> None:
    assert not [path for path in cache.rglob("*") if path.name.endswith((".incomplete", ".partial", ".tmp"))]
    assert not list(cache.rglob(WEIGHTS))
    # Links of a snapshot point to existing files.
    assert all(path.exists() for path in cache.rglob("snapshots/*/*"))


def test_unknown_repository_is_rejected(hub: Hub, cache: Path) -> None:
    assert_rejected(UsageError, "no folder someone/whisper-smal, and no public repository", "someone/whisper-smal")
    assert_no_partial_files(cache)


def test_private_repository_requires_its_token(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].token = "hf_another"
    assert_rejected(UsageError, "HF_TOKEN if it is private")
    hub.repositories[NAME].token = TOKEN
    assert locate_model(NAME, None, "whisper").commit  # HF_TOKEN grants access


def test_gated_repository_names_its_conditions(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].token = "hf_another"
    hub.repositories[NAME].is_gated = True
    assert_rejected(ResourceError, "is gated: accept its conditions")


def test_non_ascii_token_is_rejected(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}é")
    assert_rejected(UsageError, "HF_TOKEN, or the stored token, contains characters")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError, KeyError])
def test_errors_are_reported_without_the_token(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    error = kind(f"Illegal header value 'Bearer {TOKEN}'")
    assert TOKEN in str(error)  # negative control

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", fail)
    assert_rejected(ResourceError, "failed: ")


def test_unreachable_hub_raises_resource_error(hub: Hub, cache: Path) -> None:
    hub.stop()
    assert_rejected(ResourceError, "Connection refused. Check the network")
    assert not cache.exists() or not list(cache.rglob("*.json"))


def test_unknown_host_is_reported_without_credentials(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://user:secret@no-such-host.invalid")
    assert_rejected(ResourceError, "http://no-such-host.invalid failed: .*(not known|resolution|resolve)")


def test_proxy_login_page_is_rejected(hub: Hub, cache: Path) -> None:
    hub.is_proxy = True
    assert_rejected(ResourceError, "not the hub.s but probably the login page of a proxy")
    assert_no_partial_files(cache)


def test_proxy_login_page_in_place_of_files_is_rejected(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Remote.listing

    def list_then_proxy(self: Remote) -> object:
        result = listing(self)
        hub.is_proxy = True
        return result

    monkeypatch.setattr(Remote, "listing", list_then_proxy)
    assert_rejected(ResourceError, "failed")
    assert_no_partial_files(cache)


def test_cut_download_fails_and_can_be_repeated(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.repositories[NAME].faults[WEIGHTS] = "cut"
    assert_rejected(ResourceError, f"the download of {WEIGHTS} from .* failed")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""  # no warnings of the library, and no progress bar without a terminal
    assert_no_partial_files(cache)
    del hub.repositories[NAME].faults[WEIGHTS]
    assert (locate_model(NAME, None, "whisper").path / WEIGHTS).is_file()


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json", "vocab.json"])
def test_file_with_other_content_is_rejected(hub: Hub, cache: Path, file: str, whisper_files: dict[str, bytes]) -> None:
    if file not in whisper_files:
        hub.repositories[NAME] = Repository(whisper_files | {file: b"{}"})
    hub.repositories[NAME].faults[file] = "content"
    assert_rejected(CheckpointError, f"its {file} differs in size or digest")
    assert not list(cache.rglob(file))
    assert_no_partial_files(cache)


def test_file_with_wrong_size_header_is_rejected(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].faults[WEIGHTS] = "size"
    assert_rejected(CheckpointError, f"its {WEIGHTS} does not have the size")
    assert_no_partial_files(cache)


@pytest.mark.parametrize("etag", ["../../../escaped", "/tmp/escaped", "..", "a\\b", ""])
def test_etag_that_is_a_path_is_rejected(hub: Hub, cache: Path, etag: str) -> None:
    hub.repositories[NAME].faults[WEIGHTS] = f"etag {etag}"
    with pytest.raises((CheckpointError, ResourceError)):
        locate_model(NAME, None, "whisper")
    assert not list(cache.parent.parent.rglob("escaped*"))
    assert WEIGHTS not in hub.downloads()
    assert_no_partial_files(cache)


def test_download_larger_than_free_disk_space_is_rejected(hub: Hub, cache: Path) -> None:
    hub.repositories[NAME].faults[WEIGHTS] = "huge"
    assert_rejected(ResourceError, "needs 1,000,000,000 MB, and .* Free disk space")
    assert WEIGHTS not in hub.downloads()


def test_full_disk_during_download_is_reported(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert_rejected(ResourceError, "is full: .* was not downloaded")
    assert_no_partial_files(cache)


def test_disk_space_is_checked_before_the_download(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=SPARE_BYTES + 10))
    assert_rejected(ResourceError, "MB free")
    assert hub.downloads() == []


def test_repository_with_only_pickle_weights_is_rejected(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes]
) -> None:
    files = {name: data for name, data in whisper_files.items() if name != WEIGHTS}
    hub.repositories[NAME] = Repository(files | {"pytorch_model.bin": b"\x80\x04"})
    assert_rejected(CheckpointError, "only in pytorch_model.bin, which is pickle .* save_pretrained")
    assert "pytorch_model.bin" not in hub.downloads()


@pytest.mark.parametrize("file", ["../../../escaped.json", "/tmp/escaped.json", "a/../../b", "a//b", "..\\b", "."])
def test_file_name_outside_of_folder_is_rejected(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes], file: str
) -> None:
    hub.repositories[NAME] = Repository(whisper_files | {file: b"{}"})
    assert_rejected(CheckpointError, "outside of the folder")
    assert hub.downloads() == []


def test_unknown_revision_is_rejected(hub: Hub, cache: Path) -> None:
    assert_rejected(UsageError, "has no branch, tag or commit v9", revision="v9")
    assert_rejected(UsageError, "has no branch, tag or commit 0{40}", revision="0" * 40)
    assert_rejected(UsageError, "is not the name of a branch", revision="../../main")


@pytest.mark.parametrize(
    "config", [b"{}", b"[]", b"not JSON", b"\xff", json.dumps({"model_type": "wav2vec2"}).encode(), b"[" * 10**5]
)
def test_unsupported_model_type_is_rejected(
    hub: Hub, cache: Path, whisper_files: dict[str, bytes], config: bytes
) -> None:
    hub.repositories[NAME] = Repository(whisper_files | {"config.json": config})
    assert_rejected(CheckpointError, "only whisper or t5 or mt5 is supported")
    assert hub.downloads() == ["config.json"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_http_errors_raise_without_the_token(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("tests.hub.server.Handler._list", lambda self, *_: self._send_error(status, ""))
    with pytest.raises((ResourceError, UsageError)) as caught:
        locate_model(NAME, None, "whisper")
    assert TOKEN not in str(caught.value)


def malformed_listing(change: Callable[[dict[str, object]], object]) -> Callable[..., None]:
    """Return a replacement of `Handler._list` that applies `change` to the response."""

    def send_listing(self: object, name: str, repository: Repository, commit: str) -> None:
        body: dict[str, object] = {"id": name, "sha": commit, "siblings": [{"rfilename": "config.json"}], "tags": []}
        change(body)
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    return send_listing


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
def test_malformed_listing_is_rejected(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, object]], object]
) -> None:
    monkeypatch.setattr("tests.hub.server.Handler._list", malformed_listing(change))
    with pytest.raises((ResourceError, CheckpointError)):
        locate_model(NAME, None, "whisper")
    assert_no_partial_files(cache)


def test_missing_huggingface_hub_is_reported(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert_rejected(ResourceError, "needs the package `huggingface_hub`.* copy the files by hand")
