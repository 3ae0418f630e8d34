"""Checkpoints whose last write is late: it never arrives, or a slow disk still writes when a signal arrives.

In a folder on a cloud drive, or after a crash, a file may be missing, empty, truncated, or an older version.
"""

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from konkanivani.checkpoints.checkpoint import read_checkpoint, read_step
from konkanivani.checkpoints.checkpointer import BEST, LAST, PREVIOUS, Checkpointer
from konkanivani.errors import CheckpointError
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from konkanivani.training.run import Run
from tests.conftest import ROOT, TINY_MODEL, TRAINER, Corpus, mark_full, read_log, run_folders
from tests.faults.long_run import LongRun, TrainingProcess
from tests.faults.repeated_kills import small_endless_run
from tests.faults.resumed_runs import checkpoint_differences
from tests.faults.slow_disk import SlowDisk, count_slow_writes
from tests.faults.under_torchrun import RankRun, kill_all, rank_pids
from tests.fork_server import Fork, Job, fork_server
from tests.invariants.ranks import environments_of
from tests.run_setup import begin_run
from tests.timeouts import PROCESS_TIMEOUT

STEPS = 10  # 4 per epoch
MODEL = (*TINY_MODEL, "--encoder_layers", "1", "--decoder_layers", "0", "--ctc_weight", "1", "--num_workers", "0")
BATCHING = ("--batch_size", "8", "--gradient_accumulation_steps", "1", "--epochs", "4", "--save_steps", "3")
EPOCH = "checkpoint_epoch_2.pt"


def build_resumed_run(corpus: Corpus, folder: Path) -> Run:
    return build_run(begin_run([*MODEL, *BATCHING, *corpus.flags(), *run_folders(folder), "--resume", "auto"]))


def train_until(run: Run, step: int) -> None:
    """Train up to this step and save, with unchanged settings, like a run stopped by a signal."""
    with run.logs.logbook:
        train(run, last_step=step)


@pytest.fixture(scope="module")
def stopped_run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was stopped after two epochs: last is step 8 and epoch 2, previous is step 6."""
    folder = tmp_path_factory.mktemp("stopped")
    train_until(build_resumed_run(corpus, folder), 8)
    checkpoints = folder / "checkpoints"
    assert [read_step(checkpoints / name) for name in (LAST, EPOCH, PREVIOUS)] == [8, 8, 6]
    return folder


@pytest.fixture(scope="module")
def undisturbed(corpus: Corpus, stopped_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(stopped_run, folder, dirs_exist_ok=True)
    train_until(build_resumed_run(corpus, folder), STEPS)
    return folder


def replace(path: Path, content: bytes) -> None:
    """Write a separate file: in a copy from a cloud drive no two names share one file."""
    path.unlink()
    path.write_bytes(content)


def replace_by_dangling_link(folder: Path) -> None:
    """Make the name a link to a missing file."""
    (folder / LAST).unlink()
    (folder / LAST).symlink_to("checkpoint_epoch_3.pt")


LOST_WRITES: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: (folder / LAST).unlink(),
    "empty": lambda folder: replace(folder / LAST, b""),
    "cut short": lambda folder: replace(folder / LAST, (folder / LAST).read_bytes()[:-1000]),
    "zeros of the right size": lambda folder: replace(folder / LAST, bytes((folder / LAST).stat().st_size)),
    "zeros in the middle": lambda folder: replace(folder / LAST, with_zero_block((folder / LAST).read_bytes())),
    "an older file again": lambda folder: replace(folder / LAST, (folder / PREVIOUS).read_bytes()),
    "a dangling link": replace_by_dangling_link,
}
MESSAGES = {
    "missing": f"{LAST} is missing: its last write has not arrived",
    "an older file again": f"{LAST} is of step 6: its last write has not arrived",
    "a dangling link": f"{LAST} is missing: its last write has not arrived",
}


def with_zero_block(content: bytes) -> bytes:
    """Return the content with a block of zeros in its tensors, as a sparse file has one after a crash."""
    middle = len(content) // 2
    return content[:middle] + bytes(4096) + content[middle + 4096 :]


@pytest.mark.parametrize("lost", LOST_WRITES)
def test_newest_valid_checkpoint_is_resumed_if_the_last_one_is_lost(
    lost, stopped_run, undisturbed, corpus, tmp_path, capsys
):
    folder = tmp_path / "run"
    shutil.copytree(stopped_run, folder)
    LOST_WRITES[lost](folder / "checkpoints")
    run = build_resumed_run(corpus, folder)
    output = capsys.readouterr().out
    assert run.state.step == 8 and f"Resuming from {folder / 'checkpoints' / EPOCH}: step 8." in output
    expected = MESSAGES.get(lost, f"Renamed to {LAST}.damaged. Trying the previous one.")
    assert output.count(expected) == 1 and output.count("has not arrived") == (lost in MESSAGES)
    train_until(run, STEPS)
    one, other = (read_checkpoint(run / "checkpoints" / LAST) for run in (folder, undisturbed))
    assert checkpoint_differences(one, other) == []
    assert [record["step"] for record in read_log(folder)] == list(range(1, STEPS + 1))


def test_negative_control_an_undamaged_folder_resumes_its_last_checkpoint(stopped_run, corpus, tmp_path, capsys):
    shutil.copytree(stopped_run, tmp_path / "run")
    assert build_resumed_run(corpus, tmp_path / "run").state.step == 8
    output = capsys.readouterr().out
    assert f"{LAST}: step 8." in output and "arrived" not in output and "damaged" not in output


def test_older_checkpoint_is_resumed_and_no_run_starts_if_none_is_valid(stopped_run, corpus, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped_run, folder)
    checkpoints = folder / "checkpoints"
    for path in checkpoints.glob("checkpoint_*"):
        if path.name != "checkpoint_epoch_1.pt":
            replace(path, b"")
    assert build_resumed_run(corpus, folder).state.step == 4
    for path in checkpoints.glob("checkpoint_*.pt"):
        replace(path, b"PK")
    with pytest.raises(CheckpointError, match="None of the .* checkpoints"):
        build_resumed_run(corpus, folder)


def test_best_checkpoint_is_restored_if_its_write_was_lost(stopped_run, corpus, tmp_path):
    """The checkpoint's counters determine which of the two epochs is the best."""
    folder = tmp_path / "run"
    shutil.copytree(stopped_run, folder)
    checkpoints = folder / "checkpoints"
    progress = read_checkpoint(checkpoints / LAST).states["progress"]
    best = progress["epochs_finished"] - progress["epochs_without_improvement"]
    replace(checkpoints / BEST, (checkpoints / f"checkpoint_epoch_{3 - best}.pt").read_bytes())
    build_resumed_run(corpus, folder)
    assert read_step(checkpoints / BEST) == 4 * best


