"""Repeating a command, on another corpus, in a copied folder or from an older checkpoint, loses no saved data.

Checkpoints are identified by hash and logs by line: everything must remain under its name or in a folder that a message
named. Each negative control disables one protection of the trainer.
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
from tests.faults.faulty_runs import Ended, Fault, end_of, run_faulty, start_faulty
from tests.faults.small_run import SMALL_MODEL
from tests.patience import PATIENCE
from tests.warm import Fork

STEPS_AN_EPOCH = 3
OTHER_WORDS = ("one", "two", "three", "four", "five", "six")
CUT = ("--batch_size", "2", "--gradient_accumulation_steps", "1", "--num_workers", "0")


@dataclass(frozen=True)
class Holdings:
    """Training data of a folder: the hash of every checkpoint, and the lines of every log."""

    checkpoints: Counter[str]
    lines: Counter[str]

    def lost(self, later: "Holdings") -> int:
        """Count the checkpoints and lines that are missing later."""
        return sum((self.checkpoints - later.checkpoints).values()) + sum((self.lines - later.lines).values())


def holdings(folder: Path) -> Holdings:
    """Return the training data below the folder; a checkpoint with two names counts once."""
    files = {path.stat().st_ino: path for path in folder.rglob("checkpoint_*.pt")}.values()
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    logs = (line for path in folder.rglob("log.jsonl") for line in path.read_text(encoding="utf-8").splitlines())
    return Holdings(Counter(set(hashes)), Counter(logs))


def steps_logged(log: Path) -> list[int]:
    records = map(json.loads, (log / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["step"] for record in records if record["kind"] == "step"]


@dataclass(frozen=True)
class Desk:
    """Working folder of a user: checkpoints in `ck`, logs in `runs`."""

    folder: Path

    def flags(self, corpus: Corpus, checkpoints: str, name: str, *more: str) -> list[str]:
        places = "--checkpoint_dir", str(self.folder / "ck" / checkpoints), "--log_dir", str(self.folder / "runs")
        return [*SMALL_MODEL, *CUT, *corpus.flags(), *places, "--run_name", name, *more]

    def train(self, corpus: Corpus, checkpoints: str, name: str, *more: str, faults: tuple[Fault, ...] = ()) -> Ended:
        return self.type(*self.flags(corpus, checkpoints, name, *more), faults=faults)

    def type(self, *flags: str, faults: tuple[Fault, ...] = ()) -> Ended:
        return run_faulty(flags, self.folder / "said.txt", faults)

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
    desk = Desk(tmp_path_factory.mktemp("trained"))
    assert desk.train(konkani, "mine", "mine", "--epochs", "4").code == 0
    return desk.folder


@pytest.fixture
def desk(trained: Path, tmp_path: Path) -> Desk:
    """Copy the trained folder, links between checkpoints included."""
    subprocess.run(["cp", "-a", str(trained), str(tmp_path / "desk")], check=True)
    return Desk(tmp_path / "desk")


def test_another_corpus_in_the_same_folder_is_refused_and_both_are_named(desk, konkani, english):
    before = holdings(desk.folder)
    ended = desk.train(english, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert ended.code == 4 and "Traceback" not in ended.output
    for part in (konkani.manifest("train"), english.manifest("train"), "--fresh", "--checkpoint_dir", "--new_corpus"):
        assert part in ended.output, ended.output
    assert holdings(desk.folder) == before


def test_on_purpose_it_is_refused_where_the_tokenizer_lacks_its_letters_and_goes_on_where_not(desk, english, tmp_path):
    before = holdings(desk.folder)
    ended = desk.train(english, "mine", "mine", "--resume", "auto", "--new_corpus", "--epochs", "5")
    assert ended.code == 3 and "of the tokens" in ended.output and "--init_from" in ended.output
    assert holdings(desk.folder) == before
    same_letters = write_corpus(tmp_path / "other", {"train": 7, "valid": 2}, seed=9)
    ended = desk.train(same_letters, "mine", "mine", "--resume", "auto", "--new_corpus", "--epochs", "5")
    assert ended.code == 0 and "Resuming with a different corpus" in ended.output, ended.output
    again = desk.train(same_letters, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert again.code == 0, again.output  # the corpus now belongs to the run


def test_a_corpus_that_has_grown_moved_or_been_corrected_is_the_same_one(desk, konkani, tmp_path):
    shutil.copytree(konkani.directory, tmp_path / "moved")
    moved = Corpus(tmp_path / "moved")
    rows = [json.loads(line) for line in Path(moved.manifest("train")).read_text(encoding="utf-8").splitlines()]
    rows[0]["text"] = WORDS[0]
    grown = rows + [row | {"audio_filepath": row["audio_filepath"], "offset": 0.1, "duration": 0.3} for row in rows[:3]]
    Path(moved.manifest("train")).write_text("".join(json.dumps(row) + "\n" for row in grown))
    ended = desk.train(moved, "mine", "mine", "--resume", "auto", "--epochs", "5")
    assert ended.code == 0 and "Resuming from" in ended.output, ended.output


def test_validating_on_what_is_trained_on_is_warned_of_and_on_other_speech_is_not(desk, konkani):
    ended = desk.train(konkani, "new", "new", "--max_steps", "1", "--valid_manifest", konkani.manifest("train"))
    assert (
        ended.code == 0
        and "100% of the utterances of" in ended.output
        and "are also in the training set" in ended.output
    )
    ended = desk.train(konkani, "newer", "newer", "--max_steps", "1")
    assert ended.code == 0 and "are also in the training set" not in ended.output


def test_negative_control_without_the_question_the_weights_go_on_with_the_other_corpus(desk, english):
    before = holdings(desk.folder)
    unasked = (
        ("forget", "konkanivani.recipe.run_data", "check_corpus"),
        ("forget", "konkanivani.recipe.run_data", "check_spelling"),
    )
    ended = desk.train(english, "mine", "mine", "--resume", "auto", "--epochs", "5", faults=unasked)
    assert ended.code == 0 and before.lost(holdings(desk.folder)) > 0


def test_going_back_says_by_how_many_steps_and_keeps_all_that_is_newer_however_often(desk):
    older = desk.checkpoint("mine", "epoch_2")
    for time_typed in (1, 2):
        before = holdings(desk.folder)
        flags = ("--max_steps", "10", "--learning_rate", "0.0003", "--log_dir", str(desk.folder / "runs"))
        ended = desk.type("--resume", str(older), *flags)
        assert ended.code == 0, ended.output
        steps = (4 if time_typed == 1 else 3) * STEPS_AN_EPOCH + (time_typed == 2) - 2 * STEPS_AN_EPOCH
        assert f"{steps} steps behind the newest" in ended.output, ended.output
        aside = desk.folder / "ck" / "mine" / f"replaced_{time_typed}"
        logs = desk.folder / "runs" / f"mine_replaced_{time_typed}"
        assert str(aside) in ended.output and str(logs) in ended.output
        assert before.lost(holdings(desk.folder)) == 0
        assert read_checkpoint(aside / "checkpoint_last.pt").step == 2 * STEPS_AN_EPOCH + steps
        assert steps_logged(desk.folder / "runs" / "mine") == list(range(1, 11))
        assert read_checkpoint(desk.checkpoint("mine", "last")).step == 10


@pytest.mark.parametrize("place", ["behind the log's copy", "behind the newer checkpoints' move"])
def test_a_kill_while_things_are_moved_aside_loses_nothing_either(place, desk):
    before, runs = holdings(desk.folder), desk.folder / "runs"
    back = "--resume", str(desk.checkpoint("mine", "epoch_2")), "--max_steps", "10", "--log_dir", str(runs)
    assert desk.type(*back, faults=(("kill", place, 1),)).code == -signal.SIGKILL
    assert before.lost(holdings(desk.folder)) == 0
    assert desk.type(*back).code == 0
    assert before.lost(holdings(desk.folder)) == 0 and steps_logged(runs / "mine") == list(range(1, 11))


def test_what_was_moved_aside_can_be_gone_on_with_and_logs_beside_the_run(desk):
    folder, runs = desk.folder / "ck" / "mine", desk.folder / "runs"
    desk.type("--resume", str(folder / "checkpoint_epoch_2.pt"), "--max_steps", "7", "--log_dir", str(runs))
    before = holdings(desk.folder)
    last = folder / "replaced_1" / "checkpoint_last.pt"
    ended = desk.type("--resume", str(last), "--max_steps", "14", "--epochs", "5", "--log_dir", str(runs))
    assert ended.code == 0 and f"logs to {runs / 'replaced_1'}" in ended.output, ended.output
    assert read_checkpoint(last).step == 14 and read_checkpoint(folder / "checkpoint_last.pt").step == 7
    assert (before.lines - holdings(desk.folder).lines) == Counter()


def test_the_newest_is_gone_on_from_as_ever(desk):
    for name in ("last", "epoch_4"):
        resumed = "--resume", str(desk.checkpoint("mine", name))
        ended = desk.type(*resumed, "--log_dir", str(desk.folder / "runs"), "--epochs", "4")
        assert ended.code == 0 and "older checkpoint" not in ended.output, ended.output
    assert not (desk.folder / "ck" / "mine" / "replaced_1").exists()


def test_negative_control_without_moving_aside_the_newer_ones_are_written_over(desk):
    before, older = holdings(desk.folder), desk.checkpoint("mine", "epoch_2")
    more = "--max_steps", "10", "--learning_rate", "0.0003", "--log_dir", str(desk.folder / "runs")
    ended = desk.type(
        "--resume", str(older), *more, faults=(("forget", "konkanivani.recipe.run_output", "move_newer_aside"),)
    )
    assert ended.code == 0 and before.lost(holdings(desk.folder)) > 0


def test_a_copied_folder_logs_beside_itself_and_the_original_keeps_its_log(desk):
    original, runs = desk.folder / "ck" / "mine", desk.folder / "runs"
    subprocess.run(["cp", "-r", str(original), str(desk.folder / "ck" / "copy")], check=True)
    kept = holdings(original), holdings(runs)
    ended = desk.type("--resume", str(desk.checkpoint("copy", "last")), "--log_dir", str(runs), "--epochs", "5")
    assert ended.code == 0 and f"{runs / 'mine'} is the log of the run in {original}" in ended.output, ended.output
    assert holdings(original) == kept[0] and kept[1].lost(holdings(runs / "mine")) == 0
    assert steps_logged(runs / "mine") == list(range(1, 4 * STEPS_AN_EPOCH + 1))
    assert steps_logged(runs / "copy") == list(range(1, 5 * STEPS_AN_EPOCH + 1))
    assert config_from_text(read_checkpoint(desk.checkpoint("copy", "last")).config).run.run_name == "copy"


def test_a_moved_folder_takes_its_log_along(desk):
    (desk.folder / "ck" / "mine").rename(desk.folder / "ck" / "नवें नांव")
    moved = desk.checkpoint("नवें नांव", "last")
    ended = desk.type("--resume", str(moved), "--log_dir", str(desk.folder / "runs"), "--epochs", "5")
    assert ended.code == 0, ended.output
    assert os.listdir(desk.folder / "runs") == ["mine"]
    assert steps_logged(desk.folder / "runs" / "mine") == list(range(1, 5 * STEPS_AN_EPOCH + 1))


def test_another_run_of_the_same_name_logs_under_a_name_of_its_own(desk, konkani):
    kept = holdings(desk.folder)
    ended = desk.train(konkani, "second", "mine", "--max_steps", "2")
    assert ended.code == 0 and f"this run logs to {desk.folder / 'runs' / 'second'}" in ended.output, ended.output
    assert kept.lost(holdings(desk.folder)) == 0
    assert json.loads(ended.output.splitlines()[-1])["tensorboard"].endswith("runs/second")


def test_a_run_that_begins_anew_says_where_the_old_one_is_and_loses_nothing_of_it(desk, konkani):
    kept = holdings(desk.folder)
    (desk.folder / "runs" / "mine" / "rejected.jsonl").write_text('{"row": 1}\n')
    ended = desk.train(konkani, "mine", "mine", "--fresh", "--max_steps", "2")
    assert ended.code == 0 and kept.lost(holdings(desk.folder)) == 0
    aside = desk.folder / "runs" / "mine_replaced_1"
    assert (
        f"moved to {desk.folder / 'ck' / 'mine' / 'replaced_1'}" in ended.output and f"moved to {aside}" in ended.output
    )
    assert (aside / "rejected.jsonl").read_text() == '{"row": 1}\n'
    assert steps_logged(desk.folder / "runs" / "mine") == [1, 2]


def test_a_corpus_is_no_old_log_to_be_moved_aside(desk, konkani):
    (corpus := desk.folder / "runs" / "corpus").mkdir()
    for name in ("rejected.jsonl", "train.jsonl"):  # as prepare_data.py leaves them
        (corpus / name).touch()
    ended = desk.train(konkani, "other", "corpus")
    assert ended.code == 2 and f"{corpus} contains train.jsonl and is not the log of a run" in ended.output
    assert len(os.listdir(corpus)) == 2 and not (desk.folder / "ck" / "other").exists()


def begin_long_run(desk: Desk, corpus: Corpus) -> Fork:
    """Start a run that continues until it is stopped, and wait for its first logged step."""
    process = start_faulty(desk.flags(corpus, "long", "long", "--epochs", "5000"), desk.folder / "long.txt")
    deadline, log = time.monotonic() + PATIENCE, desk.folder / "runs" / "long" / "log.jsonl"
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < deadline, (desk.folder / "long.txt").read_text()
        time.sleep(0.05)
    return process


def log_of_two_at_once(desk: Desk, corpus: Corpus, *faults: Fault) -> tuple[int, Ended, list[int]]:
    """Start a second run with the name of a running one in another folder.

    Returns the process id of the first run, the end of the second, and the logged steps of the first.
    """
    run = begin_long_run(desk, corpus)
    try:
        second = desk.train(corpus, "elsewhere", "long", "--max_steps", "2", faults=faults)
    finally:
        os.kill(run.pid, signal.SIGTERM)
        end_of(run, desk.folder / "long.txt")
    return run.pid, second, steps_logged(desk.folder / "runs" / "long")


def test_a_log_folder_is_locked_as_a_checkpoint_folder_is(desk, konkani):
    process, second, steps = log_of_two_at_once(desk, konkani)
    assert (
        second.code == 6
        and f"Process {process} is already logging to" in second.output
        and "--run_name" in second.output
    )
    assert steps == list(range(1, len(steps) + 1))


def test_negative_control_without_the_lock_two_runs_share_a_log(desk, konkani):
    _, second, steps = log_of_two_at_once(desk, konkani, ("unowned_logs",))
    assert second.code == 0 and steps != list(range(1, len(steps) + 1))
