"""A dry run prints the messages of the run, executes its code path, and leaves every byte of the disk unchanged."""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints import averaging as compare
from konkanivani.checkpoints.averaging import check_equal, differences, relative_difference
from konkanivani.checkpoints.checkpoint import Checkpoint
from konkanivani.checkpoints.checkpointer import LAST, PREVIOUS
from konkanivani.checkpoints.run_lock import RunLock
from konkanivani.errors import (
    CheckpointError,
    DataError,
    Interrupted,
    KonkaniVaniError,
    ResourceError,
    UsageError,
    stopping_signals,
)
from konkanivani.files import scratch_folder
from konkanivani.flags import parse_args
from konkanivani.recipe import dry_run as dry
from konkanivani.recipe.build import build_run
from konkanivani.recipe.dry_run import dry_run
from konkanivani.training.loop import train
from tests.conftest import ROOT, TRAINER, Corpus, checked, read_log, run_folders, run_trainer, write_corpus
from tests.faults.process_start import flush_each_line
from tests.faults.small_run import SMALL_MODEL
from tests.fork_server import Job, fork_server
from tests.run_setup import begin_run
from tests.timeouts import PROCESS_TIMEOUT

QUICK = ("--num_workers", "0", "--batch_size", "2", "--gradient_accumulation_steps", "2")
STAGES = ["flags", "paths", "disk", "data", "plan", "model", "rehearsal", "two steps", "validation", "saved", "resumed"]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 10, "valid": 2, "test": 2})


@pytest.fixture
def copy(small_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_run, tmp_path / "copy")


def flags(corpus: Corpus, directory: Path, *more: str) -> list[str]:
    tested = "--test_manifest", corpus.manifest("test")
    return [*SMALL_MODEL, *QUICK, *corpus.flags(), *tested, *run_folders(directory), *more]


