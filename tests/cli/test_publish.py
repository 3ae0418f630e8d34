"""Uploads to a loopback server with the protocol of the hub: files, visibility, errors, and a hidden token."""

import importlib
import io
import json
import os
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from konkanivani.cli import publish as publish_command
from konkanivani.cli.publish import list_files, publish, size_words
from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from tests.cli.upload_server import TOKEN, FakeHub, Repository, Response, serve_hub
from tests.conftest import checked, run_script

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
constants = importlib.import_module("huggingface_hub.constants")
utils = importlib.import_module("huggingface_hub.utils")

SCRIPT = "training_scripts/publish_model.py"
NAME = "goa/konkani"
CARD = "---\nlicense: mit\npipeline_tag: automatic-speech-recognition\n---\n# Model\n"
HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)
HTML = Response(200, b"<html>Log in to the network of this hotel</html>", (("Content-Type", "text/html"),))


def error_response(status: int, message: str = "") -> Response:
    """Return a response with an error message in the format of the hub."""
    return Response(status, json.dumps({"error": message}).encode(), (("Content-Type", "application/json"),))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """Reset the server and direct uploads of this process and its children to it."""
    empty = FakeHub()
    for name in ("repositories", "blobs", "requests", "tokens", "responses"):
        setattr(server, name, getattr(empty, name))
    server.upload_mode = "regular"
    home = tmp_path / "home"
    for name, value in (("HF_ENDPOINT", server.address), ("HF_TOKEN", TOKEN), ("HF_HOME", str(home))):
        monkeypatch.setenv(name, value)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    # huggingface_hub reads the environment only when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
    utils.close_session()
    return server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "more" / "vocab [1].json").write_text('{"hf_": 1}')
    return folder


def read_contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("mode", ["regular", "lfs"])
@pytest.mark.parametrize("is_private", [False, True])
def test_files_are_uploaded_unchanged_with_given_visibility(mode, is_private, hub, folder, capsys, monkeypatch):
    # The real hub receives large files through Xet, which this server does not implement; LFS is the alternative.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", mode == "lfs")
    hub.upload_mode = mode
    message = publish(folder, NAME, is_private, is_confirmed=True)
    assert hub.repositories[NAME].files == read_contents(folder)
    assert hub.repositories[NAME].is_private == is_private
    assert (len(hub.blobs) == 1) == (mode == "lfs") and hub.tokens <= {f"Bearer {TOKEN}", ""}
    assert message == f"Published: {hub.address}/{NAME} (commit {hub.repositories[NAME].commit[:12]})"
    shown = capsys.readouterr().out.splitlines()
    listed = [line.strip().rsplit("  ", 1) for line in shown[1:-1]]
    assert [[name.strip(), size.strip()] for name, size in listed] == [
        [name, f"{len(data)} B"] for name, data in sorted(read_contents(folder).items())
    ]
    total = sum(map(len, read_contents(folder).values()))
    assert shown[0] == f"Upload of {folder}: 3 files, {total} B"
    visibility = "private" if is_private else "public: everyone can download it"
    assert shown[-1] == f"Destination: {hub.address}/{NAME} (new repository, {visibility})"


def test_second_upload_replaces_files_and_identical_one_sends_nothing(hub, folder, capsys):
    publish(folder, NAME, is_confirmed=True)
    hub.repositories[NAME].files["other.txt"] = b"kept"
    message = publish(folder, NAME, is_confirmed=True)
    assert message == f"{hub.address}/{NAME} already contains these files: nothing was uploaded."
    assert hub.repositories[NAME].commits == 1
    (folder / "model.safetensors").write_bytes(WEIGHTS + b"1234")
    publish(folder, NAME, is_confirmed=True)
    assert "existing repository, public: everyone can download it; up to 3 files replaced, 1 file kept" in (
        capsys.readouterr().out
    )
    assert hub.repositories[NAME].files == read_contents(folder) | {"other.txt": b"kept"}