def test_step_of_a_checkpoint_is_read_without_its_tensors(stopped_run):
    content = (stopped_run / "checkpoints" / LAST).read_bytes()
    path = stopped_run / "spoilt.pt"
    path.write_bytes(with_zero_block(content))
    assert read_step(path) == 8
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    for spoilt in (b"", content[:-10], b"PK\x05\x06" + bytes(18)):
        path.write_bytes(spoilt)
        assert read_step(path) is None


def start_slow_write(run: LongRun, seconds: float) -> TrainingProcess:
    """Start the run and wait until it writes its second checkpoint, for `seconds` seconds."""
    trainer = run.start(fault=SlowDisk(seconds))
    trainer.wait_until(lambda: count_slow_writes(run.checkpoints) > 0, "a slow write")
    return trainer


def run_with_periodic_saves(corpus: Corpus, folder: Path) -> LongRun:
    """Return a run that saves every second step."""
    return small_endless_run(corpus, folder, "--save_steps", "2", "--num_workers", "0")


def resumed_step(run: LongRun) -> int:
    """Return the step that the next process resumes from; it makes one more step and exits with 0."""
    result = Checkpointer(run.checkpoints, keep=2).read_newest_sound()
    step = result[1].step
    assert run.start("--max_steps", str(step + 1)).wait() == 0, run.output.read_text()
    assert read_checkpoint(run.checkpoints / LAST).step == step + 1
    assert f"{LAST}: step {step}." in run.output.read_text(encoding="utf-8")
    return step


def test_signal_during_a_slow_write_exits_without_a_second_write(corpus, tmp_path):
    """A scheduler kills after 30 s: a second write of the same state would double the time to exit."""
    run = run_with_periodic_saves(corpus, tmp_path / "run")
    trainer = start_slow_write(run, seconds=3)
    os.kill(trainer.pid, signal.SIGTERM)
    assert trainer.wait() == 143
    end_state = run.end_state()
    assert (end_state.saved, end_state.logged, end_state.invalid_files, end_state.was_saving) == (4, 4, (), False)
    assert count_slow_writes(run.checkpoints) == 1 and run.tracebacks() == []
    assert resumed_step(run) == 4


