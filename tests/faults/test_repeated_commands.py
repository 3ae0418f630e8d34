"""Repeating a command, on another corpus, in a copied folder or from an older checkpoint, loses no saved data.

Checkpoints are identified by hash and logs by line: everything must remain under its name or in a folder that a message
names. Each negative control disables one protection of the trainer.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.flags import config_from_text
from tests.conftest import WORDS, Corpus, write_corpus
from tests.faults.faulty_runs import Fault, FinishedRun, run_with_faults, start_with_faults, wait_for_run
from tests.faults.small_run import SMALL_MODEL
from tests.fork_server import Fork
from tests.timeouts import PROCESS_TIMEOUT

STEPS_AN_EPOCH = 3
OTHER_WORDS = ("one", "two", "three", "four", "five", "six")
BATCHING = ("--batch_size", "2", "--gradient_accumulation_steps", "1", "--num_workers", "0")


@dataclass(frozen=True)
class SavedData:
    """Training data of a folder: the hash of every checkpoint, and the lines of every log."""

    checkpoints: Counter[str]
    lines: Counter[str]

    def count_missing(self, later: "SavedData") -> int:
        """Count the checkpoints and lines that are missing later."""
        return sum((self.checkpoints - later.checkpoints).values()) + sum((self.lines - later.lines).values())


def saved_data(folder: Path) -> SavedData:
    """Return the training data below the folder; a checkpoint with two names counts once."""
    files = {path.stat().st_ino: path for path in folder.rglob("checkpoint_*.pt")}.values()
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    logs = (line for path in folder.rglob("log.jsonl") for line in path.read_text(encoding="utf-8").splitlines())
    return SavedData(Counter(set(hashes)), Counter(logs))


def logged_steps(log: Path) -> list[int]:
    records = map(json.loads, (log / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["step"] for record in records if record["kind"] == "step"]


@dataclass(frozen=True)
class Workspace:
    """Working folder of a user: checkpoints in `ck`, logs in `runs`."""

    folder: Path

    def flags(self, corpus: Corpus, checkpoints: str, name: str, *more: str) -> list[str]:
        places = "--checkpoint_dir", str(self.folder / "ck" / checkpoints), "--log_dir", str(self.folder / "runs")
        return [*SMALL_MODEL, *BATCHING, *corpus.flags(), *places, "--run_name", name, *more]

    def train(
        self, corpus: Corpus, checkpoints: str, name: str, *more: str, faults: tuple[Fault, ...] = ()
    ) -> FinishedRun:
        return self.run(*self.flags(corpus, checkpoints, name, *more), faults=faults)

    def run(self, *flags: str, faults: tuple[Fault, ...] = ()) -> FinishedRun:
        return run_with_faults(flags, self.folder / "said.txt", faults)

    def checkpoint(self, run: str, name: str) -> Path:
        return self.folder / "ck" / run / f"checkpoint_{name}.pt"


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return a corpus of other letters whose files have the names of the first corpus."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tests.conftest.WORDS", OTHER_WORDS)
        return write_corpus(tmp_path_factory.mktemp("english") / "tones", {"train": 6, "valid": 2}, seed=3)


@pytest.fixture(scope="module")
def konkani(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("konkani") / "tones", {"train": 6, "valid": 2})


@pytest.fixture(scope="module")
def trained(konkani: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder with a run of four epochs in ck/mine and runs/mine."""
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    assert workspace.train(konkani, "mine", "mine", "--epochs", "4").code == 0
    return workspace.folder


@pytest.fixture
def workspace(trained: Path, tmp_path: Path) -> Workspace:
    """Copy the trained folder, links between checkpoints included."""
    subprocess.run(["cp", "-a", str(trained), str(tmp_path / "desk")], check=True)
    return Workspace(tmp_path / "desk")