def files_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file and folder with its inode and its bytes."""
    values = {}
    for path in sorted(directory.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        values[str(path.relative_to(directory))] = path.stat().st_ino, content
    return values


def stages_of(output: str) -> list[str]:
    return re.findall(r"^(\w[\w ]*): .* \(\d+\.\d s\)$", output, re.MULTILINE)


def test_dry_run_reports_every_stage_and_leaves_no_files(small_corpus, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.txt").write_text("mine")
    before = files_of(tmp_path)
    given = flags(small_corpus, tmp_path / "here" / "deep" / "er", "--dry_run", "--num_workers", "2", "--epochs", "20")
    done = checked(run_trainer(*given, cwd=tmp_path))
    assert stages_of(done.stdout) == [*STAGES, "removed"]
    assert "10 training utterances" in done.stdout and "3 steps of 4 utterances per epoch" in done.stdout
    assert "the remaining 60 steps" in done.stdout and "bit for bit" in done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["dry_run"] is True and summary["steps"] == 60 and summary["resumed_difference"] == 0
    assert summary["tensors_compared"] > 100 and summary["seconds_in_all"] > 0
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "more",
    [
        ("--batch_size", "auto", "--memory_budget", "480MiB", "--gradient_checkpointing", "auto", "--epochs", "20"),
        ("--mixed_precision", "--fresh", "--max_steps", "1", "--epochs", "1", "--early_stop_epochs", "1"),
    ],
    ids=["planned", "half precision"],
)
def test_dry_run_supports_planned_and_half_precision_runs(more, small_corpus, tmp_path):
    given = flags(small_corpus, tmp_path, "--dry_run", *more)
    if "auto" in more:
        at = given.index("--gradient_accumulation_steps")
        del given[at : at + 2]
    output = checked(run_trainer(*given)).stdout
    summary = json.loads(output.splitlines()[-1])
    assert summary["resumed_difference"] == 0 and summary["steps"] == (1 if "--max_steps" in more else 40)
    assert stages_of(output)[-2:] == ["resumed", "removed"]
    assert ("planned peak" in output) == ("auto" in more)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("batch", ["5", "10"])  # an epoch ends with every second global batch, or with every one
def test_periodic_saves_do_not_change_a_dry_run(batch, small_corpus, tmp_path):
    given = [*SMALL_MODEL, *small_corpus.flags(), *run_folders(tmp_path), "--num_workers", "0", "--batch_size", batch]
    given += ["--gradient_accumulation_steps", "1", "--save_steps", "1", "--epochs", "1", "--dry_run"]
    summary = json.loads(checked(run_trainer(*given)).stdout.splitlines()[-1])
    assert summary["resumed_difference"] == 0 and summary["steps"] == 10 // int(batch)
    assert os.listdir(tmp_path) == []


def test_dry_resume_continues_the_checkpoint_without_changing_its_run(copy, capsys):
    before = files_of(copy)
    for resumed in (["--resume", "auto", *run_folders(copy)], ["--resume", str(copy / "checkpoints" / LAST)]):
        given = [*resumed, *run_folders(copy), "--epochs", "4", "--dry_run"]
        assert json.loads(dry_run(parse_args(given)))["steps"] == 6
        output = capsys.readouterr().out
        assert "built, at step 6" in output and "step 9 after resuming is identical bit for bit" in output
        assert files_of(copy) == before


def test_dry_resume_skips_damaged_checkpoints_without_renaming_them(copy, capsys):
    folder = copy / "checkpoints"
    for path in {*folder.glob("checkpoint_*")} - {folder / LAST}:
        path.unlink()
    shutil.copy(folder / LAST, folder / PREVIOUS)
    (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-100])
    before = files_of(copy)
    given = ["--resume", "auto", *run_folders(copy), "--epochs", "4", "--dry_run"]
    assert json.loads(dry_run(parse_args(given)))["steps"] == 6
    output = capsys.readouterr().out
    assert f"{LAST} is damaged" in output and "Trying the previous one." in output and "Renamed" not in output
    assert files_of(copy) == before
    (folder / PREVIOUS).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="None of the 1 checkpoints .* is valid. Restore a backup"):
            dry_run(parse_args(given))
    assert (folder / LAST).exists()


REJECTED = [
    (("--learning_rate", "nan"), UsageError, "finite"),
    (("--valid_manifest", "none.jsonl"), DataError, "none.jsonl"),
    (("--min_duration", "19"), DataError, "None of the 10"),
    (("--memory_budget", "2MiB"), ResourceError, "MiB, and a CPU needs another"),
    (("--resume", "none.pt"), CheckpointError, "none.pt"),
]


@pytest.mark.parametrize("more, kind, message", REJECTED, ids=[more[0] for more, _, _ in REJECTED])
def test_dry_run_raises_the_error_of_the_run_and_leaves_no_files(more, kind, message, small_corpus, tmp_path):
    given = flags(small_corpus, tmp_path, *more)
    with pytest.raises(kind, match=message) as refused:
        dry_run(parse_args([*given, "--dry_run"]))
    assert os.listdir(tmp_path) == []
    with pytest.raises(KonkaniVaniError) as real:
        build_run(begin_run(given))
    assert str(refused.value) == str(real.value)


def test_dry_run_rejects_a_used_folder(small_corpus, copy):
    before = files_of(copy)
    with pytest.raises(UsageError, match="contains checkpoints of a run"):
        dry_run(parse_args(flags(small_corpus, copy, "--dry_run")))
    assert files_of(copy) == before


def test_dry_run_rejects_a_folder_locked_by_another_process(small_corpus, tmp_path):
    child = os.fork()
    if child == 0:
        lock = RunLock(tmp_path / "checkpoints")
        (tmp_path / "held").touch()
        time.sleep(2 * PROCESS_TIMEOUT)
        del lock  # held until here
        os._exit(0)
    try:
        deadline = time.monotonic() + PROCESS_TIMEOUT
        while not (tmp_path / "held").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = files_of(tmp_path)
        with pytest.raises(ResourceError, match=f"Process {child} is already training"):
            dry_run(parse_args(flags(small_corpus, tmp_path, "--dry_run")))
        assert files_of(tmp_path) == before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Stopping a dry run


@pytest.mark.parametrize(
    "number, stage", [(signal.SIGINT, "data"), (signal.SIGTERM, "rehearsal"), (signal.SIGINT, "saved")]
)
def test_signal_at_any_stage_exits_with_its_code_and_removes_all_files(
    number, stage, small_corpus, tmp_path, monkeypatch
):
    report_stage = dry.StageClock.done

    def interrupted(clock: dry.StageClock, name: str, sentence: str) -> None:
        report_stage(clock, name, sentence)
        if name == stage:
            assert os.listdir(tmp_path)
            os.kill(os.getpid(), number)
            time.sleep(30)  # interrupted by the handler

    monkeypatch.setattr(dry.StageClock, "done", interrupted)
    handlers = [signal.getsignal(each) for each in stopping_signals()]
    with pytest.raises(Interrupted) as stopped:
        dry_run(parse_args(flags(small_corpus, tmp_path, "--dry_run")))
    assert stopped.value.exit_code == 128 + number and "removed" in str(stopped.value)
    assert os.listdir(tmp_path) == []
    assert [signal.getsignal(each) for each in stopping_signals()] == handlers


def test_ctrl_c_exits_with_130_and_ends_the_workers(small_corpus, tmp_path, tmp_path_factory):
    given = flags(small_corpus, tmp_path, "--dry_run", "--num_workers", "2", "--batch_size", "1", "--d_model", "256")
    output_file = tmp_path_factory.mktemp("output") / "output.txt"
    output_file.touch()
    child = fork_server().start(Job(ROOT / TRAINER, given, output_file, threads=1, before=flush_each_line))
    while child.poll() is None and b"model: " not in output_file.read_bytes():
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    assert child.wait(PROCESS_TIMEOUT) == 130, output_file.read_text(encoding="utf-8")
    output = output_file.read_text(encoding="utf-8")
    assert "Traceback" not in output and "its files are removed" in output
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


# Comparison of states


def make_checkpoint(**changed: object) -> Checkpoint:
    weights = {"a": torch.arange(6.0), "b": torch.tensor(0.0), "c": torch.tensor([float("nan")])} | changed
    return Checkpoint("", b"", 5, 1, 7, {"model": weights, "progress": {"step": 1, "best_score": float("inf")}})


def test_checkpoints_are_compared_bit_for_bit():
    assert differences(make_checkpoint(), make_checkpoint()) == []
    check_equal(make_checkpoint(), make_checkpoint(), "Equal")
    flipped = torch.arange(6.0)
    flipped.view(torch.int32)[3] ^= 1
    for changed in ({"a": flipped}, {"b": torch.tensor(-0.0)}, {"a": torch.arange(6.0).double()}, {"d": torch.ones(1)}):
        (name,) = changed
        assert differences(make_checkpoint(), make_checkpoint(**changed)) == [f"model/{name}"]
        with pytest.raises(CheckpointError, match=f"1 value differs, first model/{name}"):
            check_equal(make_checkpoint(), make_checkpoint(**changed), "Unequal")
    other = dataclasses.replace(
        make_checkpoint(), states=make_checkpoint().states | {"progress": {"step": 2, "best_score": float("inf")}}
    )
    assert differences(make_checkpoint(), other) == ["progress/step"]
    apart = relative_difference(make_checkpoint(c=torch.ones(1)), make_checkpoint(a=flipped, c=torch.ones(1)))
    assert 0 < apart < 1e-6


def test_negative_control_an_incomplete_resume_is_detected(small_corpus, tmp_path, monkeypatch):
    """Without the optimizer's moments the weights are equal, but not the next step."""
    from konkanivani.training.optimizer_state import OptimizerState

    monkeypatch.setattr(OptimizerState, "load_state_dict", lambda self, make_checkpoint: None)
    with pytest.raises(CheckpointError, match="The resumed state differs from the state saved: .*optimizer/"):
        dry_run(parse_args(flags(small_corpus, tmp_path, "--dry_run")))
    monkeypatch.setattr(compare, "differences", lambda one, other: [])
    summary = json.loads(dry_run(parse_args(flags(small_corpus, tmp_path, "--dry_run"))))
    assert summary["resumed_difference"] > 0
    assert os.listdir(tmp_path) == []


