"""Corpora of phone recordings: preparation, rejected files, and equal training losses."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import soundfile

pytest.importorskip("av", reason="the extra `media` is not installed: pip install av")

from konkanivani.cli.prepare import Preparation, PreparationReport, prepare_corpus
from konkanivani.data.audio import files as audio_file
from konkanivani.errors import DataError
from tests.conftest import (
    TINY_MODEL,
    Corpus,
    checked,
    read_log,
    run_folders,
    run_in_process,
    run_trainer,
    speak,
    write_corpus,
)
from tests.data.test_truncated_audio import write_truncated
from tests.media_files import ENCODED, KINDS, Kind, write_media


@pytest.fixture(scope="module")
def phone_recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of 23 recordings in different formats, with transcripts."""
    folder = tmp_path_factory.mktemp("phones") / "corpus"
    folder.mkdir()
    for number, kind in enumerate(KINDS):
        path = write_media(folder / f"{number}_{kind.name}{kind.suffix}", speak(["एक", "दोन", "घर"]), 16_000, kind)
        path.with_suffix(".txt").write_text(f"एक दोन घर {number}", encoding="utf-8")
    for path in ENCODED.iterdir():
        shutil.copy(path, folder)
        (folder / path.name).with_suffix(".txt").write_text(path.stem.replace("_", " "))
    return folder


def prepare(source: Path, output: Path, most: str = "50%") -> PreparationReport:
    return prepare_corpus(Preparation("folder", source, output, split_by="utterance", seed=1, max_rejected=most))


def read_rejected(output: Path) -> dict[str, dict]:
    rows = map(json.loads, (output / "rejected.jsonl").read_text(encoding="utf-8").splitlines())
    return {Path(row["audio_filepath"]).name: row for row in rows}


def test_all_phone_recording_formats_are_prepared(phone_recordings, tmp_path):
    arguments = ("--format", "folder", "--source", str(phone_recordings), "--output", str(tmp_path / "out"))
    checked(run_in_process("training_scripts/prepare_data.py", *arguments, "--split_by", "utterance"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert sum(split["utterances"] for split in report["splits"]) == 23 and report["refused"] == []
    rows = [json.loads(line) for path in (tmp_path / "out").glob("t*n.jsonl") for line in path.read_text().splitlines()]
    assert all(0.5 < row["duration"] < 2.0 for row in rows)


def test_missing_pyav_rejects_each_file_with_install_command(phone_recordings, tmp_path, monkeypatch):
    monkeypatch.setattr(audio_file, "is_installed", lambda: False)
    message = r"91\.3% of the rows .* are unusable \(21 unusable audio\).*pip install av"
    with pytest.raises(DataError, match=message):
        prepare(phone_recordings, tmp_path / "out")
    rejected = read_rejected(tmp_path / "out")
    assert len(rejected) == 21 and not any(name.endswith(".ogg") for name in rejected)
    for name, row in rejected.items():
        assert (
            ".venv/bin/python -m pip install av" in row["reason"]
            and f"ffmpeg -i {phone_recordings}/{name}" in row["reason"]
        )


def test_unusable_files_and_duplicate_recordings_are_rejected(phone_recordings, tmp_path):
    source = tmp_path / "mixed"
    shutil.copytree(phone_recordings, source)
    soundfile.write(source / "6_libopencore_amrnb_8k_mono.wav", speak(["एक", "दोन", "घर"]), 16_000)
    (source / "broken.mp4").write_bytes((source / "he_aac.aac").read_bytes()[1000:1100])
    (source / "silent.m4b").write_text("nothing")
    write_truncated(source / "cut.wav", "WAV")
    for name in ("broken", "silent", "cut"):
        (source / f"{name}.txt").write_text("एक")
    (source / "no_text.webm").write_bytes(b"")
    report = prepare(source, tmp_path / "out")
    values = {name: (row["kind"], row["reason"]) for name, row in read_rejected(tmp_path / "out").items()}
    assert {name: kind for name, (kind, _) in values.items()} == {
        "6_libopencore_amrnb_8k_mono.amr": "recorded twice",
        "broken.mp4": "unusable audio",
        "silent.m4b": "unusable audio",
        "cut.wav": "cut short",
        "no_text.webm": "no transcript",
    }
    assert "5.0 s shorter than its header states" in values["cut.wav"][1]
    assert sum(split.utterances for split in report.splits) == 23
    with pytest.raises(DataError, match=r"14\.8% of the rows"):  # the duplicate does not count
        prepare(source, tmp_path / "strict", most="10%")


def convert_to_alac(corpus: Corpus, directory: Path) -> Corpus:
    """Convert each FLAC to an M4A with the same samples and name, since random numbers depend on the name."""
    (directory / "audio").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        rows = [json.loads(line) for line in Path(corpus.manifest(split)).read_text(encoding="utf-8").splitlines()]
        for row in rows:
            samples, rate = soundfile.read(corpus.directory / row["audio_filepath"], dtype="float32")
            written = write_media(directory / "audio.m4a", samples, rate, Kind(".m4a", "alac", rate))
            written.rename(directory / row["audio_filepath"])
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Corpus(directory)


def test_training_on_lossless_m4a_equals_training_on_flac(tmp_path):
    corpus = write_corpus(tmp_path / "flac", {"train": 8, "valid": 2, "test": 1})
    losses = {}
    for name, each in (("flac", corpus), ("m4a", convert_to_alac(corpus, tmp_path / "m4a"))):
        flags = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "2")
        folders = run_folders(tmp_path / f"run_{name}")
        checked(run_trainer(*TINY_MODEL, *each.flags(), *folders, *flags, "--num_workers", "2"))
        losses[name] = [step["loss"] for step in read_log(tmp_path / f"run_{name}")]
        (validation,) = [row["loss"] for row in read_log(tmp_path / f"run_{name}", "validation")][-1:]
        losses[name].append(validation)
    assert losses["m4a"] == losses["flac"] and Counter(losses["flac"]).most_common(1)[0][1] == 1