def test_other_corpus_in_the_same_folder_is_rejected_and_both_are_named(workspace, konkani, english):
    before = saved_data(workspace.folder)
    ended = workspace.train(english, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert ended.code == 4 and "Traceback" not in ended.output
    for part in (konkani.manifest("train"), english.manifest("train"), "--fresh", "--checkpoint_dir", "--new_corpus"):
        assert part in ended.output, ended.output
    assert saved_data(workspace.folder) == before


def test_new_corpus_is_accepted_only_if_the_tokenizer_has_its_letters(workspace, english, tmp_path):
    before = saved_data(workspace.folder)
    ended = workspace.train(english, "mine", "mine", "--resume", "auto", "--new_corpus", "--epochs", "5")
    assert ended.code == 3 and "of the tokens" in ended.output and "--init_from" in ended.output
    assert saved_data(workspace.folder) == before
    same_letters = write_corpus(tmp_path / "other", {"train": 7, "valid": 2}, seed=9)
    ended = workspace.train(same_letters, "mine", "mine", "--resume", "auto", "--new_corpus", "--epochs", "5")
    assert ended.code == 0 and "Resuming with a different corpus" in ended.output, ended.output
    again = workspace.train(same_letters, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert again.code == 0, again.output  # the corpus now belongs to the run


def test_grown_moved_or_corrected_corpus_counts_as_the_same(workspace, konkani, tmp_path):
    shutil.copytree(konkani.directory, tmp_path / "moved")
    moved = Corpus(tmp_path / "moved")
    rows = [json.loads(line) for line in Path(moved.manifest("train")).read_text(encoding="utf-8").splitlines()]
    rows[0]["text"] = WORDS[0]
    grown = rows + [row | {"audio_filepath": row["audio_filepath"], "offset": 0.1, "duration": 0.3} for row in rows[:3]]
    Path(moved.manifest("train")).write_text("".join(json.dumps(row) + "\n" for row in grown))
    ended = workspace.train(moved, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert ended.code == 0 and "Resuming from" in ended.output, ended.output


def test_validation_on_training_utterances_gives_a_warning(workspace, konkani):
    ended = workspace.train(konkani, "new", "new", "--max_steps", "1", "--valid_manifest", konkani.manifest("train"))
    assert (
        ended.code == 0
        and "100% of the utterances of" in ended.output
        and "are also in the training set" in ended.output
    )
    ended = workspace.train(konkani, "newer", "newer", "--max_steps", "1")
    assert ended.code == 0 and "are also in the training set" not in ended.output


def test_negative_control_without_the_corpus_check_saved_data_is_lost(workspace, english):
    before = saved_data(workspace.folder)
    without_checks = (
        ("replace_by_no_op", "konkanivani.recipe.run_data", "check_corpus"),
        ("replace_by_no_op", "konkanivani.recipe.run_data", "check_spelling"),
    )
    ended = workspace.train(english, "mine", "mine", "--resume", "auto", "--epochs", "5", faults=without_checks)
    assert ended.code == 0 and before.count_missing(saved_data(workspace.folder)) > 0


def test_resuming_an_older_checkpoint_reports_steps_and_keeps_newer_data(workspace):
    older = workspace.checkpoint("mine", "epoch_2")
    for time_typed in (1, 2):
        before = saved_data(workspace.folder)
        flags = ("--max_steps", "10", "--learning_rate", "0.0003", "--log_dir", str(workspace.folder / "runs"))
        ended = workspace.run("--resume", str(older), *flags)
        assert ended.code == 0, ended.output
        steps = (4 if time_typed == 1 else 3) * STEPS_AN_EPOCH + (time_typed == 2) - 2 * STEPS_AN_EPOCH
        assert f"{steps} steps behind the newest" in ended.output, ended.output
        aside = workspace.folder / "ck" / "mine" / f"replaced_{time_typed}"
        logs = workspace.folder / "runs" / f"mine_replaced_{time_typed}"
        assert str(aside) in ended.output and str(logs) in ended.output
        assert before.count_missing(saved_data(workspace.folder)) == 0
        assert read_checkpoint(aside / "checkpoint_last.pt").step == 2 * STEPS_AN_EPOCH + steps
        assert logged_steps(workspace.folder / "runs" / "mine") == list(range(1, 11))
        assert read_checkpoint(workspace.checkpoint("mine", "last")).step == 10


@pytest.mark.parametrize("place", ["after the copy of the log", "after the move of newer checkpoints"])
def test_kill_while_newer_files_are_moved_loses_nothing(place, workspace):
    before, runs = saved_data(workspace.folder), workspace.folder / "runs"
    back = "--resume", str(workspace.checkpoint("mine", "epoch_2")), "--max_steps", "10", "--log_dir", str(runs)
    assert workspace.run(*back, faults=(("kill", place, 1),)).code == -signal.SIGKILL
    assert before.count_missing(saved_data(workspace.folder)) == 0
    assert workspace.run(*back).code == 0
    assert before.count_missing(saved_data(workspace.folder)) == 0 and logged_steps(runs / "mine") == list(range(1, 11))


def test_moved_checkpoint_can_be_resumed_with_a_separate_log(workspace):
    folder, runs = workspace.folder / "ck" / "mine", workspace.folder / "runs"
    workspace.run("--resume", str(folder / "checkpoint_epoch_2.pt"), "--max_steps", "7", "--log_dir", str(runs))
    before = saved_data(workspace.folder)
    last = folder / "replaced_1" / "checkpoint_last.pt"
    ended = workspace.run("--resume", str(last), "--max_steps", "14", "--epochs", "5", "--log_dir", str(runs))
    assert ended.code == 0 and f"logs to {runs / 'replaced_1'}" in ended.output, ended.output
    assert read_checkpoint(last).step == 14 and read_checkpoint(folder / "checkpoint_last.pt").step == 7
    assert (before.lines - saved_data(workspace.folder).lines) == Counter()


def test_resuming_the_newest_checkpoint_moves_nothing(workspace):
    for name in ("last", "epoch_4"):
        resumed = "--resume", str(workspace.checkpoint("mine", name))
        ended = workspace.run(*resumed, "--log_dir", str(workspace.folder / "runs"), "--epochs", "4")
        assert ended.code == 0 and "older checkpoint" not in ended.output, ended.output
    assert not (workspace.folder / "ck" / "mine" / "replaced_1").exists()


def test_negative_control_unmoved_newer_checkpoints_are_overwritten(workspace):
    before, older = saved_data(workspace.folder), workspace.checkpoint("mine", "epoch_2")
    more = "--max_steps", "10", "--learning_rate", "0.0003", "--log_dir", str(workspace.folder / "runs")
    ended = workspace.run(
        "--resume", str(older), *more, faults=(("replace_by_no_op", "konkanivani.recipe.resume", "move_newer_aside"),)
    )
    assert ended.code == 0 and before.count_missing(saved_data(workspace.folder)) > 0


def test_copied_run_gets_its_own_log_and_the_original_log_is_kept(workspace):
    original, runs = workspace.folder / "ck" / "mine", workspace.folder / "runs"
    subprocess.run(["cp", "-r", str(original), str(workspace.folder / "ck" / "copy")], check=True)
    kept = saved_data(original), saved_data(runs)
    ended = workspace.run(
        "--resume", str(workspace.checkpoint("copy", "last")), "--log_dir", str(runs), "--epochs", "5"
    )
    assert ended.code == 0 and f"{runs / 'mine'} is the log of the run in {original}" in ended.output, ended.output
    assert saved_data(original) == kept[0] and kept[1].count_missing(saved_data(runs / "mine")) == 0
    assert logged_steps(runs / "mine") == list(range(1, 4 * STEPS_AN_EPOCH + 1))
    assert logged_steps(runs / "copy") == list(range(1, 5 * STEPS_AN_EPOCH + 1))
    assert config_from_text(read_checkpoint(workspace.checkpoint("copy", "last")).config).run.run_name == "copy"


def test_moved_run_continues_its_log(workspace):
    (workspace.folder / "ck" / "mine").rename(workspace.folder / "ck" / "नवें नांव")
    moved = workspace.checkpoint("नवें नांव", "last")
    ended = workspace.run("--resume", str(moved), "--log_dir", str(workspace.folder / "runs"), "--epochs", "5")
    assert ended.code == 0, ended.output
    assert os.listdir(workspace.folder / "runs") == ["mine"]
    assert logged_steps(workspace.folder / "runs" / "mine") == list(range(1, 5 * STEPS_AN_EPOCH + 1))


def test_second_run_with_the_same_name_gets_its_own_log_folder(workspace, konkani):
    kept = saved_data(workspace.folder)
    ended = workspace.train(konkani, "second", "mine", "--max_steps", "2")
    assert ended.code == 0 and f"this run logs to {workspace.folder / 'runs' / 'second'}" in ended.output, ended.output
    assert kept.count_missing(saved_data(workspace.folder)) == 0
    assert json.loads(ended.output.splitlines()[-1])["tensorboard"].endswith("runs/second")


def test_fresh_run_reports_where_the_old_run_was_moved_and_loses_nothing(workspace, konkani):
    kept = saved_data(workspace.folder)
    (workspace.folder / "runs" / "mine" / "rejected.jsonl").write_text('{"row": 1}\n')
    ended = workspace.train(konkani, "mine", "mine", "--fresh", "--max_steps", "2")
    assert ended.code == 0 and kept.count_missing(saved_data(workspace.folder)) == 0
    aside = workspace.folder / "runs" / "mine_replaced_1"
    assert (
        f"moved to {workspace.folder / 'ck' / 'mine' / 'replaced_1'}" in ended.output
        and f"moved to {aside}" in ended.output
    )
    assert (aside / "rejected.jsonl").read_text() == '{"row": 1}\n'
    assert logged_steps(workspace.folder / "runs" / "mine") == [1, 2]


def test_corpus_folder_is_rejected_as_log_folder_and_not_moved(workspace, konkani):
    (corpus := workspace.folder / "runs" / "corpus").mkdir()
    for name in ("rejected.jsonl", "train.jsonl"):  # as prepare_data.py leaves them
        (corpus / name).touch()
    ended = workspace.train(konkani, "other", "corpus")
    assert ended.code == 2 and f"{corpus} contains train.jsonl and is not the log of a run" in ended.output
    assert len(os.listdir(corpus)) == 2 and not (workspace.folder / "ck" / "other").exists()


def start_long_run(workspace: Workspace, corpus: Corpus) -> Fork:
    """Start a run that continues until it is stopped, and wait for its first logged step."""
    process = start_with_faults(
        workspace.flags(corpus, "long", "long", "--epochs", "5000"), workspace.folder / "long.txt"
    )
    deadline, log = time.monotonic() + PROCESS_TIMEOUT, workspace.folder / "runs" / "long" / "log.jsonl"
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < deadline, (workspace.folder / "long.txt").read_text()
        time.sleep(0.05)
    return process


def run_two_with_one_name(workspace: Workspace, corpus: Corpus, *faults: Fault) -> tuple[int, FinishedRun, list[int]]:
    """Start a second run with the name of a running one in another folder.

    Returns the process id of the first run, the end of the second, and the logged steps of the first.
    """
    run = start_long_run(workspace, corpus)
    try:
        second = workspace.train(corpus, "elsewhere", "long", "--max_steps", "2", faults=faults)
    finally:
        os.kill(run.pid, signal.SIGTERM)
        wait_for_run(run, workspace.folder / "long.txt")
    return run.pid, second, logged_steps(workspace.folder / "runs" / "long")


def test_log_folder_is_locked_against_a_second_run(workspace, konkani):
    process, second, steps = run_two_with_one_name(workspace, konkani)
    assert (
        second.code == 6
        and f"Process {process} is already logging to" in second.output
        and "--run_name" in second.output
    )
    assert steps == list(range(1, len(steps) + 1))


def test_negative_control_without_the_lock_two_runs_share_a_log(workspace, konkani):
    _, second, steps = run_two_with_one_name(workspace, konkani, ("open_logs_without_lock",))
    assert second.code == 0 and steps != list(range(1, len(steps) + 1))