def test_file_added_after_listing_is_not_uploaded(hub, folder, monkeypatch):
    create = huggingface_hub.HfApi.create_repo

    def create_repo_and_add_file(*arguments: object, **named: object) -> object:
        (folder / "private.txt").write_text("added meanwhile")
        return create(*arguments, **named)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo_and_add_file)
    publish(folder, NAME, is_confirmed=True)
    assert (
        set(hub.repositories[NAME].files) == set(read_contents(folder)) - {"private.txt"}
        and len(read_contents(folder)) == 4
    )


def add_file(name: str, data: bytes = b"x") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def add_zip_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "weights.dat", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")


REJECTED_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle by name": (add_file("pytorch_model.bin"), "may contain pickle"),
    "checkpoint": (add_file("checkpoint_best.PT"), "may contain pickle"),
    "pickle by content": (add_file("weights", b"\x80\x04\x95\x00"), "is pickle"),
    "pickle named safetensors": (add_file("x.safetensors", b"\x80\x02}q\x00.123456"), "is not a safetensors file"),
    "cut safetensors": (add_file("x.safetensors", WEIGHTS[:30]), "is not a safetensors file"),
    "torch.save": (add_zip_archive, "is an archive"),
    "archive by name": (add_file("all.tar.gz"), "is an archive"),
    "audio by name": (add_file("a.wav"), "is audio or video"),
    "video by name": (add_file("voice.WMV"), "is audio or video"),
    "audio by content": (add_file("speech", b"RIFF\x00\x01\x00\x00WAVEfmt "), "is audio or video"),
    "FLAC by content": (add_file("speech.txt", b"fLaC\x00\x00"), "is audio or video"),
    "token by name": (add_file("hf_token"), "has the name of a file with a secret"),
    "key by name": (add_file("id_ed25519"), "has the name of a file with a secret"),
    "hidden": (add_file(".env", b"A=1"), "is hidden"),
    "ignore file": (add_file(".gitignore", b"*"), "is hidden"),
    "token inside": (add_file("notes.txt", f"token: {TOKEN}".encode()), "contains a password, token or private key"),
    "key inside": (
        add_file("notes.md", b"a\n-----BEGIN OPENSSH PRIVATE KEY-----\n"),
        "contains a password, token or private key",
    ),
    "link to a file": (lambda folder: (folder / "x.txt").symlink_to("/etc/hostname"), "is a link"),
    "link to a folder": (lambda folder: (folder / "x").symlink_to("/etc"), "is a link"),
    "FIFO": (lambda folder: os.mkfifo(folder / "pipe"), "is not a regular file"),
    "no card": (lambda folder: (folder / "README.md").unlink(), "has no model card"),
    "no metadata": (add_file("README.md", b"# Model\n"), "has no metadata block"),
    "broken metadata": (add_file("README.md", b"---\nlicense: [\n---\n"), "metadata of .* is invalid"),
    "metadata of another type": (add_file("README.md", b"---\n- a\n---\n"), "metadata of .* is invalid"),
    "empty metadata": (add_file("README.md", b"---\n\n---\n"), "metadata of .* is empty"),
}


@pytest.mark.parametrize("kind", REJECTED_FOLDERS)
def test_folder_with_unsuitable_file_is_rejected_before_any_request(kind, hub, folder):
    change, message = REJECTED_FOLDERS[kind]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value) and TOKEN not in str(raised.value)
    assert hub.requests == [] and hub.repositories == {}


def test_negative_control_similar_names_and_texts_are_accepted(folder):
    for name in ("tokens.txt", "added_tokens.json", "tokenizer.model", "keys.md", "LICENSE", ".gitattributes"):
        (folder / name).write_text("hf_hub-token; RIFF; -----BEGIN CERTIFICATE")
    assert len(list_files(folder)) == 9


