"""A signal saves at the next micro-batch boundary, a second one ends at once; no worker remains."""

import os
import random
import re
import signal

import pytest
import torch

from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.errors import Interrupted, defer_signals
from konkanivani.recipe.build import build_run
from konkanivani.training import validation as evaluation
from konkanivani.training.interruption import PATIENCE
from konkanivani.training.loop import train
from tests.conftest import ROOT, TINY_MODEL, read_log, run_folders
from tests.faults.killing import what_differs
from tests.faults.long_run import LongRun, members
from tests.faults.signalling import (
    HangingCall,
    IgnoredHangUps,
    begin,
    end_by_closing_its_terminal,
    end_by_signal,
    end_by_two,
    end_while_a_call_hangs,
    end_while_a_rehearsal_hangs,
    end_while_workers_hang,
    left_after,
    run_to_be_rehearsed,
    run_to_be_signalled,
    send,
)
from tests.starts import begin_run
from tests.warm import warm_parent


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> LongRun:
    """Return one run that all these signals end in turn."""
    return run_to_be_signalled(corpus, tmp_path_factory.mktemp("signals") / "signalled")


@pytest.mark.parametrize(
    "number, target, workers",
    [(signal.SIGTERM, "the process", 0), (signal.SIGINT, "its group", 2), (signal.SIGTERM, "the shell script", 2)],
    ids=["SIGTERM to the process", "SIGINT to the group", "SIGTERM to the shell script"],
)
def test_a_signal_saves_every_step_and_leaves_nobody_behind(run, number, target, workers):
    assert end_by_signal(run, number, target, workers, delay=0.1 * random.Random(workers).random()).complaints == ()


def test_a_terminal_that_closes_costs_no_step(run):
    assert end_by_closing_its_terminal(run, workers=2).complaints == ()


def test_with_nohup_a_run_outlives_its_terminal(run):
    life = begin(run, "the process", 2, trap=IgnoredHangUps())
    send(life, signal.SIGHUP, "its group")
    logged = run.logged_step()
    life.wait_until(lambda: run.logged_step() > logged + 1, "a step after the signal")
    send(life, signal.SIGTERM, "its group")
    assert life.end() == 128 + signal.SIGTERM and left_after(life) == []


def test_a_signal_breaks_off_the_wait_for_workers_that_hang_and_kills_them(run):
    ending = end_while_workers_hang(run, signal.SIGTERM)
    assert ending.complaints == ()


@pytest.mark.parametrize(
    "trap",
    [
        HangingCall("konkanivani.training.step.forward_and_backward", 2),
        HangingCall("konkanivani.training.validation.recognize", 1),
    ],
    ids=["in a micro-batch", "in validation"],
)
def test_what_takes_too_long_is_given_up_and_the_steps_before_are_saved(run, trap):
    ending = end_while_a_call_hangs(run, signal.SIGTERM, trap)
    assert ending.complaints == () and PATIENCE <= ending.seconds < 120
    assert not list(run.checkpoints.glob("*.partial"))


@pytest.mark.parametrize("signals", [1, 2])
def test_a_rehearsal_that_takes_too_long_leaves_nothing(corpus, tmp_path, signals):
    assert end_while_a_rehearsal_hangs(run_to_be_rehearsed(corpus, tmp_path), signals) == [".lock"]


def test_what_a_killed_process_left_unfinished_is_removed_by_the_next(tmp_path):
    for name in ("rehearsal.partial", "checkpoint_last.pt.partial", "checkpoint_last.pt"):
        (tmp_path / name).write_bytes(b"half")
    Checkpointer(tmp_path, keep=2).discard_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_a_second_signal_ends_at_once_and_is_still_safe(run):
    ending = end_by_two(run, signal.SIGINT, workers=2, delay=0.0)
    assert ending.complaints == ()


def test_workers_do_not_outlive_a_killed_trainer_even_where_they_hang(run):
    life = begin(run, "the process", workers=2)
    workers = [pid for pid in members(life.pid) if pid != life.pid]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    life.kill()
    life.end()
    assert left_after(life) == []


def test_a_run_that_was_signalled_again_and_again_is_the_run_that_nobody_disturbed(run, corpus, tmp_path):
    assert what_differs(run, run_to_be_signalled(corpus, tmp_path / "undisturbed")) == []


def test_a_signal_breaks_off_validation_which_is_done_anew_when_the_run_goes_on(corpus, tmp_path, monkeypatch):
    flags = ("--batch_size", "13", "--gradient_accumulation_steps", "1", "--epochs", "1", "--num_workers", "0")
    batches = ("--validation_batch_seconds", "0.1")  # one utterance each
    flags = (*TINY_MODEL, *corpus.flags(), *run_folders(tmp_path), *flags, *batches)
    run, calls = build_run(begin_run([*flags])), []

    def recognize_and_signal(*arguments: object) -> evaluation.RecognizedBatch:
        calls.append(1)
        run.interruption.signal_number = signal.SIGTERM
        return recognize(*arguments)

    recognize = evaluation.recognize
    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="at step 2"):
        patched.setattr(evaluation, "recognize", recognize_and_signal)
        train(run)
    assert len(calls) == 1 and run.state.epochs_finished == 0
    run.storage.locks[0]._file.close()
    train(resumed := build_run(begin_run([*flags, "--resume", "auto"])))
    assert (resumed.state.step, resumed.state.epochs_finished) == (2, 1)
    assert [record["utterances"] for record in read_log(tmp_path, "validation")] == [5]


AFTER_TRAINING = """
import os, signal, sys, time
from konkanivani.training.interruption import Interruption
interruption = Interruption()
interruption.install()
if sys.argv[1] == "after":
    interruption.end_training()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.01)
print("lives", flush=True)
interruption.end_training()
"""


def test_once_training_is_over_a_signal_ends_at_once_and_one_that_came_before_is_not_forgotten():
    after = warm_parent().run_program(AFTER_TRAINING, "after")
    assert (after.returncode, after.stdout) == (128 + signal.SIGTERM, "") and "--resume auto" in after.stderr
    before = warm_parent().run_program(AFTER_TRAINING, "before")
    assert before.stdout == "lives\n" and "Interrupted: Stopped by a signal" in before.stderr


def test_what_is_forked_while_signals_are_held_back_is_deaf_to_them_and_the_trainer_is_not():
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    with defer_signals():
        child = os.fork()
        if child == 0:
            os._exit(10 + len(asked & signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    assert not asked & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_within_a_product_overwrites_nothing():
    broken = (-signal.SIGABRT, -signal.SIGSEGV)
    for life, codes in (("run_script", (0,)), ("--bare", broken)):
        if life == "--bare" and not is_onednn_clobbering_its_stack():
            pytest.skip("the negative control needs a oneDNN before 3.11.2 with AVX2 or more")
        process = warm_parent().run(ROOT / "tests" / "faults" / "signal_storm.py", life)
        assert process.returncode in codes, process.stdout + process.stderr


def is_onednn_clobbering_its_stack() -> bool:
    """Return whether oneDNN's products point the stack register into the heap: up to 3.11.1, with AVX.

    A signal handler then overwrites the heap.
    """
    found = re.search(r"MKL-DNN v([0-9.]+)", torch.__config__.show())
    version = tuple(map(int, found[1].split("."))) if found else (99,)
    return version < (3, 11, 2) and torch.backends.cpu.get_cpu_capability().startswith("AVX")
