"""A signal saves at the next micro-batch boundary, a second one exits at once; no worker remains."""

import os
import random
import re
import signal
import subprocess
import sys

import pytest
import torch

from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.errors import Interrupted, defer_signals
from konkanivani.recipe.build import build_run
from konkanivani.training import validation as evaluation
from konkanivani.training.interruption import PATIENCE
from konkanivani.training.loop import train
from tests.conftest import ROOT, TINY_MODEL, mark_full, read_log, run_folders
from tests.faults.long_run import LongRun, processes_in_group
from tests.faults.repeated_kills import differences_from_undisturbed
from tests.faults.signals import (
    HangingCall,
    IgnoredSighup,
    remaining_processes,
    run_for_rehearsal,
    run_for_signals,
    send_signal,
    start_until_first_step,
    stop_by_closing_terminal,
    stop_by_second_signal,
    stop_by_signal,
    stop_during_hanging_call,
    stop_during_hanging_rehearsal,
    stop_while_workers_hang,
)
from tests.fork_server import fork_server
from tests.run_setup import begin_run


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> LongRun:
    """Return one run that is ended by each of these signals in turn."""
    return run_for_signals(corpus, tmp_path_factory.mktemp("signals") / "signalled")


@pytest.mark.parametrize(
    "number, target, workers",
    [(signal.SIGTERM, "the process", 0), (signal.SIGINT, "its group", 2), (signal.SIGTERM, "the shell script", 2)],
    ids=["SIGTERM to the process", "SIGINT to the group", "SIGTERM to the shell script"],
)
def test_signal_saves_every_step_and_leaves_no_process(run, number, target, workers):
    assert stop_by_signal(run, number, target, workers, delay=0.1 * random.Random(workers).random()).errors == ()


def test_closed_terminal_loses_no_step(run):
    assert stop_by_closing_terminal(run, workers=2).errors == ()


def test_run_under_nohup_survives_sighup(run):
    trainer = start_until_first_step(run, "the process", 2, fault=IgnoredSighup())
    send_signal(trainer, signal.SIGHUP, "its group")
    logged = run.logged_step()
    trainer.wait_until(lambda: run.logged_step() > logged + 1, "a step after the signal")
    send_signal(trainer, signal.SIGTERM, "its group")
    assert trainer.wait() == 128 + signal.SIGTERM and remaining_processes(trainer) == []


def test_signal_interrupts_waiting_for_hanging_workers_and_kills_them(run):
    ending = stop_while_workers_hang(run, signal.SIGTERM)
    assert ending.errors == ()


@pytest.mark.parametrize(
    "fault",
    [
        HangingCall("konkanivani.training.step.forward_and_backward", 2),
        *mark_full(HangingCall("konkanivani.training.validation.recognize", 1)),
    ],
    ids=["in a micro-batch", "in validation"],
)
def test_hanging_call_is_abandoned_and_earlier_steps_are_saved(run, fault):
    ending = stop_during_hanging_call(run, signal.SIGTERM, fault)
    assert ending.errors == () and PATIENCE <= ending.seconds < 120
    assert not list(run.checkpoints.glob("*.partial"))


@pytest.mark.parametrize("signals", [*mark_full(1), 2])
def test_hanging_rehearsal_leaves_no_files(corpus, tmp_path, signals):
    assert stop_during_hanging_rehearsal(run_for_rehearsal(corpus, tmp_path), signals) == [".lock"]


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    kept = ("average.pt.partial", "checkpoint_last.pt")  # the first is being written by `konkanivani average`
    for name in ("rehearsal.partial", "checkpoint_last.pt.partial", "checkpoint_epoch_3.pt.partial", *kept):
        (tmp_path / name).write_bytes(b"half")
    Checkpointer(tmp_path, keep=2).discard_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_second_signal_leaves_valid_checkpoints_and_no_process(run):
    ending = stop_by_second_signal(run, signal.SIGINT, workers=2, delay=0.0)
    assert ending.errors == ()


