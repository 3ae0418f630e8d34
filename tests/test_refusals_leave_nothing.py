"""A command that refuses its input leaves no file and no folder."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.conftest import run_script


def write_table(folder: Path, rows: int, text: str = "ka") -> Path:
    folder.mkdir()
    lines = ["audio,text,speaker,split"]
    for number in range(rows):
        soundfile.write(folder / f"{number}.wav", np.full(16_000, 0.1 + number / 100), 16_000)
        lines.append(f"{number}.wav,{text} {number},s{number},")
    (folder / "all.csv").write_text("\n".join(lines) + "\n")
    return folder


def prepare(tmp_path: Path, rows: int):
    source = write_table(tmp_path / "source", rows)
    flags = ("--format", "csv", "--table", "all.csv", "--source", str(source), "--output", str(tmp_path / "made"))
    flags += ("--audio_column", "audio", "--text_column", "text")
    return run_script("training_scripts/prepare_data.py", *flags)


@pytest.mark.parametrize("rows", [0, 2])
def test_prepare_data_that_refuses_leaves_nothing(rows: int, tmp_path: Path) -> None:
    done = prepare(tmp_path, rows)
    assert done.returncode == 3, done.stderr
    assert not (tmp_path / "made").exists()


def test_prepare_data_that_succeeds_writes_its_list_of_rejected_rows(tmp_path: Path) -> None:
    assert prepare(tmp_path, 12).returncode == 0
    assert (tmp_path / "made" / "rejected.jsonl").read_text() == ""
