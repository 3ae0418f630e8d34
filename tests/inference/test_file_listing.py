"""System and hidden files in a folder are neither prepared nor transcribed unless they are named."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from konkanivani.files import visible_files
from konkanivani.inference.transcribe import find_recordings
from tests.cli.test_prepare_data import prepare, read_rejected
from tests.conftest import checked
from tests.corpora.test_formats import MINIATURES, add_member, audio_bytes, sentence, write_sentence

# AppleDouble header, as macOS writes it on file systems without extended attributes.
FORK = b"\0\5\26\7\0\2\0\0Mac OS X        \xff\xfe" + bytes(120)


def add_system_files(folder: Path) -> None:
    """Add the files that macOS, Windows and Linux create, and copies of the corpus in system folders."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        (path.parent / f"._{path.name}").write_bytes(FORK)
    shutil.copytree(folder, folder.parent / "second")
    for name in (".Trash-1000", "__MACOSX", "$RECYCLE.BIN", ".ipynb_checkpoints"):
        shutil.copytree(folder.parent / "second", folder / name)
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (folder / name).write_bytes(FORK)


def prepared_rows(directory: Path) -> list[str]:
    rows = [json.loads(line) for path in (directory / "out").glob("t*.jsonl") for line in path.open(encoding="utf-8")]
    rows += [json.loads(line) for line in (directory / "out" / "valid.jsonl").open(encoding="utf-8")]
    return sorted(row["text"] for row in rows)


@pytest.mark.parametrize("name", ["folder", "openslr", "nemo", "indicvoices", "huggingface parquet"])
def test_system_files_in_corpus_folder_are_ignored(name, tmp_path):
    build, flags = MINIATURES[name]
    spoken = build(tmp_path / "corpus")
    add_system_files(tmp_path / "corpus")
    checked(prepare(tmp_path, name.split()[0], *flags))
    assert prepared_rows(tmp_path) == sorted(item.text for item in spoken)
    assert all("speaker 1" in row["kind"] or "no word" in row["kind"] for row in read_rejected(tmp_path))


def test_mac_files_in_tar_are_ignored_and_dot_slash_paths_are_read(tmp_path):
    (tmp_path / "corpus").mkdir()
    for split in ("train", "valid", "test"):
        with tarfile.open(tmp_path / "corpus" / f"{split}-0.tar", "w") as tar:
            for number in range(3):
                place = {"train": 0, "valid": 3, "test": 6}[split] + number
                for suffix, content in (("flac", audio_bytes(place)), ("txt", sentence(place).encode())):
                    add_member(tar, f"./._{place}.{suffix}", FORK)
                    add_member(tar, f"__MACOSX/{place}.{suffix}", content)
                    add_member(tar, f"./{place}.{suffix}", content)
    done = prepare(tmp_path, "nemo")
    assert done.returncode == 0 and read_rejected(tmp_path) == [], done.stderr
    assert prepared_rows(tmp_path) == sorted(map(sentence, range(9)))


def test_hidden_files_are_used_only_if_named(tmp_path):
    for name in ("a.wav", "._a.wav", ".hidden/b.wav", "__MACOSX/c.wav", "d/.e.wav", "d/f.wav"):
        write_sentence(tmp_path / "in" / name, 0)
    named = [tmp_path / "in" / "._a.wav", tmp_path / "in" / ".hidden"]
    results = [str(recording.name) for recording in find_recordings(list(map(str, [tmp_path / "in", *named])))]
    assert results == ["a.wav", "d/f.wav", "._a.wav", "b.wav"]
    assert [path.name for path in visible_files(tmp_path / "in")] == ["a.wav", "f.wav"]
