"""Read files of an older version (commit e4e55aa of 2026-11-27), and resume its runs with equal losses.

`write_fixtures.py` in this folder wrote them, with that commit checked out.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import soundfile
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.data import index
from konkanivani.flags import config_from_text, parse_args
from konkanivani.inference.recognizer import load_recognizer
from tests.conftest import run_script

FIXTURES = Path(__file__).parent / "e4e55aa"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
FLAGS = (FIXTURES / "flags.txt").read_text(encoding="utf-8").split("\n")[:-1]
RENAMED = ("micro_batches_at_once", "edges", "deviation", "power_guard")
TRAINER = "training_scripts/train_konkanivani_asr.py"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES, tmp_path / "files")


def resume_and_read_steps(files: Path, folder: str, *flags: str) -> list[dict]:
    """Resume the run in `folder` and return its logged steps."""
    done = run_script(
        TRAINER,
        *FLAGS[: FLAGS.index("--d_model")],
        *("--resume", f"{folder}/checkpoint_last.pt", "--checkpoint_dir", folder, "--log_dir", "runs", *flags),
        cwd=files,
    )
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (files / "runs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["kind"] == "step"]


def assert_same_losses(steps: list[dict], expected: list[dict]) -> None:
    assert [step["step"] for step in steps] == [step["step"] for step in expected]
    for step, target in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(target["loss"], rel=1e-4)


def test_old_flag_names_set_the_renamed_settings():
    config = parse_args(FLAGS).config
    assert all(f"--{name}" in FLAGS for name in RENAMED)
    assert (config.features.frame_padding, config.features.std_ddof) == ("zeros", "sample")
    assert (config.features.log_floor_mode, config.data.concurrent_micro_batches) == ("added", 1)


def test_settings_of_old_checkpoint_are_read():
    text = read_checkpoint(FIXTURES / "native" / "checkpoint_last.pt").config
    assert all(f"--{name} " in text for name in RENAMED)
    asked = parse_args(FLAGS).config.features
    older = dataclasses.replace(asked, dynamic_range=0.0, dc_removal="none", normalization="utterance")
    assert config_from_text(text).features == older != asked


def test_old_run_resumes_with_equal_losses(files):
    steps = resume_and_read_steps(files, "native", "--max_steps", "9", "--continue_schedule", "stretch")
    assert_same_losses(steps, EXPECTED["steps"])
    with pytest.raises(AssertionError):  # negative control
        assert_same_losses(steps, [step | {"loss": 1.001 * step["loss"]} for step in EXPECTED["steps"]])


def test_old_whisper_run_resumes_with_equal_losses(files):
    assert_same_losses(
        resume_and_read_steps(files, "whisper", "--max_steps", "4", "--continue_schedule", "stretch"),
        EXPECTED["whisper_steps"],
    )


@pytest.mark.parametrize("name", ["native/checkpoint_last.pt", "model.safetensors"])
def test_old_checkpoints_and_bundles_give_equal_encoder_output(name):
    model = load_recognizer(str(FIXTURES / name)).speech_model
    samples, _ = soundfile.read(FIXTURES / "corpus" / "audio" / "valid_000.flac", dtype="float32")
    encoded, _ = model.encode(torch.from_numpy(samples)[None], (len(samples),))
    expected = torch.tensor(EXPECTED["encoded"][name])
    assert torch.allclose(encoded[0, :3].flatten(), expected, rtol=1e-3, atol=1e-4)
    silent, _ = model.encode(torch.zeros(1, len(samples)), (len(samples),))
    assert not torch.allclose(silent[0, :3].flatten(), expected, rtol=1e-3, atol=1e-4)  # negative control


def test_old_index_equals_rebuilt_index(files, monkeypatch):
    monkeypatch.setattr(index, "SMALL_BYTES", 0)
    manifest = files / "corpus" / "train.jsonl"
    stored = index.open_index(manifest)
    shutil.rmtree(files / "corpus" / "train.jsonl.index")
    built = index.open_index(manifest)
    assert stored.durations.tolist() == built.durations.tolist() and len(stored.durations) == 6
    assert stored.starts.tolist() == built.starts.tolist() and stored.sketch == built.sketch