HUB_ERRORS: dict[str, tuple[str, Response, type[KonkaniVaniError], str]] = {
    "invalid token": (
        "GET /api/models",
        error_response(401, f"Invalid {TOKEN}"),
        UsageError,
        "does not accept the token",
    ),
    "forbidden to read": ("GET /api/models", error_response(403), ResourceError, "may not write to goa/konkani"),
    "forbidden to create": (
        "POST /api/repos/create",
        error_response(403, "You don't have the rights to create a model under the namespace goa"),
        ResourceError,
        "may not write to .*rights to create a model under the namespace",
    ),
    "another type": (
        "POST /api/repos/create",
        error_response(409, "You already created this dataset repo"),
        UsageError,
        "a repository of this name exists: .*dataset",
    ),
    "forbidden to commit": ("/commit/", error_response(403, "read-only token"), ResourceError, "may not write to"),
    "bad metadata": (
        "validate-yaml",
        Response(400, b'{"errors": [{"message": "\\"license\\" must be one of"}], "warnings": []}'),
        CheckpointError,
        'refuses the metadata of README.md: .*"license" must be one of',
    ),
    "too large": ("/commit/", error_response(413), ResourceError, "as too large"),
    "bad request": ("/commit/", error_response(400, "bad path"), UsageError, "refuses the request .*bad path"),
    "proxy": ("GET /api/models", HTML, ResourceError, "not the hub's but probably the login page"),
    "proxy during commit": ("/commit/", HTML, ResourceError, "not the hub's but probably the login page"),
    "other JSON": ("/commit/", error_response(200), ResourceError, "not the hub's"),
    "token in the error": ("/commit/", error_response(418, f"a {TOKEN} b"), ResourceError, "418.*: a <token> b"),
}


@pytest.mark.parametrize("kind", HUB_ERRORS)
def test_hub_error_is_reported_in_one_line_without_token(kind, hub, folder, capfd):
    path, response, error, message = HUB_ERRORS[kind]
    hub.responses[path] = response
    with pytest.raises(error, match=message) as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
    shown = capfd.readouterr()
    assert TOKEN not in str(raised.value) + shown.out + shown.err and shown.err == ""
    assert all(repository.files == {} for repository in hub.repositories.values())


def test_repository_of_other_task_or_visibility_is_not_changed(hub, folder, capsys):
    hub.repositories[NAME] = Repository(is_private=False, pipeline_tag="text-generation")
    with pytest.raises(UsageError, match="model for another task .text-generation"):
        publish(folder, NAME, is_confirmed=True)
    hub.repositories[NAME] = Repository(is_private=False)
    with pytest.raises(UsageError, match="exists and is public, so the files would be public"):
        publish(folder, NAME, is_private=True, is_confirmed=True)
    assert hub.repositories[NAME].files == {}
    hub.repositories[NAME] = Repository(is_private=True)
    publish(folder, NAME, is_confirmed=True)
    assert "existing repository, private;" in capsys.readouterr().out and hub.repositories[NAME].files


@pytest.mark.parametrize(
    "name", ["konkani", "a/b/c", "../x", "goa/", "/x", "goa/a b", "goa/a--b", "goa/x.git", "a/" + "b" * 99]
)
def test_invalid_repository_name_is_rejected_before_any_request(name, hub, folder):
    with pytest.raises(UsageError, match="is not a name on the hub"):
        publish(folder, name, is_confirmed=True)
    assert hub.requests == []


