"""SIGTERM and SIGINT save at the next micro-batch boundary, a second one ends at once; no worker is left behind."""

import os
import random
import signal
import time

import pytest

from tests.faults.killing import what_differs
from tests.faults.lives import LongRun, members
from tests.faults.signalling import (
    begin,
    end_by_signal,
    end_by_two,
    end_while_workers_hang,
    run_to_be_signalled,
)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> LongRun:
    """One run that all these signals end in turn."""
    return run_to_be_signalled(corpus, tmp_path_factory.mktemp("signals") / "signalled")


@pytest.mark.parametrize(
    "number, target, workers",
    [
        (signal.SIGTERM, "the process", 0),
        (signal.SIGINT, "its group", 2),
        (signal.SIGTERM, "the shell script", 2),
    ],
    ids=["SIGTERM to the process", "SIGINT to the group", "SIGTERM to the shell script"],
)
def test_a_signal_saves_every_step_and_leaves_nobody_behind(run, number, target, workers):
    assert end_by_signal(run, number, target, workers, delay=0.1 * random.Random(workers).random()).complaints == ()


def test_a_signal_breaks_off_the_wait_for_workers_that_hang_and_kills_them(run):
    ending = end_while_workers_hang(run, signal.SIGTERM)
    assert ending.complaints == () and ending.seconds < 30


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
    time.sleep(0.2)
    assert members(life.pid) == []


def test_a_run_that_was_signalled_again_and_again_is_the_run_that_nobody_disturbed(run, corpus, tmp_path):
    assert what_differs(run, run_to_be_signalled(corpus, tmp_path / "undisturbed")) == []
