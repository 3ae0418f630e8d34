"""Absolute paths of a manifest are accepted; relative paths and their links stay inside its folder."""

import json
from pathlib import Path

import pytest

from konkanivani.data.audio.paths import audio_roots
from konkanivani.data.audio.sound import UnusableAudio, open_file
from konkanivani.data.index import BadRow, Utterance, parse_row


def read(audio: str, folder: Path) -> Utterance:
    line = json.dumps({"audio_filepath": audio, "duration": 1.0, "text": "ka"}).encode()
    return parse_row(line, str(folder), 1, audio_roots(str(folder), ()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sound.wav").write_bytes(b"samples")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "link.wav").symlink_to(tmp_path / "sound.wav")
    return corpus


def test_absolute_path_outside_manifest_folder_is_opened(folder: Path, tmp_path: Path) -> None:
    with open_file(read(str(tmp_path / "sound.wav"), folder).source) as file:
        assert file.read() == b"samples"


def test_absolute_path_must_be_a_regular_file(folder: Path) -> None:
    with pytest.raises(UnusableAudio):
        open_file(read("/dev/zero", folder).source)


def test_relative_path_leaving_manifest_folder_is_rejected(folder: Path) -> None:
    with pytest.raises(BadRow):
        read("../sound.wav", folder)


def test_relative_link_leaving_manifest_folder_is_rejected(folder: Path) -> None:
    with pytest.raises(UnusableAudio):
        open_file(read("link.wav", folder).source)
