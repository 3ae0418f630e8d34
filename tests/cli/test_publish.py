"""Uploads to a loopback server with the hub's protocol: files, visibility, refusals, and a token never shown."""

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

from konkanivani import hub_upload
from konkanivani.errors import CheckpointError, KonkaniVaniError, ResourceError, UsageError
from konkanivani.hub_upload import list_files, publish, size_words
from tests.cli.upload_server import TOKEN, Answer, FakeHub, Repository, serve_hub
from tests.conftest import checked, run_script

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
constants = importlib.import_module("huggingface_hub.constants")
utils = importlib.import_module("huggingface_hub.utils")

SCRIPT = "training_scripts/publish_model.py"
NAME = "goa/konkani"
CARD = "---\nlicense: mit\npipeline_tag: automatic-speech-recognition\n---\n# Model\n"
HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)
HTML = Answer(200, b"<html>Log in to the network of this hotel</html>", (("Content-Type", "text/html"),))


def saying(status: int, message: str = "") -> Answer:
    """Return an answer with an error message, as the hub sends it."""
    return Answer(status, json.dumps({"error": message}).encode(), (("Content-Type", "application/json"),))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """Return the empty server, to which uploads of this process and of its children go."""
    empty = FakeHub()
    for name in ("repositories", "blobs", "requests", "tokens", "answers"):
        setattr(server, name, getattr(empty, name))
    server.upload_mode = "regular"
    home = tmp_path / "home"
    for name, value in (("HF_ENDPOINT", server.address), ("HF_TOKEN", TOKEN), ("HF_HOME", str(home))):
        monkeypatch.setenv(name, value)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    # The package has read the environment when it was imported.
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


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.parametrize("mode", ["regular", "lfs"])
@pytest.mark.parametrize("is_private", [False, True])
def test_all_files_arrive_bit_for_bit_with_the_given_visibility(mode, is_private, hub, folder, capsys, monkeypatch):
    # Large files of the real hub go through Xet, whose server is not imitated here; LFS is its alternative.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", mode == "lfs")
    hub.upload_mode = mode
    said = publish(folder, NAME, is_private, is_confirmed=True)
    assert hub.repositories[NAME].files == contents(folder)
    assert hub.repositories[NAME].is_private == is_private
    assert (len(hub.blobs) == 1) == (mode == "lfs") and hub.tokens <= {f"Bearer {TOKEN}", ""}
    assert said == f"Published: {hub.address}/{NAME} (commit {hub.repositories[NAME].commit[:12]})"
    shown = capsys.readouterr().out.splitlines()
    listed = [line.strip().rsplit("  ", 1) for line in shown[1:-1]]
    assert [[name.strip(), size.strip()] for name, size in listed] == [
        [name, f"{len(data)} B"] for name, data in sorted(contents(folder).items())
    ]
    total = sum(map(len, contents(folder).values()))
    assert shown[0] == f"Upload of {folder}: 3 files, {total} B"
    visibility = "private" if is_private else "public: everyone can download it"
    assert shown[-1] == f"Destination: {hub.address}/{NAME} (new repository, {visibility})"


def test_a_second_upload_replaces_changed_files_and_an_equal_one_sends_nothing(hub, folder, capsys):
    publish(folder, NAME, is_confirmed=True)
    hub.repositories[NAME].files["other.txt"] = b"kept"
    said = publish(folder, NAME, is_confirmed=True)
    assert said == f"{hub.address}/{NAME} already contains these files: nothing was uploaded."
    assert hub.repositories[NAME].commits == 1
    (folder / "model.safetensors").write_bytes(WEIGHTS + b"1234")
    publish(folder, NAME, is_confirmed=True)
    assert "existing repository, public: everyone can download it; up to 3 files replaced, 1 file kept" in (
        capsys.readouterr().out
    )
    assert hub.repositories[NAME].files == contents(folder) | {"other.txt": b"kept"}


def test_a_file_that_appears_after_the_list_is_not_uploaded(hub, folder, monkeypatch):
    create = huggingface_hub.HfApi.create_repo

    def create_and_add(*arguments: object, **named: object) -> object:
        (folder / "private.txt").write_text("added meanwhile")
        return create(*arguments, **named)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_and_add)
    publish(folder, NAME, is_confirmed=True)
    assert set(hub.repositories[NAME].files) == set(contents(folder)) - {"private.txt"} and len(contents(folder)) == 4


