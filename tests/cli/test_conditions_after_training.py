"""Error rates per recording condition in the summary of a training run."""

import json
import shutil

import pytest

from tests.conftest import checked, run_script, run_trainer
from tests.trained_model import Trained


def test_trainer_conditions_equal_evaluation_script(trained: Trained, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained.checkpoint.parent, folder)
    flags = ("--checkpoint_dir", str(folder), "--log_dir", str(tmp_path / "runs"), "--num_workers", "0")
    manifest = str(trained.recordings.parent / "test.jsonl")
    done = checked(run_trainer("--resume", "auto", *flags, "--test_manifest", manifest, "--conditions"))
    parsed = json.loads(done.stdout.splitlines()[-1])["conditions"]
    done = checked(
        run_script(
            "training_scripts/evaluate_konkanivani_asr.py",
            *("--checkpoint", str(folder / trained.checkpoint.name), "--manifest", manifest, "--conditions", "--json"),
        )
    )
    rows = json.loads(done.stdout.splitlines()[-1])["conditions"]
    assert list(parsed) == [row["condition"] for row in rows] and len(rows) == 14
    for row in rows:
        rates = parsed[row["condition"]]
        assert (rates["wer"], rates["cer"]) == pytest.approx((row["wer"], row["cer"]), abs=1e-4)
    assert len({rates["cer"] for rates in parsed.values()}) > 2  # negative control: the conditions differ


def test_conditions_require_test_manifest():
    done = run_trainer("--conditions")
    assert done.returncode == 2 and "--conditions needs --test_manifest" in done.stderr
