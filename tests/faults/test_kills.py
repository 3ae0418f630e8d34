"""Invariants 1 and 8 on the real script: after repeated kills, the run equals one without kills."""

import os
import random
import shutil

import pytest

from konkanivani.checkpoints.checkpointer import LAST
from tests.conftest import Corpus, write_corpus
from tests.faults import killing
from tests.faults.fuse import POINTS, WORSE_IN_A_ROW
from tests.faults.killing import complaints_of, kill_at_points, kill_at_random, left_behind, what_differs
from tests.faults.long_run import LongRun


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Return a corpus of three steps per epoch: most points occur once per epoch."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 18, "valid": 3}, lengths=range(1, 3))


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory, request) -> LongRun:
    """Return a run that was killed at every point of a save, and twice in a row at the critical ones.

    Without --full, skips points that only differ in the byte position of a write or in the name given to the file.
    """
    points = [*POINTS, *WORSE_IN_A_ROW]
    alike = ("after 1 %", "after 99 %", "previous: ", "best: before what", "best: after")
    if not request.config.getoption("--full"):
        points = [point for point in points if not point.label.startswith(alike)]
    run = killing.run_to_be_killed_at_points(corpus, tmp_path_factory.mktemp("points") / "killed")
    for death in kill_at_points(run, len(points), points):
        assert death.complaints == (), death
    return run


def test_killed_at_every_point_of_a_save_it_is_the_run_that_nobody_killed(killed, corpus, tmp_path):
    assert what_differs(killed, killing.run_to_be_killed_at_points(corpus, tmp_path / "undisturbed")) == []


def test_killed_at_random_with_workers_it_is_the_run_that_nobody_killed(corpus, tmp_path):
    run, draw = killing.run_to_be_killed_at_random(corpus, tmp_path / "killed"), random.Random(0)
    for _ in range(3):
        death = kill_at_random(run, draw)
        assert death.complaints == (), death
    assert what_differs(run, killing.run_to_be_killed_at_random(corpus, tmp_path / "undisturbed")) == []


@pytest.mark.parametrize("is_torn, said", [(True, "cannot be read"), (False, "was found")])
def test_negative_control_a_torn_or_lost_checkpoint_is_complained_of(killed, is_torn: bool, said: str, tmp_path):
    run = LongRun(tmp_path / "copy", killed.flags)
    shutil.copytree(killed.directory, run.directory)
    assert complaints_of(run.aftermath(), -9, most_lost=1) == []
    if is_torn:
        os.truncate(run.checkpoints / LAST, (run.checkpoints / LAST).stat().st_size // 2)
    else:  # the state of a trainer that published only the first of these epochs
        for later in sorted(run.checkpoints.glob("checkpoint_*"), key=lambda path: path.stat().st_mtime)[1:]:
            later.unlink()
    assert said in "".join(complaints_of(run.aftermath(), -9, most_lost=1))


def test_negative_control_a_leftover_is_complained_of(killed, tmp_path):
    run = LongRun(tmp_path / "copy", killed.flags)
    shutil.copytree(killed.directory, run.directory)
    (run.checkpoints / f"{LAST}.partial").write_bytes(b"PK")
    assert f"{LAST}.partial was left behind" in left_behind(run)
