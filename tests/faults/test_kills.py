"""Invariants 1 and 8 on the real script: after repeated kills, the run equals one without kills."""

import os
import random
import shutil

import pytest

from konkanivani.checkpoints.checkpointer import LAST
from tests.conftest import Corpus, write_corpus
from tests.faults.long_run import LongRun
from tests.faults.repeated_kills import (
    differences_from_undisturbed,
    kill_at_points,
    kill_at_random,
    leftover_files,
    run_for_kills_at_points,
    run_for_random_kills,
    state_errors,
)
from tests.faults.save_killer import CRITICAL_SEQUENCE, POINTS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Return a corpus of three steps per epoch: most points occur once per epoch."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tones", {"train": 18, "valid": 3}, lengths=range(1, 3))


@pytest.fixture(scope="module")
def killed_run(corpus, tmp_path_factory, request) -> LongRun:
    """Return a run that was killed at every point of a save, and twice in a row at the critical ones.

    Without --full, skips points that only differ in the byte position of a write or in the name given to the file.
    """
    points = [*POINTS, *CRITICAL_SEQUENCE]
    alike = ("after 1 %", "after 99 %", "previous: ", "best: before a leftover", "best: after")
    if not request.config.getoption("--full"):
        points = [point for point in points if not point.label.startswith(alike)]
    run = run_for_kills_at_points(corpus, tmp_path_factory.mktemp("points") / "killed")
    for death in kill_at_points(run, len(points), points):
        assert death.errors == (), death
    return run


def test_run_killed_at_every_point_of_a_save_equals_undisturbed_run(killed_run, corpus, tmp_path):
    assert differences_from_undisturbed(killed_run, run_for_kills_at_points(corpus, tmp_path / "undisturbed")) == []


@pytest.mark.full
def test_run_killed_at_random_with_workers_equals_undisturbed_run(corpus, tmp_path):
    run, draw = run_for_random_kills(corpus, tmp_path / "killed"), random.Random(0)
    for _ in range(3):
        death = kill_at_random(run, draw)
        assert death.errors == (), death
    assert differences_from_undisturbed(run, run_for_random_kills(corpus, tmp_path / "undisturbed")) == []


@pytest.mark.parametrize("is_torn, message", [(True, "cannot be read"), (False, "was found")])
def test_negative_control_a_torn_or_lost_checkpoint_is_reported(killed_run, is_torn: bool, message: str, tmp_path):
    run = LongRun(tmp_path / "copy", killed_run.flags)
    shutil.copytree(killed_run.directory, run.directory)
    assert state_errors(run.end_state(), -9, max_steps_lost=1) == []
    if is_torn:
        os.truncate(run.checkpoints / LAST, (run.checkpoints / LAST).stat().st_size // 2)
    else:  # the state of a trainer that published only the first of these epochs
        for later in sorted(run.checkpoints.glob("checkpoint_*"), key=lambda path: path.stat().st_mtime)[1:]:
            later.unlink()
    assert message in "".join(state_errors(run.end_state(), -9, max_steps_lost=1))


def test_negative_control_a_leftover_file_is_reported(killed_run, tmp_path):
    run = LongRun(tmp_path / "copy", killed_run.flags)
    shutil.copytree(killed_run.directory, run.directory)
    (run.checkpoints / f"{LAST}.partial").write_bytes(b"PK")
    assert f"{LAST}.partial was left behind" in leftover_files(run)