def test_workers_exit_after_the_trainer_is_killed_even_if_they_hang(run):
    trainer = start_until_first_step(run, "the process", workers=2)
    workers = [pid for pid in processes_in_group(trainer.pid) if pid != trainer.pid]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGSTOP)
    trainer.kill()
    trainer.wait()
    assert remaining_processes(trainer) == []


@pytest.mark.full
def test_repeatedly_signalled_run_equals_undisturbed_run(run, corpus, tmp_path):
    assert differences_from_undisturbed(run, run_for_signals(corpus, tmp_path / "undisturbed")) == []


def test_signal_interrupts_validation_which_is_repeated_on_resume(corpus, tmp_path, monkeypatch):
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


def test_signal_after_training_exits_at_once_and_an_earlier_one_is_handled():
    after = fork_server().run_program(AFTER_TRAINING, "after")
    assert (after.returncode, after.stdout) == (128 + signal.SIGTERM, "") and "--resume auto" in after.stderr
    before = fork_server().run_program(AFTER_TRAINING, "before")
    assert before.stdout == "lives\n" and "Interrupted: Stopped by a signal" in before.stderr


def test_only_the_forked_child_keeps_deferred_signals_blocked():
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    with defer_signals():
        child = os.fork()
        if child == 0:
            os._exit(10 + len(asked & signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    assert not asked & signal.pthread_sigmask(signal.SIG_BLOCK, ())


DEFERRING = """
import contextlib, os, signal, sys, threading, time
from konkanivani import errors
from konkanivani.training.interruption import Interruption
if sys.argv[2] == "mask":
    errors.signal = type("Signals", (), vars(signal) | {"signal": lambda number, handler: None})
elif sys.argv[2] == "training":
    (interruption := Interruption()).install()
# A thread that takes signals, as OpenBLAS and OpenMP have.
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    with errors.defer_signals():
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        time.sleep(0.1)
        print("deferred", flush=True)
    time.sleep(0.1)
    print("requested" if interruption.is_requested() else "", flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "name, kind, lines, code",
    [
        ("SIGINT", "", "deferred interrupted", 0),
        ("SIGTERM", "", "deferred", -signal.SIGTERM),
        ("SIGINT", "training", "deferred requested", 0),  # as one request: two end the process
        ("SIGTERM", "training", "deferred requested", 0),
        ("SIGINT", "mask", "interrupted", 0),
    ],
    ids=["SIGINT", "SIGTERM", "SIGINT in training", "SIGTERM in training", "negative control: only the mask"],
)
def test_signals_are_deferred_although_other_threads_take_them(name, kind, lines, code):
    process = subprocess.run([sys.executable, "-c", DEFERRING, name, kind], cwd=ROOT, capture_output=True, text=True)
    assert (process.stdout.split(), process.returncode) == (lines.split(), code), process.stderr


def test_signal_during_a_onednn_product_does_not_corrupt_memory():
    broken = (-signal.SIGABRT, -signal.SIGSEGV)
    for mode, codes in (("run_script", (0,)), ("--bare", broken)):
        if mode == "--bare" and not is_onednn_clobbering_its_stack():
            pytest.skip("the negative control needs a oneDNN before 3.11.2 with AVX2 or more")
        process = fork_server().run(ROOT / "tests" / "faults" / "signal_storm.py", mode)
        assert process.returncode in codes, process.stdout + process.stderr


def is_onednn_clobbering_its_stack() -> bool:
    """Return whether oneDNN's products point the stack register into the heap: up to 3.11.1, with AVX.

    A signal handler then overwrites the heap.
    """
    match = re.search(r"MKL-DNN v([0-9.]+)", torch.__config__.show())
    version = tuple(map(int, match[1].split("."))) if match else (99,)
    return version < (3, 11, 2) and torch.backends.cpu.get_cpu_capability().startswith("AVX")
