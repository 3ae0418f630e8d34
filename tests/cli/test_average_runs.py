"""Averaging checkpoints of different runs requires --allow_different_runs; a resumed run counts as one run."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.averaging import NamedCheckpoint, average_checkpoints
from konkanivani.checkpoints.checkpoint import Checkpoint, write_checkpoint
from konkanivani.config import TrainConfig
from konkanivani.errors import CheckpointError
from konkanivani.flags import config_from_text, config_to_text
from konkanivani.training.run import TrainState
from tests.conftest import run_in_process

AVERAGE = "training_scripts/average_checkpoints.py"


def checkpoint(weight: float, step: int, seed: int = 1, folder: str = "a", **counters: float) -> NamedCheckpoint:
    """Return a checkpoint with one weight, and the settings and counters of a run."""
    config = TrainConfig()
    config = replace(config, run=replace(config.run, seed=seed, checkpoint_dir=folder))
    states = {"model": {"weight": torch.tensor([weight])}, "progress": asdict(TrainState(step=step, **counters))}
    return NamedCheckpoint(f"{folder}_{step}", Checkpoint(config_to_text(config), b"tokens", 9, step, 0, states))


FIRST = checkpoint(1.0, 10, first_loss=5.25, audio_seconds=100.0)
OTHERS = {
    "seed": (checkpoint(3.0, 20, seed=2, first_loss=5.25), "--seed is 1 and 2"),
    "first epoch": (checkpoint(3.0, 20, first_loss=5.5), "first epoch is 5.25 and 5.5"),
    "audio": (checkpoint(3.0, 10, audio_seconds=90.0), "step 10 was reached after 100 and 90 s"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_averaging_different_runs_requires_allow_flag(case):
    other, reason = OTHERS[case]
    with pytest.raises(CheckpointError, match=reason) as raised:
        average_checkpoints([FIRST, other])
    assert FIRST.name in str(raised.value) and "--allow_different_runs" in str(raised.value)
    mean = average_checkpoints([FIRST, other], allow_different_runs=True)
    assert float(mean.states["model"]["weight"]) == 2.0


@pytest.mark.parametrize(
    "other",
    [
        checkpoint(3.0, 20, folder="resumed in another folder", first_loss=5.25, audio_seconds=200.0),
        checkpoint(3.0, 20),  # written by an older version, which stored no loss
        checkpoint(3.0, 10, skipped_steps=1, audio_seconds=110.0, first_loss=5.25),
    ],
)
def test_checkpoints_of_one_run_are_averaged(other):
    assert float(average_checkpoints([FIRST, other]).states["model"]["weight"]) == 2.0


def lora_checkpoint(weight: float, step: int, **tuning: object) -> NamedCheckpoint:
    """Return a checkpoint of a run with LoRA."""
    named = checkpoint(weight, step, first_loss=5.25)
    config = config_from_text(named.checkpoint.config)
    changed = replace(config, tuning=replace(config.tuning, **{"lora_rank": 4} | tuning))
    states = named.checkpoint.states | {"model": {"layer.low_rank.up": torch.tensor([weight])}}
    return replace(named, checkpoint=replace(named.checkpoint, config=config_to_text(changed), states=states))


def test_lora_checkpoints_of_different_runs_are_not_averaged():
    first, second = lora_checkpoint(1.0, 10), lora_checkpoint(3.0, 20)
    mean = average_checkpoints([first, second])
    assert float(mean.states["model"]["layer.low_rank.up"]) == 2.0
    with pytest.raises(CheckpointError, match="--allow_different_runs does not apply to runs with --lora_rank"):
        average_checkpoints([first, second], allow_different_runs=True)
    assert average_checkpoints([first], allow_different_runs=True).step == 10


@pytest.mark.parametrize("setting", [("lora_rank", 2), ("lora_alpha", 16.0), ("lora_targets", ("query",))])
def test_checkpoints_with_other_lora_settings_are_not_averaged(setting):
    name, value = setting
    with pytest.raises(CheckpointError, match=f"--{name} is .* in one and .* in the other"):
        average_checkpoints([lora_checkpoint(1.0, 10), lora_checkpoint(3.0, 20, **{name: value})])


def test_script_exits_with_4_without_allow_different_runs(tmp_path: Path):
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path, named in zip(paths, (FIRST, OTHERS["first epoch"][0]), strict=True):
        write_checkpoint(path, named.checkpoint)
    flags = [*map(str, paths), "--output", str(tmp_path / "mean.pt")]
    done = run_in_process(AVERAGE, *flags)
    assert done.returncode == 4 and "are from different runs" in done.stderr, done.stderr
    assert not (tmp_path / "mean.pt").exists()
    done = run_in_process(AVERAGE, *flags, "--allow_different_runs")
    assert done.returncode == 0 and (tmp_path / "mean.pt").exists(), done.stderr