def test_negative_control_a_save_with_a_flipped_bit_is_detected(small_corpus, tmp_path, monkeypatch):
    read = dry.read_checkpoint

    def read_with_flipped_bit(path: Path) -> Checkpoint:
        checkpoint = read(path)
        tensor = next(iter(checkpoint.states["model"].values()))
        tensor.view(-1).view(torch.int32)[0] ^= 1
        return checkpoint

    monkeypatch.setattr(dry, "read_checkpoint", read_with_flipped_bit)
    with pytest.raises(CheckpointError, match="The checkpoint read back differs from the state saved: 1 value"):
        dry_run(parse_args(flags(small_corpus, tmp_path, "--dry_run")))
    assert os.listdir(tmp_path) == []


def test_scratch_folder_removes_only_the_folders_that_it_created(tmp_path):
    with scratch_folder(tmp_path / "a" / "b") as scratch:
        (scratch / "file").touch()
        assert scratch.parent == tmp_path / "a" / "b"
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(ZeroDivisionError), scratch_folder(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    with scratch_folder(tmp_path / "c"):
        (tmp_path / "c" / "of_another").touch()
    assert sorted(os.listdir(tmp_path)) == ["a", "c"] and os.listdir(tmp_path / "c") == ["of_another"]


def test_run_after_a_dry_run_equals_a_run_without_it_bit_for_bit(small_corpus, tmp_path):
    logs = []
    for name in ("with", "without"):
        given = flags(small_corpus, tmp_path / name, "--max_steps", "3")
        if name == "with":
            dry_run(parse_args([*given, "--dry_run"]))
        train(build_run(begin_run(given)))
        logs.append([(record["step"], record["loss"]) for record in read_log(tmp_path / name)])
    assert logs[0] == logs[1] and len(logs[0]) == 3
