"""Invariant 1: k steps, kill -9 and N - k resumed steps equal N steps, bit for bit, with any number of workers."""

import re
import signal
from pathlib import Path

import pytest

from tests.conftest import (
    TINY_MODEL,
    TRAINER,
    Corpus,
    checked,
    mark_full,
    read_log,
    run_folders,
    run_trainer,
    start_script,
    write_augmentation,
    write_corpus,
    write_shards,
)
from tests.faults.resumed_runs import checkpoint_differences, last_checkpoint, signal_after

STEPS = 10  # 4 global batches per epoch, the last one of 2 utterances: 10 steps are 2.5 epochs
LOGGED = ("step", "epoch", "loss", "ctc_loss", "attention_loss", "learning_rate", "gradient_norm", "padding_share")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 14, "valid": 2, "test": 1})


def flags(corpus: Corpus, directory: Path, workers: int, *more: str) -> tuple[str, ...]:
    cut = ("--batch_size", "2", "--gradient_accumulation_steps", "2", "--epochs", "3", "--max_steps", str(STEPS))
    saved = ("--save_steps", "2", "--num_workers", str(workers))
    return (*TINY_MODEL, *corpus.flags(), *run_folders(directory), *cut, *saved, *more)


def losses(directory: Path) -> list[tuple]:
    return [tuple(record[name] for name in LOGGED) for record in read_log(directory)]


@pytest.fixture(scope="module")
def uninterrupted(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    checked(run_trainer(*flags(corpus, directory, 2)))
    return directory


def test_killed_run_resumes_bitwise_with_another_worker_count(corpus, uninterrupted, tmp_path):
    # Kill in the second epoch and change the worker count, so that both data paths are resumed. The resumed run is a
    # new interpreter with other string hashes; all other runs are forks of one process.
    killed = start_script(TRAINER, *flags(corpus, tmp_path, 2), output=tmp_path / "output.txt")
    assert signal_after(tmp_path, 5, killed, signal.SIGKILL) == -signal.SIGKILL
    resumed = checked(run_trainer(*flags(corpus, tmp_path, 0, "--resume", "auto"), is_cold=True))
    resumed_step = int(re.search(r"Resuming from .*: step (\d+)\.", resumed.stdout).group(1))
    assert 0 < resumed_step < STEPS
    steps = [record["step"] for record in read_log(tmp_path)]
    assert steps == list(range(1, STEPS + 1))
    assert f'"steps": {STEPS}' in resumed.stdout.splitlines()[-1]
    assert losses(tmp_path) == losses(uninterrupted)
    assert checkpoint_differences(last_checkpoint(tmp_path), last_checkpoint(uninterrupted)) == []


@pytest.mark.parametrize("kind", ["adamw8bit", "adafactor"])
def test_killed_run_with_small_state_optimizer_resumes_bitwise(kind, corpus, uninterrupted, tmp_path):
    """Compare an uninterrupted run of six steps with one that is killed and resumed."""
    changed = ("--optimizer", kind, "--max_steps", "6")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    checked(run_trainer(*flags(corpus, whole, 0, *changed)))
    run = start_script(TRAINER, *flags(corpus, killed, 0, *changed), output=tmp_path / "output.txt")
    assert signal_after(killed, 4, run, signal.SIGKILL) == -signal.SIGKILL
    checked(run_trainer(*flags(corpus, killed, 1, "--resume", "auto"), "--max_steps", "6"))
    assert losses(killed) == losses(whole)
    assert checkpoint_differences(last_checkpoint(killed), last_checkpoint(whole)) == []
    assert losses(whole)[1:] != losses(uninterrupted)[1:6]  # negative control: the runs differ


@pytest.fixture(scope="module")
def augmented_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, tuple[str, ...], Path]:
    """Return the corpus in shards, the augmentation flags, and the folder of a run with both, without workers."""
    directory = tmp_path_factory.mktemp("surrounded")
    shards = write_shards(corpus, directory / "shards")
    more = write_augmentation(directory / "sounds")
    checked(run_trainer(*flags(shards, directory, 0, *more)))
    return shards, more, directory


@pytest.mark.parametrize("killed, resumed", [(1, 4), *mark_full((4, 2))])
def test_augmented_run_from_shards_resumes_bitwise(augmented_run, killed, resumed, tmp_path):
    shards, more, uninterrupted = augmented_run
    run = start_script(TRAINER, *flags(shards, tmp_path, killed, *more), output=tmp_path / "output.txt")
    assert signal_after(tmp_path, 5, run, signal.SIGKILL) == -signal.SIGKILL
    checked(run_trainer(*flags(shards, tmp_path, resumed, "--resume", "auto")))
    assert [record["step"] for record in read_log(tmp_path)] == list(range(1, STEPS + 1))
    assert losses(tmp_path) == losses(uninterrupted)
    assert checkpoint_differences(last_checkpoint(tmp_path), last_checkpoint(uninterrupted)) == []


def test_negative_control_without_augmentation_losses_differ(augmented_run, tmp_path):
    shards, _, uninterrupted = augmented_run
    checked(run_trainer(*flags(shards, tmp_path, 0, "--max_steps", "3")))
    assert losses(tmp_path) != losses(uninterrupted)[:3]


def test_resume_with_other_batch_size_keeps_cursor_and_step_count(corpus, uninterrupted, tmp_path):
    checked(run_trainer(*flags(corpus, tmp_path, 0, "--max_steps", "5")))
    cut = ("--resume", "auto", "--batch_size", "1", "--gradient_accumulation_steps", "4")
    checked(run_trainer(*flags(corpus, tmp_path, 1), *cut))
    assert [r["step"] for r in read_log(tmp_path)] == list(range(1, STEPS + 1))
    assert last_checkpoint(tmp_path).states["progress"]["window"] == 2
    assert [r["tokens"] for r in read_log(tmp_path)] == [r["tokens"] for r in read_log(uninterrupted)]


def test_sigterm_saves_exits_143_and_resumes_exactly(corpus, uninterrupted, tmp_path):
    output = tmp_path / "output.txt"
    code = signal_after(tmp_path, 3, start_script(TRAINER, *flags(corpus, tmp_path, 1), output=output), signal.SIGTERM)
    assert code == 143, output.read_text(encoding="utf-8")
    assert "Traceback" not in output.read_text(encoding="utf-8")
    assert run_trainer(*flags(corpus, tmp_path, 0, "--resume", "auto")).returncode == 0
    assert losses(tmp_path) == losses(uninterrupted)
    assert checkpoint_differences(last_checkpoint(tmp_path), last_checkpoint(uninterrupted)) == []


def test_negative_control_another_seed_changes_the_run(corpus, uninterrupted, tmp_path):
    checked(run_trainer(*flags(corpus, tmp_path, 0, "--seed", "4321")))
    assert losses(tmp_path) != losses(uninterrupted)
    assert checkpoint_differences(last_checkpoint(tmp_path), last_checkpoint(uninterrupted)) != []
