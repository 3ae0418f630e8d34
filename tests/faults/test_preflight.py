"""The start checks flags, paths, disk, data and plan in this order, and reports all errors of one stage at once."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.checkpoints.run_lock import RunLock
from konkanivani.config import PRESETS, ModelConfig, RunConfig, TrainConfig
from konkanivani.errors import (
    MAX_REPORTED,
    CheckpointError,
    DataError,
    ErrorCollector,
    KonkaniVaniError,
    ResourceError,
    UsageError,
)
from konkanivani.flags import config_to_text
from konkanivani.models.architecture import architecture_of
from konkanivani.planning.sizes import checkpoint_bytes
from konkanivani.recipe import preflight, run_data
from konkanivani.recipe import run_data as run_tokenizer
from konkanivani.recipe.build import build_run
from konkanivani.recipe.preflight import check_disk, max_checkpoints
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.loop import train
from konkanivani.training.optimizer_state import OptimizerState
from tests.conftest import TINY_MODEL, Corpus, run_folders, run_trainer, write_corpus
from tests.run_setup import begin_run

QUICK = ("--num_workers", "0", "--batch_size", "4", "--gradient_accumulation_steps", "1")


def start_error(kind: type[KonkaniVaniError], *flags: str) -> str:
    with pytest.raises(kind) as caught:
        build_run(begin_run([*TINY_MODEL, *QUICK, *flags]))
    assert caught.value.exit_code == kind.exit_code
    return str(caught.value)


# Flags


def test_all_invalid_flags_are_reported_together():
    wrong = ("--epochs", "0", "--dropout", "2", "--max_rejected", "many", "--memory_budget", "4", "--noise_snr", "x")
    idle = ("--effective_batch_size", "7", "--rir_prob", "0.5")
    message = start_error(UsageError, *wrong, *idle)
    for flag in (*wrong[::2], *idle[::2]):
        assert flag in message, message
    assert len(message.splitlines()) == 6


def test_missing_device_is_reported_before_any_path(tmp_path):
    flags = ("--device", "cuda", "--train_manifest", "none.jsonl")
    assert "--device cpu" in start_error(UsageError, *flags, *run_folders(tmp_path))
    assert os.listdir(tmp_path) == []


# Paths


def test_each_unusable_path_is_reported_on_its_own_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    flags = (
        *("--train_manifest", str(tmp_path / "train.jsonl"), "--valid_manifest", str(tmp_path / "folder")),
        *("--test_manifest", str(tmp_path / "pipe"), "--noise_manifest", str(tmp_path / "file" / "noise.jsonl")),
        *("--rir_manifest", str(tmp_path / "rir.jsonl"), "--init_from", str(tmp_path / "nothing.pt")),
        *("--checkpoint_dir", str(tmp_path / "file"), "--log_dir", str(tmp_path / "file" / "runs")),
    )
    lines = start_error(CheckpointError, *flags).splitlines()
    messages = [
        ("nothing.pt", "Give the path of a checkpoint"),
        ("--train_manifest", "No such file", "Give the path of a JSONL manifest"),
        ("--valid_manifest", "Is a directory", "Give"),
        ("--test_manifest", "it is not a file", "Give"),
        ("--rir_manifest", "No such file", "Give"),
        ("--noise_manifest", "Not a directory", "Give"),
        ("checkpoint folder", "is a file", "Choose another --checkpoint_dir"),
        ("log folder", "is a file", "Choose another --log_dir"),
    ]
    assert len(lines) == len(messages)
    assert all(part in line for line, parts in zip(lines, messages, strict=True) for part in parts), lines
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]  # the rejected start created no files


def test_start_rejected_for_its_paths_creates_no_folder(corpus, tmp_path):
    message = start_error(UsageError, *run_folders(tmp_path), "--valid_manifest", str(tmp_path / "none.jsonl"))
    assert [line.split()[0] for line in message.splitlines()] == ["--train_manifest", "--valid_manifest"]
    assert os.listdir(tmp_path) == []


def test_resume_checks_given_paths_first_and_then_those_of_the_checkpoint(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 6, "valid": 2})
    train(build_run(begin_run([*TINY_MODEL, *QUICK, *corpus.flags(), *run_folders(tmp_path), "--max_steps", "1"])))
    last = str(tmp_path / "checkpoints" / "checkpoint_last.pt")
    lines = start_error(CheckpointError, "--resume", last + "x", "--test_manifest", "none.jsonl").splitlines()
    assert len(lines) == 2 and last + "x" in lines[0] and "--test_manifest none.jsonl" in lines[1]
    shutil.rmtree(tmp_path / "corpus")
    for resumed in (("--resume", last), ("--resume", "auto", *run_folders(tmp_path))):
        with pytest.raises(DataError) as caught:
            begin_run([*resumed])
        assert [line.split()[0] for line in str(caught.value).splitlines()] == ["--train_manifest", "--valid_manifest"]


def test_unwritable_folders_are_reported_with_their_flags(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    lines = start_error(ResourceError, *corpus.flags(), *run_folders(tmp_path)).splitlines()
    assert [line.split(". ")[-1] for line in lines] == ["Choose another --checkpoint_dir.", "Choose another --log_dir."]
    assert all(f"{tmp_path} is not writable" in line for line in lines)


def test_unwritable_relative_folder_is_reported_with_its_full_path(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    lines = start_error(ResourceError, *corpus.flags()).splitlines()
    assert len(lines) == 2 and all(f"{tmp_path} is not writable." in line for line in lines)


def test_unwritable_lock_file_is_reported(tmp_path):
    (tmp_path / ".lock").mkdir()  # even root cannot write to it
    with pytest.raises(ResourceError, match=r"\.lock\)\. Choose another --checkpoint_dir, or get write permission"):
        RunLock(tmp_path)


def test_error_collector_reports_a_limited_number_and_counts_the_rest():
    problems = ErrorCollector()
    problems.raise_all()
    for number in range(MAX_REPORTED + 5):
        with problems.collect():
            raise DataError(f"Row {number} is wrong. Mend it.")
    with pytest.raises(DataError) as caught:
        problems.raise_all()
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_REPORTED + 1 and lines[-1] == "and 5 more errors of this kind."
    with pytest.raises(ZeroDivisionError), problems.collect():  # other exceptions are not collected
        raise ZeroDivisionError


# Disk


def saved_size(shape: ModelConfig, directory: Path) -> int:
    config = dataclasses.replace(TrainConfig(), model=shape)
    parts = build_step_parts(config, architecture_of(config, 1000), CPU, 1)
    states = {"model": parts.model.state_dict(), "optimizer": OptimizerState(parts.model, parts.optimizer).state_dict()}
    saved = Checkpoint(config_to_text(config), bytes(30_000), 1000, 1, 7, states)
    return Checkpointer(directory, keep=2).save(saved).stat().st_size


CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [ModelConfig(32, 2, 1, 2), ModelConfig(64, 3, 2, 2, encoder_type="transformer")])
def test_estimated_checkpoint_size_is_a_close_upper_bound(shape, tmp_path):
    size = saved_size(shape, tmp_path)
    assert size <= checkpoint_bytes(architecture_of(TrainConfig(model=shape), 1000)) < size + 1.5 * 2**20


def test_estimated_size_of_the_minimal_preset_is_within_3_percent(tmp_path):
    size = saved_size(PRESETS["minimal"], tmp_path)
    assert size <= checkpoint_bytes(architecture_of(TrainConfig(model=PRESETS["minimal"]), 1000)) < 1.03 * size


def test_disk_check_counts_all_checkpoints_that_are_kept_at_once(tmp_path, monkeypatch):
    folders = {"checkpoint_dir": str(tmp_path / "checkpoints"), "log_dir": str(tmp_path / "runs")}
    run = RunConfig(**folders, keep_checkpoints=5, epochs=20)
    config = TrainConfig(run=run, model=PRESETS["minimal"])
    assert max_checkpoints(run) == 5 + 4 and max_checkpoints(RunConfig(epochs=1)) == 1 + 4
    (space,) = check_disk(config, architecture_of(config, 1000))
    assert space.needed == 9 * checkpoint_bytes(architecture_of(config, 1000)) + 20 * 2**20
    undecided = dataclasses.replace(config, run=dataclasses.replace(run, epochs="auto"))
    (undecided_space,) = check_disk(undecided, architecture_of(config, 1000))
    assert undecided_space.needed == space.needed + 40 * 2**20  # the upper bound is required
    monkeypatch.setattr(preflight, "free_disk", lambda folder: space.needed)
    check_disk(config, architecture_of(config, 1000))
    monkeypatch.setattr(preflight, "free_disk", lambda folder: space.needed - 1)
    with pytest.raises(ResourceError) as caught:
        check_disk(config, architecture_of(config, 1000))
    message = str(caught.value)
    assert f"({space.needed} and {space.needed - 1} bytes)" in message and "--keep_checkpoints" in message


def test_disk_space_is_checked_for_each_file_system(tmp_path, monkeypatch):
    run = RunConfig(checkpoint_dir=str(tmp_path / "checkpoints"), log_dir=str(tmp_path / "runs"), epochs=20)
    config = TrainConfig(run=run, model=PRESETS["minimal"])
    (together,) = check_disk(config, architecture_of(config, 1000))
    monkeypatch.setattr(preflight, "nearest_folder", lambda path: Path("/proc" if path.name == "runs" else tmp_path))
    monkeypatch.setattr(preflight, "free_disk", lambda folder: 0 if folder.name == "runs" else 2**40)
    with pytest.raises(ResourceError, match=r"needs 20 MiB for \S+runs, has 0 MiB \(20971520 and 0 bytes\)"):
        check_disk(config, architecture_of(config, 1000))
    monkeypatch.setattr(preflight, "free_disk", lambda folder: 2**40)
    apart = check_disk(config, architecture_of(config, 1000))
    assert [space.needed for space in apart] == [together.needed - 20 * 2**20, 20 * 2**20]
    same = dataclasses.replace(config, run=dataclasses.replace(run, log_dir=run.checkpoint_dir))
    assert check_disk(same, architecture_of(same, 1000))[0].needed == together.needed


def test_dry_resume_needs_disk_space_only_for_its_own_files(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run = RunConfig(checkpoint_dir=str(folder), log_dir=str(tmp_path / "runs"), resume="auto", epochs=20)
    config = TrainConfig(run=run, model=PRESETS["minimal"])
    with open(folder / "checkpoint_last.pt", "wb") as file:
        file.truncate(2**40)
    assert check_disk(config, architecture_of(config, 1000))[0].needed == 20 * 2**20
    dry = dataclasses.replace(config, run=dataclasses.replace(run, dry_run=True))
    architecture = architecture_of(config, 1000)
    assert check_disk(dry, architecture)[0].needed == 6 * checkpoint_bytes(architecture) + 20 * 2**20


def test_resumed_run_needs_no_disk_space_for_files_it_will_replace(tmp_path):
    folder = tmp_path / "checkpoints"
    run = RunConfig(checkpoint_dir=str(folder), log_dir=str(tmp_path / "runs"), resume="auto")
    config = TrainConfig(run=run, model=PRESETS["minimal"])
    (before,) = check_disk(config, architecture_of(config, 1000))
    folder.mkdir()
    (folder / "checkpoint_last.pt").write_bytes(bytes(5000))
    os.link(folder / "checkpoint_last.pt", folder / "checkpoint_epoch_1.pt")  # one file, two names
    (folder / "checkpoint_previous.pt").write_bytes(bytes(300))
    (after,) = check_disk(config, architecture_of(config, 1000))
    assert before.needed - after.needed == 5300
    os.utime(folder / "checkpoint_previous.pt", ns=(0, 0))
    older = dataclasses.replace(run, resume=str(folder / "checkpoint_previous.pt"))
    (back,) = check_disk(dataclasses.replace(config, run=older), architecture_of(config, 1000))
    assert before.needed - back.needed == 300  # newer checkpoints are kept in a separate folder


def test_full_disk_is_reported_before_any_data_is_read(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "free_disk", lambda folder: 1000)
    monkeypatch.setattr(run_data, "read_manifest", _fail_if_called)
    assert "Not enough disk space" in start_error(ResourceError, *corpus.flags(), *run_folders(tmp_path))
    assert os.listdir(tmp_path) == []


def _fail_if_called(*_: object) -> None:
    raise AssertionError("this comes too early")


# Data


def corrupt_rows(corpus: Corpus, split: str, **fields: object) -> str:
    path = Path(corpus.manifest(split))
    rows = [json.loads(line) | fields for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def test_errors_of_all_manifests_are_reported_before_tokenizer_training(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus", {"train": 6, "valid": 2, "test": 2})
    monkeypatch.setattr(run_tokenizer, "train_tokenizer", _fail_if_called)
    train_rows = corrupt_rows(corpus, "train", audio_filepath="nowhere.flac")
    valid = corrupt_rows(corpus, "valid", duration=-1)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "noise.jsonl").write_text(
        '{"audio_filepath": "a.wav", "duration": 1}\n{"audio_filepath": "b.wav", "duration": 1}\n'
    )
    flags = (
        *(*corpus.flags(), "--test_manifest", str(tmp_path / "empty.jsonl"), *run_folders(tmp_path)),
        *("--noise_manifest", str(tmp_path / "noise.jsonl"), "--rir_manifest", str(tmp_path / "empty.jsonl")),
    )
    message = start_error(DataError, *flags)
    assert f"6 of the 6 rows of {train_rows} are broken" in message and "nowhere.flac" in message
    assert f"2 of the 2 rows of {valid} are broken" in message and "duration must be" in message
    assert message.count(f"The manifest {tmp_path / 'empty.jsonl'} is empty") == 2
    assert "noise.jsonl, row 1:" in message and "noise.jsonl, row 2:" in message


def test_manifests_without_usable_utterances_are_reported_together(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 6, "valid": 2, "test": 2})
    corrupt_rows(corpus, "valid", duration=31.0)
    corrupt_rows(corpus, "test", duration=32.0)
    flags = (*corpus.flags(), "--test_manifest", corpus.manifest("test"), *run_folders(tmp_path))
    lines = start_error(DataError, *flags).splitlines()
    assert len(lines) == 2 and "valid.jsonl" in lines[0] and "test.jsonl" in lines[1]
    assert all("--max_validation_duration" in line for line in lines)


def test_negative_control_intact_manifests_start_a_run(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 6, "valid": 2, "test": 2})
    messages = []
    flags = [*TINY_MODEL, *QUICK, *corpus.flags(), "--test_manifest", corpus.manifest("test"), *run_folders(tmp_path)]
    run = build_run(begin_run(flags, lambda *stage: messages.append(stage)), lambda *stage: messages.append(stage))
    assert [stage for stage, _ in messages] == ["flags", "paths", "disk", "data", "plan"]
    assert "6 training utterances" in messages[3][1] and "2 for validation; 2 for testing; 0 skipped" in messages[3][1]
    assert len(run.data.validation.speech.utterances) == 2


# Order


def test_each_stage_fails_before_the_next_one_starts(corpus, tmp_path, monkeypatch):
    """One stage is broken at a time, with all later ones set to fail: the reported error is its own."""
    wrong = [
        ("flags", ("--epochs", "0"), UsageError),
        ("paths", ("--valid_manifest", "none.jsonl"), DataError),
        ("disk", (), ResourceError),
        ("data", ("--min_duration", "19"), DataError),
        ("plan", ("--memory_budget", "2MiB"), ResourceError),
    ]
    behind = {
        "flags": ("konkanivani.recipe.startup.check_paths",),
        "paths": ("konkanivani.recipe.startup.check_disk", "konkanivani.recipe.startup.RunLock"),
        "disk": ("konkanivani.recipe.startup.RunLock", "konkanivani.recipe.build.build_speech"),
        "data": ("konkanivani.recipe.planned_step.plan_memory", "konkanivani.recipe.planned_step.build_step_parts"),
        "plan": ("konkanivani.recipe.planned_step.build_step_parts",),
    }
    for stage, flags, kind in wrong:
        with monkeypatch.context() as patch:
            for name in behind[stage]:
                patch.setattr(name, _fail_if_called)
            if stage == "disk":
                patch.setattr(preflight, "free_disk", lambda folder: 0)
            started = time.process_time()
            start_error(kind, *corpus.flags(), *run_folders(tmp_path / stage), *flags)
            assert time.process_time() - started < 60  # within the first minute


def test_test_manifest_of_a_resumed_run_is_checked_before_training(corpus, tmp_path):
    flags = (*TINY_MODEL, *QUICK, *corpus.flags(), *run_folders(tmp_path))
    train(build_run(begin_run([*flags, "--max_steps", "1"])))
    message = start_error(DataError, *flags, "--resume", "auto", "--test_manifest", str(tmp_path / "gone.jsonl"))
    assert "--test_manifest" in message
    assert read_checkpoint(tmp_path / "checkpoints" / "checkpoint_last.pt").step == 1
    assert "rejected_before.jsonl" not in os.listdir(tmp_path / "runs" / "default")


def test_rejected_start_leaves_only_the_list_of_rejected_rows(corpus, tmp_path):
    flags = (*TINY_MODEL, *QUICK, *corpus.flags(), *run_folders(tmp_path / "new" / "one"), "--max_steps", "1")
    too_small = (*flags, "--memory_budget", "1MiB")
    for beginning in ((), ("--resume", "auto"), ("--run_name", "other")):
        assert run_trainer(*too_small, *beginning).returncode == 6
        assert os.listdir(tmp_path) == []
    cut = tmp_path / "cut.jsonl"
    cut.write_text("{}\n" + Path(corpus.manifest("train")).read_text(encoding="utf-8"), encoding="utf-8")
    flags += ("--train_manifest", str(cut))
    refused, listed = run_trainer(*flags), tmp_path / "new" / "one" / "runs" / "default" / "rejected.jsonl"
    assert refused.returncode == 3 and f"(listed in {listed})" in refused.stderr
    assert len(listed.read_text(encoding="utf-8").splitlines()) == 27  # the audio is in another folder
    assert run_trainer(*too_small, "--fresh").returncode == 6 and listed.stat().st_size  # an earlier list is kept
