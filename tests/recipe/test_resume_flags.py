"""Flags that a resumed run may change or takes from its checkpoint, and flags for a used folder."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, load_states, read_checkpoint, write_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import OLD_NAMES, PRESETS, TrainConfig
from konkanivani.errors import CheckpointError, DataError
from konkanivani.flags import config_from_text, config_to_text, contradictions
from konkanivani.recipe.build import build_run
from konkanivani.rules import settings_of, with_values
from konkanivani.training.loop import train
from tests.conftest import TINY_MODEL, Corpus, checked, read_log, run_folders, run_trainer
from tests.run_setup import begin_run, parse_flags

STEPS = 3


def base_flags(corpus: Corpus, directory: Path) -> tuple[str, ...]:
    """Return the flags that resume the run of `three_steps`."""
    return (*TINY_MODEL, *corpus.flags(), *run_folders(directory), "--num_workers", "0", "--max_steps", str(STEPS))


def test_every_setting_round_trips_through_checkpoint_text():
    config = TrainConfig()
    for setting in settings_of(config):
        changed = {bool: True, int: 7, float: 0.25, str: setting.value, tuple: ("a", "b"), type(None): None}
        value = (1.0, 1.5) if setting.name == "speed_perturbation" else changed[type(setting.value)]
        config = with_values(config, {setting.name: value})
    assert config_from_text(config_to_text(config)) == config != TrainConfig()


@pytest.mark.parametrize(
    "line, message",
    [
        ("--wings 2", "--wings"),
        *((f"--epochs {text}", "invalid value for --epochs") for text in ("__import__('os')", "'x'")),
    ],
)
def test_unknown_or_invalid_checkpoint_settings_are_rejected_by_name(line, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        config_from_text(line + "\n")


def test_old_flag_names_are_accepted_in_commands_and_checkpoints():
    noise = ["--noise_manifest", "n", "--rir_manifest", "r"]
    stored = parse_flags(noise)
    values = {"concurrent_micro_batches": 2, "frame_padding": "zeros", "std_ddof": "sample", "log_floor_mode": "added"}
    for old, new in OLD_NAMES.items():
        value = values.get(new, 0.25)
        config = parse_flags([*noise, f"--{new}", str(value)])
        for words in ([f"--{old}", f"{value}"], [f"--{old}={value}"], [f"--{old.replace('_', '-')}", f"{value}"]):
            assert parse_flags([*noise, *words]) == config
            if not hasattr(stored.features, new):  # another front end would contradict the checkpoint
                assert parse_flags(["--resume", "auto", *words], stored) == parse_flags(
                    ["--resume", "auto", f"--{new}", str(value)], stored
                )
        text = config_to_text(config)
        assert f"--{new} {value!r}\n" in text and f"--{old} " not in text
        assert config_from_text(text.replace(f"--{new} ", f"--{old} ")) == config


def test_checkpoint_values_take_precedence_over_preset_and_default():
    given = ("--preset", "minimal", "--learning_rate", "0.5", "--train_manifest", "a", "--init_from", "x")
    stored = parse_flags(list(given))
    assert stored.model == PRESETS["minimal"]
    resumed = parse_flags(["--resume", "auto", "--dropout", "0.3"], stored)
    assert resumed.model == dataclasses.replace(PRESETS["minimal"], dropout=0.3)
    assert (resumed.optimizer.learning_rate, resumed.data.train_manifest) == (0.5, "a")
    assert resumed.run.init_from == "x"  # the initial checkpoint of a run stays known
    same = parse_flags(["--resume", "auto", "--preset", "minimal", "--d_model", "64"], stored)
    assert (same.model.d_model, same.model.encoder_layers) == (64, 6)
    assert parse_flags([]).model == PRESETS["original"]


ALLOWED = ("learning_rate", "dropout", "num_workers", "epochs", "mixed_precision", "max_duration", "seed", "ctc_weight")
CONTRADICTING = (
    "d_model",
    "encoder_layers",
    "attention_heads",
    "convolution_kernel",
    "feedforward_dim",
    "encoder_type",
)


def test_boolean_flag_of_a_checkpoint_stays_on():
    stored = parse_flags(["--mixed_precision"])
    assert stored.memory.mixed_precision
    for given in ([], ["--mixed_precision"]):
        assert parse_flags([*given, "--batch_size", "1"], stored).memory.mixed_precision
    assert not parse_flags([], parse_flags([])).memory.mixed_precision


def test_only_shape_tokens_and_global_batch_size_can_contradict():
    stored, result = TrainConfig(), set()
    for setting in settings_of(stored):
        asked = with_values(stored, {setting.name: "another"})
        if setting.name not in ("batch_size", "gradient_accumulation_steps") and contradictions(stored, asked):
            result.add(setting.name)
    assert result.issuperset((*CONTRADICTING, "tokenizer_type", "vocab_size", "digits"))
    assert not result.intersection(ALLOWED)
    data = dataclasses.replace(stored.data, batch_size=1, gradient_accumulation_steps=8)
    assert contradictions(stored, dataclasses.replace(stored, data=data)) == []
    data = dataclasses.replace(stored.data, batch_size=4, gradient_accumulation_steps=4)
    assert "is 16 here and 8 in the checkpoint" in contradictions(stored, dataclasses.replace(stored, data=data))[0]


def test_contradiction_exits_with_4_and_lists_each_difference(corpus, copy):
    different = ("--d_model", "64", "--vocab_size", "40", "--batch_size", "3", "--learning_rate", "0.1")
    done = run_trainer(*base_flags(corpus, copy), "--resume", "auto", *different)
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
    for part in ("--d_model is 64 here and 32 in", "--vocab_size is 40 here and 30", "is 6 here and 8", "--init_from"):
        assert part in done.stderr
    assert "learning_rate" not in done.stderr
    assert read_checkpoint(copy / "checkpoints" / LAST).step == STEPS


def test_resume_from_a_path_takes_all_settings_from_the_checkpoint(corpus, copy, tmp_path):
    path = copy / "checkpoints" / LAST
    only = checked(run_trainer("--resume", str(path), "--max_steps", "4", *run_folders(copy), cwd=tmp_path))
    assert f"Resuming from {path}: step {STEPS}." in only.stdout
    assert [r["step"] for r in read_log(copy)] == [1, 2, 3, 4]
    config = config_from_text(read_checkpoint(path).config)
    assert (config.model.d_model, config.data.train_manifest) == (32, corpus.manifest("train"))


def test_learning_rate_dropout_and_workers_may_change_on_resume(corpus, copy):
    changed = ("--learning_rate", "0.1", "--dropout", "0.3", "--num_workers", "1", "--max_steps", "4")
    train(build_run(begin_run([*base_flags(corpus, copy), "--resume", "auto", *changed])))
    config = config_from_text(read_checkpoint(copy / "checkpoints" / LAST).config)
    assert (config.optimizer.learning_rate, config.model.dropout, config.data.num_workers) == (0.1, 0.3, 1)


def test_resumed_finished_run_trains_no_step_and_reports(corpus, copy):
    before = read_checkpoint(copy / "checkpoints" / LAST)
    done = checked(run_trainer(*base_flags(corpus, copy), "--resume", "auto"))
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == STEPS
    assert f"--max_steps {STEPS}, step {STEPS} is the last. Raise the limit to train longer." in done.stdout
    after = read_checkpoint(copy / "checkpoints" / LAST)
    assert after.states["progress"] == before.states["progress"]
    assert all(torch.equal(after.states["model"][name], w) for name, w in before.states["model"].items())
    assert len(read_log(copy)) == STEPS


def test_more_epochs_can_be_requested_on_resume(corpus, copy):
    more = ("--resume", "auto", "--max_steps", "None", "--epochs", "1")
    run = build_run(begin_run([*base_flags(corpus, copy), *more]))
    train(run)
    assert (run.state.step, run.state.epochs_finished) == (4, 1)
    run = build_run(begin_run([*base_flags(corpus, copy), *more, "--epochs", "2"]))
    train(run)
    assert (run.state.step, run.state.epochs_finished) == (8, 2)


def test_used_folder_without_resume_or_fresh_exits_with_2(corpus, copy):
    done = run_trainer(*base_flags(corpus, copy))
    assert done.returncode == 2, done.stderr
    assert "--resume auto" in done.stderr and "--fresh" in done.stderr
    assert read_checkpoint(copy / "checkpoints" / LAST).step == STEPS


def test_fresh_moves_old_checkpoints_and_keeps_them_readable(corpus, copy):
    done = checked(run_trainer(*base_flags(corpus, copy), "--fresh", "--max_steps", "1"))
    folder = copy / "checkpoints"
    assert f"The old checkpoints were moved to {folder / 'replaced_1'}" in done.stdout
    assert read_checkpoint(folder / "replaced_1" / LAST).step == STEPS
    assert read_checkpoint(folder / LAST).step == 1


def test_fresh_with_an_invalid_path_moves_nothing(corpus, copy):
    flags = [*base_flags(corpus, copy), "--fresh", "--train_manifest", str(copy / "mistyped.jsonl")]
    with pytest.raises(DataError, match="mistyped"):
        build_run(begin_run(flags))
    assert read_checkpoint(copy / "checkpoints" / LAST).step == STEPS


def test_resume_auto_in_an_empty_folder_starts_and_reports_it(corpus, tmp_path, capsys):
    start = begin_run([*base_flags(corpus, tmp_path), "--resume", "auto"])
    assert start.resumed is None
    assert "No checkpoint in" in capsys.readouterr().out


def test_resume_auto_skips_a_damaged_last_checkpoint(corpus, copy, capsys):
    folder = copy / "checkpoints"
    shutil.copy(folder / LAST, folder / "checkpoint_previous.pt")
    (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-100])
    start = begin_run([*base_flags(corpus, copy), "--resume", "auto"])
    assert start.resumed.step == STEPS
    output = capsys.readouterr().out
    assert f"{LAST}.damaged" in output and "Resuming from" in output and "checkpoint_previous.pt" in output


def test_changed_training_data_restarts_the_epoch_and_reports_it(corpus, copy, capsys):
    flags = [*base_flags(corpus, copy), "--resume", "auto", "--train_subset", "50"]
    assert build_run(begin_run(flags)).state.cursor.consumed == 0
    assert "epoch 1 is restarted" in capsys.readouterr().out


def test_checkpoint_saved_without_loss_scaling_resumes_with_it():
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    load_states(Checkpoint("", b"", 5, 0, 0, {"scaler": {}}), {"scaler": scaler})
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 2.0**16
    other = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)
    other.scale(torch.ones(()))
    load_states(Checkpoint("", b"", 5, 0, 0, {"scaler": other.state_dict()}), {"scaler": scaler})
    assert scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("part", ["model", "optimizer", "progress"])
def test_checkpoint_with_a_missing_state_is_rejected(part, corpus, copy):
    path = copy / "checkpoints" / LAST
    checkpoint = read_checkpoint(path)
    states = {name: state for name, state in checkpoint.states.items() if name != part}
    write_checkpoint(path, dataclasses.replace(checkpoint, states=states))
    with pytest.raises(CheckpointError, match=part):
        build_run(begin_run([*base_flags(corpus, copy), "--resume", "auto"]))