def written(name: str, data: bytes = b"x") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "weights.dat", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle by name": (written("pytorch_model.bin"), "may contain pickle"),
    "checkpoint": (written("checkpoint_best.PT"), "may contain pickle"),
    "pickle by content": (written("weights", b"\x80\x04\x95\x00"), "is pickle"),
    "pickle named safetensors": (written("x.safetensors", b"\x80\x02}q\x00.123456"), "is not a safetensors file"),
    "cut safetensors": (written("x.safetensors", WEIGHTS[:30]), "is not a safetensors file"),
    "torch.save": (zipped, "is an archive"),
    "archive by name": (written("all.tar.gz"), "is an archive"),
    "audio by name": (written("a.wav"), "is audio or video"),
    "audio by content": (written("speech", b"RIFF\x00\x01\x00\x00WAVEfmt "), "is audio or video"),
    "FLAC by content": (written("speech.txt", b"fLaC\x00\x00"), "is audio or video"),
    "token by name": (written("hf_token"), "has the name of a file with a secret"),
    "key by name": (written("id_ed25519"), "has the name of a file with a secret"),
    "hidden": (written(".env", b"A=1"), "is hidden"),
    "ignore file": (written(".gitignore", b"*"), "is hidden"),
    "token inside": (written("notes.txt", f"token: {TOKEN}".encode()), "contains a password, token or private key"),
    "key inside": (
        written("notes.md", b"a\n-----BEGIN OPENSSH PRIVATE KEY-----\n"),
        "contains a password, token or private key",
    ),
    "link to a file": (lambda folder: (folder / "x.txt").symlink_to("/etc/hostname"), "is a link"),
    "link to a folder": (lambda folder: (folder / "x").symlink_to("/etc"), "is a link"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "is not a regular file"),
    "no card": (lambda folder: (folder / "README.md").unlink(), "has no model card"),
    "no metadata": (written("README.md", b"# Model\n"), "has no metadata block"),
    "broken metadata": (written("README.md", b"---\nlicense: [\n---\n"), "metadata of .* is invalid"),
    "metadata of another type": (written("README.md", b"---\n- a\n---\n"), "metadata of .* is invalid"),
    "empty metadata": (written("README.md", b"---\n\n---\n"), "metadata of .* is empty"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_with_an_unsuitable_file_is_not_uploaded(kind, hub, folder):
    change, said = REFUSED[kind]
    change(folder)
    with pytest.raises(CheckpointError, match=said) as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value) and TOKEN not in str(raised.value)
    assert hub.requests == [] and hub.repositories == {}


def test_negative_control_similar_names_and_texts_are_accepted(folder):
    for name in ("tokens.txt", "added_tokens.json", "tokenizer.model", "keys.md", "LICENSE", ".gitattributes"):
        (folder / name).write_text("hf_hub-token; RIFF; -----BEGIN CERTIFICATE")
    assert len(list_files(folder)) == 9


