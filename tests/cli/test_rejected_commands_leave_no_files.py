"""Commands that reject their input leave no file or folder, except for the list that the message names."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.conftest import WORDS, run_script
from tests.data.test_channels import write_rows

SCRIPTS = "training_scripts"


def write_table(folder: Path, rows: int, text: str = "ka") -> Path:
    folder.mkdir()
    lines = ["audio,text,speaker,split"]
    for number in range(rows):
        soundfile.write(folder / f"{number}.wav", np.full(16_000, 0.1 + number / 100), 16_000)
        lines.append(f"{number}.wav,{text} {number},s{number},")
    (folder / "all.csv").write_text("\n".join(lines) + "\n")
    return folder


def run_prepare_data(tmp_path: Path, rows: int):
    source = write_table(tmp_path / "source", rows)
    flags = ("--format", "csv", "--table", "all.csv", "--source", str(source), "--output", str(tmp_path / "made"))
    flags += ("--audio_column", "audio", "--text_column", "text")
    return run_script("training_scripts/prepare_data.py", *flags)


@pytest.mark.parametrize("rows", [0, 2])
def test_failed_prepare_data_leaves_no_output(rows: int, tmp_path: Path) -> None:
    done = run_prepare_data(tmp_path, rows)
    assert done.returncode == 3, done.stderr
    assert not (tmp_path / "made").exists()


def test_successful_prepare_data_writes_rejected_list(tmp_path: Path) -> None:
    assert run_prepare_data(tmp_path, 12).returncode == 0
    assert (tmp_path / "made" / "rejected.jsonl").read_text() == ""


def test_failed_prepare_data_keeps_only_rejected_list(tmp_path: Path) -> None:
    source = write_table(tmp_path / "source", 4)
    (source / "1.wav").unlink()
    output = tmp_path / "deep" / "er" / "made"
    flags = ("--format", "csv", "--table", "all.csv", "--source", str(source), "--output", str(output))
    done = run_script("training_scripts/prepare_data.py", *flags)
    assert done.returncode == 3 and f"All are listed in {output / 'rejected.jsonl'}" in done.stderr
    assert [path.name for path in output.iterdir()] == ["rejected.jsonl"]
    assert len((output / "rejected.jsonl").read_text(encoding="utf-8").splitlines()) == 1


# All other commands


@dataclass(frozen=True)
class Inputs:
    """Valid and invalid input files in `folder`, for command lines."""

    folder: Path

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture
def inputs(base: Path, tmp_path: Path) -> Inputs:
    """Write a small corpus, a checkpoint, and an invalid file of each kind."""
    folder = write_table(tmp_path / "in", 4, "एक")
    shutil.copy(base, folder / "good.pt")
    other = folder / "checkpoint_other.pt"
    other.write_bytes(base.read_bytes()[:1000])
    (folder / "bad.nemo").write_bytes(b"\0" * 2000)
    (folder / "bad.wav").write_bytes(b"RIFF\x00\x00\x00\x00WAVEnothing")
    soundfile.write(folder / "nan.wav", np.r_[np.full(16_000, 0.1), np.nan], 16_000, subtype="FLOAT")
    (folder / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    (folder / "blank.txt").write_text("\n\n")
    (folder / "lines.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (folder / "file").write_text("no folder\n")
    rows = [{"audio_filepath": f"{n}.wav", "duration": 1.0, "text": "एक"} for n in range(4)]
    write_rows(folder / "good.jsonl", rows)
    write_rows(folder / "broken.jsonl", [row | {"audio_filepath": "gone.wav"} for row in rows])
    (folder / "two.csv").write_text("\n".join((folder / "all.csv").read_text(encoding="utf-8").splitlines()[:3]) + "\n")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "comparison.json").write_text("mine\n")
    (folder / "no.jsonl").write_text("no json\n")
    (folder / "empty").mkdir()
    (folder / "speaker1").mkdir()
    segments = [{"start": 0.0, "end": 0.5, "text": "हय", "speaker_id": 1}]
    recording = {"verbatim": segments, "normalized": segments, "speaker_id": "a"}
    (folder / "speaker1" / "0.json").write_text(json.dumps(recording))
    shutil.copy(folder / "0.wav", folder / "speaker1" / "0.wav")
    return Inputs(folder)


Arguments = Callable[[Inputs, str], tuple[str, ...]]


def prepare_arguments(source: str, *flags: str, table: str = "all.csv", output: str = "out") -> Arguments:
    def arguments(inputs: Inputs, out: str) -> tuple[str, ...]:
        kind = () if "--format" in flags else ("--format", "csv", "--table", table)
        return *kind, "--source", inputs[source], "--output", f"{out}/{output}", *flags

    return arguments


def command_line(*words: str) -> Arguments:
    """Return a command line in which `<NAME>` is an input file and `>NAME` an output path."""

    def arguments(inputs: Inputs, out: str) -> tuple[str, ...]:
        filled = []
        for word in words:
            if word.startswith("<"):
                filled.append(inputs[word[1:-1]])
            elif word.startswith(">"):
                filled.append(out + word[1:])
            else:
                filled.append(word)
        return tuple(filled)

    return arguments


LM = ("--checkpoint", "<good.pt>")
EVALUATION = ("--device", "cpu", "--checkpoint")
DATA = ("--train_manifest", "<good.jsonl>", "--test_manifest", "<good.jsonl>")
FAILING_COMMANDS: dict[str, tuple[str, Arguments, int]] = {
    "prepare: missing source": ("prepare_data.py", prepare_arguments("nowhere"), 2),
    "prepare: missing table": ("prepare_data.py", prepare_arguments("", table="no.csv"), 3),
    "prepare: too few speakers": (
        "prepare_data.py",
        prepare_arguments("", "--split_by", "speaker", table="two.csv", output="deep/out"),
        3,
    ),
    "prepare: output below a file": ("prepare_data.py", prepare_arguments("", output="in/file/out"), 6),
    "prepare: missing parents": (
        "prepare_data.py",
        prepare_arguments("empty", output="deep/er/out", table="no.csv"),
        3,
    ),
    "prepare: all rows rejected": ("prepare_data.py", prepare_arguments("speaker1", "--format", "indicvoices"), 3),
    "import: missing model": ("import_asr.py", command_line("<nowhere.nemo>", ">/out.pt"), 4),
    "import: not a model": ("import_asr.py", command_line("<bad.nemo>", ">/out.pt"), 4),
    "import: empty folder": ("import_asr.py", command_line("<empty>", ">/out.pt"), 4),
    "import: missing parent": ("import_asr.py", command_line("<bad.nemo>", ">/deep/out.pt"), 6),
    "export: not a checkpoint": (
        "export_asr.py",
        command_line("--checkpoint", "<file>", "--bundle", ">/a.safetensors"),
        4,
    ),
    "export: truncated checkpoint": (
        "export_asr.py",
        command_line("--checkpoint", "<checkpoint_other.pt>", "--onnx", ">/a.onnx"),
        4,
    ),
    "export: missing parent": ("export_asr.py", command_line(*LM, "--bundle", ">/deep/a.safetensors"), 6),
    "export: model of another type": ("export_asr.py", command_line(*LM, "--whisper", ">/deep/whisper"), 2),
    "export: invalid manifest": (
        "export_asr.py",
        command_line(*LM, "--bundle", ">/a.safetensors", "--manifest", "<file>"),
        3,
    ),
    "average: truncated checkpoint": ("average_checkpoints.py", command_line("<good.pt>", "<checkpoint_other.pt>"), 4),
    "average: missing parent": ("average_checkpoints.py", command_line("<good.pt>", "--output", ">/deep/a.pt"), 6),
    "average: missing folder": ("average_checkpoints.py", command_line("--checkpoint_dir", "<nowhere>"), 4),
    "language model: missing text": (
        "train_language_model.py",
        command_line(*LM, "--text", "<no.txt>", "--output", ">/a.arpa"),
        3,
    ),
    "language model: blank text": (
        "train_language_model.py",
        command_line(*LM, "--text", "<blank.txt>", "--output", ">/a.arpa"),
        3,
    ),
    "language model: Latin-1": (
        "train_language_model.py",
        command_line(*LM, "--text", "<latin.txt>", "--output", ">/a.arpa.gz"),
        3,
    ),
    "language model: missing parent": (
        "train_language_model.py",
        command_line(*LM, "--text", "<lines.txt>", "--output", ">/deep/a.arpa"),
        6,
    ),
    "evaluate: not a checkpoint": (
        "evaluate_konkanivani_asr.py",
        command_line(*EVALUATION, "<file>", "--manifest", "<good.jsonl>", "--output", ">/h.jsonl"),
        4,
    ),
    "evaluate: manifest is not JSON": (
        "evaluate_konkanivani_asr.py",
        command_line(*EVALUATION, "<good.pt>", "--manifest", "<no.jsonl>", "--html", ">/h.html"),
        3,
    ),
    "evaluate: missing audio": (
        "evaluate_konkanivani_asr.py",
        command_line(*EVALUATION, "<good.pt>", "--manifest", "<broken.jsonl>", "--html", ">/h.html"),
        3,
    ),
    "evaluate: missing parent": (
        "evaluate_konkanivani_asr.py",
        command_line(*EVALUATION, "<good.pt>", "--manifest", "<good.jsonl>", "--output", ">/deep/h.jsonl"),
        6,
    ),
    "evaluate: page in a missing parent": (
        "evaluate_konkanivani_asr.py",
        command_line(*EVALUATION, "<good.pt>", "--manifest", "<good.jsonl>", "--html", ">/deep/h.html"),
        6,
    ),
    "evaluate: unequal numbers of texts": (
        "evaluate_konkanivani_asr.py",
        command_line(
            "--references", "<lines.txt>", "--hypotheses", "<file>", "--output", ">/h.jsonl", "--html", ">/h.html"
        ),
        3,
    ),
    "transcribe: missing recording": (
        "transcribe.py",
        command_line("<nowhere.wav>", *LM, "--device", "cpu", "--output_dir", ">/out"),
        3,
    ),
    "transcribe: not audio": (
        "transcribe.py",
        command_line("<bad.wav>", *LM, "--device", "cpu", "--output_dir", ">/a/b"),
        3,
    ),
    "transcribe: two files without audio": (
        "transcribe.py",
        command_line("<bad.wav>", "<file>", *LM, "--device", "cpu", "--output_dir", ">/a/b"),
        3,
    ),
    "transcribe: NaN at the end": (
        "transcribe.py",
        command_line("<nan.wav>", *LM, "--device", "cpu", "--output_dir", ">/a/b"),
        3,
    ),
    "transcribe: empty folder": ("transcribe.py", command_line("<empty>", *LM, "--output_dir", ">/out"), 3),
    "transcribe: not a checkpoint": (
        "transcribe.py",
        command_line("<0.wav>", "--checkpoint", "<file>", "--output_dir", ">/o"),
        4,
    ),
    "transcribe: output below a file": (
        "transcribe.py",
        command_line("<0.wav>", *LM, "--device", "cpu", "--output_dir", "<file/out>"),
        6,
    ),
    "compare: no models": ("compare_models.py", command_line("--folder", ">/deep/c", *DATA), 2),
    "compare: missing manifest": (
        "compare_models.py",
        command_line("--presets", "minimal", "--folder", ">/c", *DATA[:2], "--test_manifest", "<nowhere.jsonl>"),
        3,
    ),
    "compare: manifest is not JSON": (
        "compare_models.py",
        command_line("--presets", "minimal", "--folder", ">/deep/c", *DATA[2:], "--train_manifest", "<no.jsonl>"),
        3,
    ),
    "compare: folder below a file": (
        "compare_models.py",
        command_line("--presets", "minimal", "--folder", "<file/c>", *DATA),
        6,
    ),
    "compare: report of another program": (
        "compare_models.py",
        command_line("--presets", "minimal", "--folder", "<foreign>", *DATA),
        2,
    ),
    "train: missing manifest": (
        "train_konkanivani_asr.py",
        command_line("--train_manifest", "<nowhere.jsonl>", "--checkpoint_dir", ">/c", "--log_dir", ">/deep/r"),
        3,
    ),
    "train: invalid flag": (
        "train_konkanivani_asr.py",
        command_line(*DATA[:2], "--batch_size", "0", "--checkpoint_dir", ">/c", "--log_dir", ">/r"),
        2,
    ),
    "train: not a checkpoint": (
        "train_konkanivani_asr.py",
        command_line(
            *DATA[:2], "--init_from", "<file>", "--checkpoint_dir", ">/c", "--log_dir", ">/r", "--device", "cpu"
        ),
        4,
    ),
    "inspect: missing manifest": ("inspect_data.py", command_line("<nowhere.jsonl>"), 3),
    "inspect: manifest is not JSON": ("inspect_data.py", command_line("<no.jsonl>"), 3),
    "inspect: page in a missing parent": (
        "inspect_data.py",
        command_line("<good.jsonl>", "--html", ">/deep/h.html"),
        6,
    ),
}


def folder_contents(folder: Path) -> dict[str, bytes | None]:
    """Return all files below `folder` with their content, and all folders with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", FAILING_COMMANDS)
def test_failed_command_leaves_all_files_unchanged(name: str, inputs: Inputs, tmp_path: Path) -> None:
    script, arguments, code = FAILING_COMMANDS[name]
    before = folder_contents(tmp_path)
    words = arguments(inputs, str(tmp_path))
    done = run_script(f"{SCRIPTS}/{script}", *words, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    left = folder_contents(tmp_path)
    assert sorted(set(left) ^ set(before)) == [] and left == before, done.stderr