@pytest.mark.parametrize("delay", [0.5, *mark_full(6.5)], ids=["soon", "after the micro-batch timeout"])
def test_second_signal_during_a_slow_write_exits_at_once(delay, corpus, tmp_path):
    run = run_with_periodic_saves(corpus, tmp_path / "run")
    trainer = start_slow_write(run, seconds=60)
    os.kill(trainer.pid, signal.SIGTERM)
    time.sleep(delay)
    assert trainer.is_alive()
    sent = time.monotonic()
    os.kill(trainer.pid, signal.SIGTERM)
    assert trainer.wait() == 143 and time.monotonic() - sent < 20
    end_state = run.end_state()
    assert (end_state.saved, end_state.logged, end_state.invalid_files, end_state.was_saving) == (2, 4, (), False)
    assert run.tracebacks() == []
    assert resumed_step(run) == 2


def start_ranks_with_slow_disk(run: RankRun, seconds: float) -> list[Fork]:
    """Start two ranks with the environment of torchrun, as processes whose exit codes are known."""
    run.directory.mkdir(parents=True)
    install = partial(SlowDisk(seconds).install, run.directory / "checkpoints")
    jobs = [
        Job(ROOT / TRAINER, run.flags(), run.directory / "output.txt", environment=place, threads=1, before=install)
        for place in environments_of(2)
    ]
    return [fork_server().start(job) for job in jobs]


def wait_for_slow_write(run: RankRun, *started: Fork) -> None:
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while not count_slow_writes(run.directory / "checkpoints"):
        has_ended = any(process.poll() is not None for process in started)
        assert not has_ended and time.monotonic() < deadline, (run.directory / "output.txt").read_text()
        time.sleep(0.01)


def check_resumes(run: RankRun, saved: int) -> None:
    """Check that the run has saved this step, whole, and that two ranks train on to the end."""
    checkpoints = run.directory / "checkpoints"
    assert read_checkpoint(checkpoints / LAST).step == saved and not list(checkpoints.glob("*.partial"))
    (checkpoints / "writing").unlink()
    longer = dataclasses.replace(run, steps=saved + 2)
    output = run.directory / "resumed.txt"
    jobs = [Job(ROOT / TRAINER, longer.flags(), output, environment=place, threads=1) for place in environments_of(2)]
    ranks = [fork_server().start(job) for job in jobs]
    assert [rank.wait(PROCESS_TIMEOUT) for rank in ranks] == [0, 0], output.read_text()
    assert f"{LAST}: step {saved}." in output.read_text(encoding="utf-8")
    assert [record["step"] for record in read_log(run.directory)] == list(range(1, saved + 3))


@pytest.mark.parametrize("sharded", [False, *mark_full(True)], ids=["whole", "sharded"])
def test_ranks_signalled_twice_during_a_slow_write_save_a_whole_checkpoint(sharded, corpus, tmp_path):
    """torchrun forwards a signal that the ranks may have received from the scheduler already."""
    run = RankRun(corpus, tmp_path / "run", sharded=sharded)
    ranks = start_ranks_with_slow_disk(run, seconds=2)
    wait_for_slow_write(run, *ranks)
    for _ in range(2):
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        time.sleep(0.5)
    assert [rank.wait(PROCESS_TIMEOUT) for rank in ranks] == [143, 143]
    output = (run.directory / "output.txt").read_text(encoding="utf-8")
    assert "Traceback" not in output and output.count("Stopped by a signal at step 4") == 1
    assert count_slow_writes(run.directory / "checkpoints") == (2 if sharded else 1)
    check_resumes(run, 4)


@pytest.mark.full
def test_torchrun_signalled_during_a_slow_write_saves_a_whole_checkpoint(corpus, tmp_path):
    run = RankRun(corpus, tmp_path / "run", is_cold=False)
    run.directory.mkdir(parents=True)
    script, output = ROOT / "tests" / "faults" / "under_torchrun.py", run.directory / "output.txt"
    install = partial(SlowDisk(3).install, run.directory / "checkpoints")
    agent = fork_server().start(Job(script, ("0", *run.flags()), output, threads=1, before=install))
    try:
        wait_for_slow_write(run, agent)
        ranks = rank_pids(agent)
        os.kill(agent.pid, signal.SIGTERM)
        agent.wait(PROCESS_TIMEOUT)
        deadline = time.monotonic() + PROCESS_TIMEOUT
        while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_all(agent)
    message = output.read_text(encoding="utf-8")
    assert message.count("Stopped by a signal at step 4") == 1, message
    check_resumes(run, 4)