ANSWERS: dict[str, tuple[str, Answer, type[KonkaniVaniError], str]] = {
    "invalid token": ("GET /api/models", saying(401, f"Invalid {TOKEN}"), UsageError, "does not accept the token"),
    "forbidden to read": ("GET /api/models", saying(403), ResourceError, "may not write to goa/konkani"),
    "forbidden to create": (
        "POST /api/repos/create",
        saying(403, "You don't have the rights to create a model under the namespace goa"),
        ResourceError,
        "may not write to .*rights to create a model under the namespace",
    ),
    "another type": (
        "POST /api/repos/create",
        saying(409, "You already created this dataset repo"),
        UsageError,
        "a repository of this name exists: .*dataset",
    ),
    "forbidden to commit": ("/commit/", saying(403, "read-only token"), ResourceError, "may not write to"),
    "bad metadata": (
        "validate-yaml",
        Answer(400, b'{"errors": [{"message": "\\"license\\" must be one of"}], "warnings": []}'),
        CheckpointError,
        'refuses the metadata of README.md: .*"license" must be one of',
    ),
    "too large": ("/commit/", saying(413), ResourceError, "as too large"),
    "bad request": ("/commit/", saying(400, "bad path"), UsageError, "refuses the request .*bad path"),
    "proxy": ("GET /api/models", HTML, ResourceError, "not the hub's but probably the login page"),
    "proxy at the end": ("/commit/", HTML, ResourceError, "not the hub's but probably the login page"),
    "other JSON": ("/commit/", saying(200), ResourceError, "not the hub's"),
    "echo": ("/commit/", saying(418, f"a {TOKEN} b"), ResourceError, "418.*: a <token> b"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_refusal_of_the_hub_is_a_sentence_without_the_token(kind, hub, folder, capfd):
    path, answer, error, said = ANSWERS[kind]
    hub.answers[path] = answer
    with pytest.raises(error, match=said) as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
    shown = capfd.readouterr()
    assert TOKEN not in str(raised.value) + shown.out + shown.err and shown.err == ""
    assert all(repository.files == {} for repository in hub.repositories.values())


def test_an_existing_repository_of_another_kind_or_visibility_is_not_changed(hub, folder, capsys):
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
def test_an_unsuitable_name_is_refused_before_any_request(name, hub, folder):
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
def test_on_a_terminal_it_asks(answer, is_sent, hub, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if is_sent:
        publish(folder, NAME)
    else:
        with pytest.raises(UsageError, match="Nothing was uploaded"):
            publish(folder, NAME)
    assert (NAME in hub.repositories) == is_sent


def test_without_a_terminal_it_needs_yes(hub, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="Give --yes"):
        publish(folder, NAME)
    assert hub.repositories == {}


@pytest.mark.parametrize("token", ["hf_with space", "hf_with\nline", "hf_ünïcode"])
def test_a_token_that_cannot_be_one_is_refused_without_being_shown(token, hub, folder, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", token)
    if "\n" in token:  # removed by huggingface_hub
        publish(folder, NAME, is_confirmed=True)
        assert hub.tokens <= {"Bearer hf_withline", ""}
        return
    with pytest.raises(UsageError, match="contains a space or a character outside of ASCII") as raised:
        publish(folder, NAME, is_confirmed=True)
    assert token not in str(raised.value) + "".join(capfd.readouterr()) and hub.requests == []


def test_the_stored_login_is_used_and_without_one_it_says_how_to_log_in(hub, folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="There is no token for the hub. Set HF_TOKEN, or log in"):
        publish(folder, NAME, is_confirmed=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_stored\n")
    publish(folder, NAME, is_confirmed=True)
    assert "Bearer hf_stored" in hub.tokens


def test_without_a_network_it_is_a_sentence(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*Check the connection") as raised:
        publish(folder, NAME, is_confirmed=True)
    assert "\n" not in str(raised.value)


def test_a_connection_that_is_closed_is_a_sentence_and_the_next_start_completes(hub, folder, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts of huggingface_hub
    hub.answers["/commit/"] = Answer(0)
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*start again"):
        publish(folder, NAME, is_confirmed=True)
    assert hub.repositories[NAME].files == {} and sum("/commit/" in request for request in hub.requests) > 1
    hub.answers.clear()
    publish(folder, NAME, is_confirmed=True)
    assert hub.repositories[NAME].files == contents(folder)


@pytest.mark.parametrize("path", ["GET /api/models", "POST /api/repos/create", "validate-yaml"])
def test_a_hub_that_does_not_answer_is_given_up(path, hub, folder, monkeypatch):
    monkeypatch.setattr(hub_upload, "TIMEOUT", 0.2)
    hub.answers[path] = Answer(200, delay=60.0)
    start = time.monotonic()
    with pytest.raises(ResourceError, match="upload to goa/konkani failed: .*Check the connection"):
        publish(folder, NAME, is_confirmed=True)
    assert time.monotonic() - start < 30


def test_without_the_package_it_says_how_to_install_it(hub, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="not installed. Install: .* -m pip install huggingface_hub"):
        publish(folder, NAME, is_confirmed=True)


def test_offline_mode_is_named(hub, folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        publish(folder, NAME, is_confirmed=True)


class TestCommandLine:
    def test_it_uploads_and_prints_the_address(self, hub, folder):
        done = checked(run_script(SCRIPT, str(folder), NAME, "--private", "--yes"))
        assert done.stdout.splitlines()[-1].startswith(f"Published: {hub.address}/{NAME} (commit ")
        assert hub.repositories[NAME].files == contents(folder) and hub.repositories[NAME].is_private
        assert TOKEN not in done.stdout + done.stderr and done.stderr == ""

    @pytest.mark.parametrize(
        ("arguments", "exit_code", "said"),
        [
            ((), 2, "Give the folder to upload and its name"),
            (("{folder}",), 2, "Give the folder to upload and its name"),
            (("nowhere", NAME), 2, "There is no folder nowhere"),
            (("{folder}", NAME), 2, "Give --yes to confirm"),
            (("{empty}", NAME, "--yes"), 4, "has no model card"),
        ],
    )
    def test_errors_are_one_sentence(self, arguments, exit_code, said, hub, folder, tmp_path):
        (tmp_path / "empty").mkdir()
        known = {"{folder}": str(folder), "{empty}": str(tmp_path / "empty")}
        done = run_script(SCRIPT, *(known.get(word, word) for word in arguments))
        assert done.returncode == exit_code and said in done.stderr and len(done.stderr.splitlines()) == 1, done
        assert hub.repositories == {}

    def test_a_debug_mode_of_the_package_shows_no_token(self, hub, folder, monkeypatch):
        monkeypatch.setenv("HF_DEBUG", "1")
        done = checked(run_script(SCRIPT, str(folder), NAME, "--yes"))
        assert TOKEN not in done.stdout + done.stderr


def test_sizes_in_words():
    assert [size_words(size) for size in (0, 999, 1000, 999_950, 1_234_567_890)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1000.0 kB",
        "1,234.6 MB",
    ]