class Terminal(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "is_sent"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_upload_on_terminal_asks_for_confirmation(answer, is_sent, hub, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if is_sent:
        publish(folder, NAME)
    else:
        with pytest.raises(UsageError, match="Nothing was uploaded"):
            publish(folder, NAME)
    assert (NAME in hub.repositories) == is_sent


def test_upload_without_terminal_requires_yes(hub, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="Give --yes"):
        publish(folder, NAME)
    assert hub.repositories == {}


@pytest.mark.parametrize("token", ["hf_with space", "hf_with\nline", "hf_ünïcode"])
def test_malformed_token_is_rejected_and_not_shown(token, hub, folder, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", token)
    if "\n" in token:  # removed by huggingface_hub
        publish(folder, NAME, is_confirmed=True)
        assert hub.tokens <= {"Bearer hf_withline", ""}
        return
    with pytest.raises(UsageError, match="contains a space or a character outside of ASCII") as raised:
        publish(folder, NAME, is_confirmed=True)
    assert token not in str(raised.value) + "".join(capfd.readouterr()) and hub.requests == []


def test_stored_login_is_used_and_missing_token_is_rejected(hub, folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="There is no token for the hub. Set HF_TOKEN, or log in"):
        publish(folder, NAME, is_confirmed=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_stored\n")
    publish(folder, NAME, is_confirmed=True)
    assert "Bearer hf_stored" in hub.tokens


def test_unreachable_hub_raises_resource_error(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*Check the connection") as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value)


def test_closed_connection_raises_and_next_upload_completes(hub, folder, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub sleeps between its attempts
    hub.responses["/commit/"] = Response(0)
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*start again"):
        publish(folder, NAME, is_confirmed=True)
    assert hub.repositories[NAME].files == {} and sum("/commit/" in request for request in hub.requests) > 1
    hub.responses.clear()
    publish(folder, NAME, is_confirmed=True)
    assert hub.repositories[NAME].files == read_contents(folder)


@pytest.mark.parametrize("path", ["GET /api/models", "POST /api/repos/create", "validate-yaml"])
def test_unresponsive_hub_times_out(path, hub, folder, monkeypatch):
    monkeypatch.setattr(publish_command, "TIMEOUT", 0.2)
    hub.responses[path] = Response(200, delay=60.0)
    start = time.monotonic()
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*Check the connection"):
        publish(folder, NAME, is_confirmed=True)
    assert time.monotonic() - start < 30


def test_missing_huggingface_hub_names_install_command(hub, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="not installed. Install: .* -m pip install huggingface_hub"):
        publish(folder, NAME, is_confirmed=True)


def test_offline_mode_is_rejected(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        publish(folder, NAME, is_confirmed=True)


class TestCommandLine:
    def test_script_uploads_and_prints_address(self, hub, folder):
        done = checked(run_script(SCRIPT, str(folder), NAME, "--private", "--yes"))
        assert done.stdout.splitlines()[-1].startswith(f"Published: {hub.address}/{NAME} (commit ")
        assert hub.repositories[NAME].files == read_contents(folder) and hub.repositories[NAME].is_private
        assert TOKEN not in done.stdout + done.stderr and done.stderr == ""

    @pytest.mark.parametrize(
        ("arguments", "exit_code", "message"),
        [
            ((), 2, "Give the folder to upload and its name"),
            (("{folder}",), 2, "Give the folder to upload and its name"),
            (("nowhere", NAME), 2, "There is no folder nowhere"),
            (("{folder}", NAME), 2, "Give --yes to confirm"),
            (("{empty}", NAME, "--yes"), 4, "has no model card"),
        ],
    )
    def test_errors_are_one_line_with_exit_code(self, arguments, exit_code, message, hub, folder, tmp_path):
        (tmp_path / "empty").mkdir()
        known = {"{folder}": str(folder), "{empty}": str(tmp_path / "empty")}
        done = run_script(SCRIPT, *(known.get(word, word) for word in arguments))
        assert done.returncode == exit_code and message in done.stderr and len(done.stderr.splitlines()) == 1, done
        assert hub.repositories == {}

    def test_hf_debug_does_not_show_token(self, hub, folder, monkeypatch):
        monkeypatch.setenv("HF_DEBUG", "1")
        done = checked(run_script(SCRIPT, str(folder), NAME, "--yes"))
        assert TOKEN not in done.stdout + done.stderr


def test_size_words_formats_bytes():
    assert [size_words(size) for size in (0, 999, 1000, 999_950, 1_234_567_890)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1000.0 kB",
        "1,234.6 MB",
    ]
