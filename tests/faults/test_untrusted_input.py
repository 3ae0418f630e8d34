"""Untrusted input runs no code, opens no file outside its folder, and is rejected without using much memory."""

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.corpora.recordings import content_key
from konkanivani.corpora.toolkits import read_members
from konkanivani.data.audio.paths import audio_roots, is_named_inside, resolved_inside
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest, read_recordings
from konkanivani.errors import CheckpointError, DataError, KonkaniVaniError
from konkanivani.recipe.build import build_run
from tests.conftest import ROOT, checked, mark_full, mark_full_except, run_trainer
from tests.faults.untrusted_input import (
    HOSTILE,
    is_code_executed,
    load_in_all_ways,
    read_valid_checkpoint,
    with_settings,
)
from tests.faults.watched_process import watch
from tests.run_setup import begin_run


@pytest.fixture(scope="module")
def valid_checkpoint(small_run: Path, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("sound") / LAST
    with_settings("--log_dir 'runs'")(read_valid_checkpoint(small_run / "checkpoints" / LAST), path)
    return read_valid_checkpoint(path)


# Variants of other cases, run only with --full.
ALIKE = ("calls eval", "calls exec", "calls open", "calls by protocol 4", "calls through a new object")
ALIKE += (
    "a stride of 2^60",
    "a size below zero",
    "a storage of 2^60",
    "an invalid UTF-8 string",
    "a compressed pickle",
)
ALIKE += (
    "a state that is a list",
    "a vocabulary of 2^40",
    "a model 2^60 wide",
    "a million layers",
    "a log folder above",
)
ALIKE += ("nested persistent ids", "a storage beyond its record", "a pickle without an end", "no tokenizer")
ALIKE += ("a vocabulary below zero", "a tokenizer of noise", "deeply nested settings", "a list in itself")


@pytest.mark.parametrize("name", mark_full_except(HOSTILE, HOSTILE.keys() - ALIKE))
def test_hostile_checkpoint_raises_checkpoint_error_only(name, valid_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    HOSTILE[name](valid_checkpoint, tmp_path / LAST)
    verdict = watch(lambda: load_in_all_ways(tmp_path / LAST), tmp_path)
    assert verdict.fault is None, verdict.fault
    assert verdict.outcome == "CheckpointError", verdict
    assert "\n" not in verdict.message.strip() and len(verdict.message) < 1000
    assert not (tmp_path / "exploded").exists()


def test_there_are_at_least_15_hostile_checkpoints():
    assert len(HOSTILE) >= 15 and HOSTILE.keys() > set(ALIKE)


def test_valid_checkpoint_is_accepted_in_any_folder(valid_checkpoint, tmp_path, monkeypatch):
    """Negative control: a valid checkpoint is accepted."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(valid_checkpoint.path, tmp_path / LAST)
    verdict = watch(lambda: load_in_all_ways(tmp_path / LAST), tmp_path)
    assert verdict.outcome == "taken", verdict.message


@pytest.mark.parametrize("name", ["calls os.system", "a duplicate record", *mark_full(*ALIKE[:3])])
def test_negative_control_unsafe_loading_executes_code(name, valid_checkpoint, tmp_path):
    HOSTILE[name](valid_checkpoint, tmp_path / LAST)
    assert is_code_executed(tmp_path / LAST)


def test_negative_control_writes_programs_hangs_and_growth_are_detected(tmp_path):
    assert "wrote" in watch(lambda: open(tmp_path.parent / "elsewhere", "w"), tmp_path).fault
    assert "os.system" in watch(lambda: os.system("true"), tmp_path).fault  # noqa: S605
    assert "subprocess" in watch(lambda: subprocess.run(["true"]), tmp_path).fault
    assert "hung" in watch(lambda: [None for _ in iter(int, 1)], tmp_path, seconds=0.3).fault
    assert "grew by" in watch(lambda: bytearray(2**28), tmp_path).fault
    assert "ZeroDivisionError" in watch(lambda: 1 / 0, tmp_path).fault
    assert "SIGSEGV" in watch(lambda: os.kill(os.getpid(), 11), tmp_path).fault
    assert watch(lambda: (tmp_path / "inside").write_text("x"), tmp_path).fault is None


def write_tone(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.ones(16_000), 16_000)
    return path


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """Return a folder with a recording, next to a private one that must not be read."""
    write_tone(tmp_path / "private" / "diary.wav")
    write_tone(tmp_path / "downloaded" / "good.wav")
    return tmp_path / "downloaded"


def with_link(name: str, to: str, inside: str = "") -> Callable[[Path], str]:
    """Return a change that creates a link in the folder and returns a name that resolves through it."""
    return lambda folder: (folder / name).symlink_to(folder.parent / to) or name + inside


OUTSIDE: dict[str, Callable[[Path], str]] = {
    "above": lambda folder: "../private/diary.wav",
    "below and above": lambda folder: "audio/../../private/diary.wav",
    "a folder with the same prefix": lambda folder: f"{folder}_2/diary.wav",
    "a link": with_link("link.wav", "private/diary.wav"),
    "a linked folder": with_link("audio", "private", "/diary.wav"),
    "zeros": lambda folder: "/dev/zero",
    "a link to zeros": with_link("zeros.wav", "/dev/zero"),
    "a terminal": lambda folder: "/dev/tty",
    "a pipe": lambda folder: os.mkfifo(folder / "pipe.wav") or "pipe.wav",
    "a URL": lambda folder: "https://example.org/a.wav",
    "a file URL": lambda folder: "file:///etc/passwd",
    "a command": lambda folder: "touch exploded |",
    "a home folder": lambda folder: "~/.ssh/id_rsa",
    "an environment variable": lambda folder: "$HOME/.ssh/id_rsa",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_audio_outside_the_manifest_folder_is_never_opened(name, downloaded):
    audio = OUTSIDE[name](downloaded)
    rows = [{"audio_filepath": path, "duration": 1.0, "text": "एक"} for path in ("good.wav", audio)]
    manifest = downloaded / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read() -> None:
        result = read_manifest(manifest)
        for utterance in [*result, *read_recordings(manifest)]:
            content_key(utterance.source)
            load_audio(utterance.source)
        raise DataError(result.broken[0].reason)

    verdict = watch(read, downloaded)
    assert verdict.fault is None, verdict.fault
    assert verdict.outcome in ("DataError", "UnusableAudio"), verdict
    targets = [path for path in verdict.opened if path.startswith((str(downloaded.parent), "/etc", "/dev", "/proc"))]
    assert {Path(path).parent for path in targets} == {downloaded}, targets
    if name in ("above", "a link"):
        assert "outside" in verdict.message
        assert "--audio_roots" in verdict.message


@pytest.mark.parametrize("audio", ["/etc/passwd", "/proc/self/mem"])
def test_absolute_path_to_a_file_without_audio_is_rejected(audio, downloaded):
    """Absolute paths are accepted, so the file is opened; its content reaches neither a result nor a message."""
    manifest = downloaded / "train.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": audio, "duration": 1.0, "text": "एक"}) + "\n")

    def read() -> None:
        for utterance in read_manifest(manifest):
            load_audio(utterance.source)

    verdict = watch(read, downloaded)
    assert verdict.fault is None, verdict.fault
    assert verdict.outcome == "UnusableAudio", verdict
    assert "root:" not in verdict.message


def test_audio_roots_allow_files_outside_the_manifest_folder(downloaded):
    """Negative control: if the user names the folder, the same rows are read and the targets opened."""
    audio = [OUTSIDE[name](downloaded) for name in ("above", "a link", "a linked folder")]
    audio.append(str(downloaded.parent / "private" / "diary.wav"))
    manifest = downloaded / "train.jsonl"
    rows = [{"audio_filepath": path, "duration": 1.0, "text": "एक"} for path in audio]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = read_manifest(manifest, (str(downloaded.parent / "private"),))
    assert len(result) == 4 and not result.broken

    def read() -> None:
        for utterance in result:
            load_audio(utterance.source)

    verdict = watch(read, downloaded)
    assert verdict.outcome == "taken", verdict
    assert str(downloaded.parent / "private" / "diary.wav") in verdict.opened


def test_audio_roots_contain_only_paths_below_them(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "corpus")
    roots = audio_roots(str(tmp_path / "other"), [str(tmp_path / "more")])
    inside = ("a.wav", "b/../a.wav", "..a.wav", "a..wav", f"{tmp_path}/corpus/a.wav", f"{tmp_path}/more/a.wav")
    inside += ("../more/a",)
    inside += (f"{tmp_path}/corpus2/a.wav", f"{tmp_path}/a.wav")  # absolute paths are accepted
    outside = ("../a.wav", "b/../../a.wav", "..", "../..", "../corpus2/a.wav")
    assert all(is_named_inside(path, roots) for path in inside)
    assert not any(is_named_inside(path, roots) for path in outside)
    assert resolved_inside(f"{tmp_path}/other/a.wav", roots) == f"{tmp_path}/corpus/a.wav"
    assert resolved_inside(f"{tmp_path}/a.wav", roots) is None
    assert audio_roots("/", []) == ("/",) and is_named_inside("/etc/passwd", ("/",))


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])
def test_manifest_that_is_a_device_or_pipe_is_rejected_unopened(place, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / place
    for read in (read_manifest, read_recordings):
        verdict = watch(lambda read=read: read(path), tmp_path)
        assert (verdict.outcome, verdict.fault) == ("DataError", None), verdict
        assert "it is not a file" in verdict.message and str(path) not in verdict.opened


def test_index_copied_with_a_manifest_is_not_used(downloaded, monkeypatch):
    monkeypatch.setattr("konkanivani.data.index.SMALL_BYTES", 0)
    manifest = downloaded / "train.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "good.wav", "duration": 1.0, "text": "एक"}) + "\n")
    assert [u.text for u in read_manifest(manifest)] == ["एक"]
    copy = downloaded.parent / "copy"
    subprocess.run(["cp", "-a", downloaded, copy], check=True)  # keep the times, as unpacking an archive does
    (copy / "train.jsonl.index" / "durations").write_bytes(struct.pack("<d", float("nan")))
    (copy / "train.jsonl.index" / "sizes").write_bytes(struct.pack("<i", 2**31 - 1))
    assert [(u.text, u.duration) for u in read_manifest(copy / "train.jsonl")] == [("एक", 1.0)]


def _add(tar: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, link
    tar.addfile(member, open("/dev/zero", "rb") if size else None)


def write_hostile_shard(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("../../above.wav", "/etc/absolute.wav", "a/../../b.wav"):
            _add(tar, name, size=64)
        _add(tar, "link.wav", tarfile.SYMTYPE, link="/etc/passwd")
        _add(tar, "hard.wav", tarfile.LNKTYPE, link="../../private/diary.wav")
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            _add(tar, f"kind{kind.decode()}.wav", kind)
        huge = tarfile.TarInfo("huge.wav")
        huge.size = 2**60
        tar.fileobj.write(huge.tobuf(tarfile.GNU_FORMAT))
        tar.offset += 512


def test_tar_members_are_never_unpacked_or_opened_by_name(downloaded):
    shard = downloaded / "audio_0.tar"
    write_hostile_shard(shard)
    before = sorted(downloaded.parent.rglob("*"))
    members = []
    verdict = watch(lambda: members.extend(read_members(shard)), downloaded)
    assert verdict.fault is None and verdict.outcome in ("taken", "DataError"), verdict
    assert {path for path in verdict.opened if path.startswith(str(downloaded.parent))} == {str(shard)}
    assert not [path for path in verdict.opened if path.startswith(("/etc", "/dev"))]
    assert sorted(downloaded.parent.rglob("*")) == before
    results = []
    with pytest.raises(DataError) if verdict.outcome == "DataError" else contextlib.nullcontext():
        for member in read_members(shard):
            results.append(member)
    assert {member.name for member in results} <= {"../../above.wav", "/etc/absolute.wav", "a/../../b.wav"}
    assert all(member.byte_offset + member.byte_count <= shard.stat().st_size for member in results)


def test_tar_member_of_2_to_the_60_bytes_is_unusable_audio(downloaded):
    rows = [
        {"audio_filepath": "good.wav", "duration": 1.0, "text": "एक", "byte_offset": offset, "byte_count": count}
        for offset, count in ((0, 2**60), (2**60, 64), (2**62, 2**62), (0, 2**63 - 1))
    ]
    manifest = downloaded / "train.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for utterance in read_manifest(manifest):
        verdict = watch(lambda utterance=utterance: load_audio(utterance.source), downloaded)
        assert verdict.outcome == "UnusableAudio" and "its shard ends" in verdict.message and not verdict.fault


FORBIDDEN = (
    ("import pickle", 'pickle.load(open("x", "rb"))'),
    ("import pickle", 'pickle.loads(b"")'),
    ("import yaml", 'yaml.load("x")'),
    ("import yaml", 'yaml.unsafe_load("x")'),
    ("", 'eval("1")'),
    ("", 'exec("1")'),
    ("import subprocess", 'subprocess.run("x", shell=True)'),
    ("import os", 'os.system("x")'),
    ("import os", 'os.popen("x")'),
    ("import marshal", 'marshal.loads(b"")'),
    ("import torch", 'torch.load("x")'),
    ("import torch", 'torch.load("x", weights_only=False)'),
    ("import torch", 'torch.jit.load("x")'),
    ("import numpy as np", 'np.load("x", allow_pickle=True)'),
    ("import joblib", 'joblib.load("x")'),
)


def test_lint_rules_forbid_executing_input(tmp_path):
    for number, lines in enumerate([*FORBIDDEN, ("import json", "json.loads('1')")]):
        (tmp_path / f"written_{number}.py").write_text("\n\n".join(filter(None, lines)) + "\n")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    command += ["--quiet", "--output-format", "concise", "."]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    for number, lines in enumerate(FORBIDDEN):
        assert re.search(rf"written_{number}\.py:.* (S102|S30|S506|S60|TID251)", output), (lines, output)
    assert f"written_{len(FORBIDDEN)}.py" not in output  # negative control


def test_only_the_checkpoint_reader_disables_a_security_rule():
    """In user-facing code, only the checkpoint reader disables a ruff rule."""
    results = []
    for path in [*ROOT.glob("konkanivani/**/*.py"), *ROOT.glob("*_scripts/*.py")]:
        results += [(path.name, line) for line in path.read_text(encoding="utf-8").splitlines() if "noqa: S" in line]
        results += [(path.name, line) for line in path.read_text(encoding="utf-8").splitlines() if "noqa: TID" in line]
    assert [name for name, _ in results] == ["checkpoint.py"]
    assert "weights_only=True" in results[0][1]
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{rule}"' in pyproject for rule in ("S102", "S301", "S307", "S506", "S602", "S604", "S605", "TID251"))


def test_tensorboard_commands_bind_to_localhost_only():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    commands = []
    for name in files:
        if name.endswith((".py", ".md", ".sh", ".toml", ".cfg")) and not name.startswith("tests/"):
            text = (ROOT / name).read_text(encoding="utf-8")
            commands += [(name, line) for line in text.splitlines() if "--logdir" in line]
    assert len(commands) >= 2
    assert all("--host 127.0.0.1" in line for _, line in commands), commands
    assert all("bind_all" not in (ROOT / name).read_text(encoding="utf-8") for name, _ in commands)


SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "KONKANIVANI_CANARY")
CANARY = "canary-7b1f5c"


def test_environment_secrets_are_never_printed_or_written(small_run, tmp_path, monkeypatch, capsys):
    for name in SECRETS:
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    shutil.copytree(small_run, tmp_path, dirs_exist_ok=True)
    last, folders = tmp_path / "checkpoints" / LAST, ("--log_dir", str(tmp_path / "runs"))
    done = checked(run_trainer("--resume", str(last), "--epochs", "3", *folders))
    output = done.stdout + done.stderr
    for arguments in (
        ("--train_manifest", str(tmp_path / "nowhere")),
        ("--d_model", "64"),
        ("--memory_budget", "1MiB"),
    ):
        with pytest.raises(KonkaniVaniError) as caught:
            build_run(begin_run(["--resume", str(last), *arguments, *folders]))
        output += str(caught.value)
    last.write_bytes(b"PK")
    with pytest.raises(CheckpointError) as caught:
        begin_run(["--resume", str(last), *folders])
    output += str(caught.value) + capsys.readouterr().out
    assert CANARY not in output and "Resuming from" in output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in written) and len(written) > 10
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []
