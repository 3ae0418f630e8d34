"""Full disks; benchmarks/faults.py --parts disk_full --full has all positions."""

import os
import subprocess
import sys

import pytest
import torch

from konkanivani.checkpoints import checkpoint
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST, PREVIOUS, Checkpointer
from konkanivani.data.manifest import Rejection, Rejections
from konkanivani.errors import ResourceError
from tests.conftest import ROOT
from tests.faults.disk_full import (
    FULL_DISKS,
    OPERATIONS,
    full_disk_findings,
    full_log_findings,
    small_disk,
    three_failures_findings,
    two_trainers_findings,
)
from tests.faults.resuming import ResumeBench
from tests.patience import PATIENCE

CASES = {case.name: case for case in FULL_DISKS}


@pytest.fixture
def mounts(tmp_path):
    """Skip the test if no disk can be mounted."""
    try:
        with small_disk(tmp_path / "try", 2**16):
            pass
    except PermissionError as error:
        pytest.skip(str(error))


def test_one_save_that_fails_keeps_the_old_checkpoint_and_is_made_up_for(bench: ResumeBench, tmp_path):
    assert full_disk_findings(bench, CASES["no file beyond 50.00% of a checkpoint"], tmp_path / "run") == []


def a_checkpoint(step: int) -> Checkpoint:
    states = {"model": {"weight": torch.full((1000,), float(step))}, "progress": {"step": step}}
    return Checkpoint("", b"tokens", 3, step, 0, states)


@pytest.mark.parametrize("name, number", [*OPERATIONS, ("replace", 3), ("replace", 4)])
def test_each_operation_of_a_save_may_be_refused(name, number, tmp_path, monkeypatch):
    """The save has the epoch and the best checkpoint, so four names are written."""
    keeper = Checkpointer(tmp_path, keep=2)
    keeper.save(a_checkpoint(2))
    before, calls = (tmp_path / LAST).read_bytes(), []
    place = checkpoint if name == "open" else os
    original = open if name == "open" else getattr(os, name)

    def refused(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    with monkeypatch.context() as full:
        full.setattr(place, name, refused, raising=False)
        with pytest.raises(ResourceError, match="No space left on device"):
            keeper.save(a_checkpoint(4), epoch=1, is_best=True)
    assert len(calls) == number and (tmp_path / LAST).read_bytes() == before
    assert all(read_checkpoint(path).step in (2, 4) for path in tmp_path.iterdir()), "something half written is left"
    keeper.save(a_checkpoint(6))
    steps = [read_checkpoint(tmp_path / file).step for file in (LAST, PREVIOUS)]
    assert steps == [6, 2]


def test_three_in_a_row_end_with_6(bench, tmp_path):
    assert three_failures_findings(bench, 0.5, tmp_path / "run") == []


def test_a_full_disk_of_logs_costs_records_only(bench, mounts, tmp_path):
    assert full_log_findings(bench, tmp_path / "run") == []


def test_a_second_trainer_is_refused_and_the_first_one_is_exact(bench, tmp_path):
    assert two_trainers_findings(bench, tmp_path / "run") == []


PRINTS_TO_A_FULL_DISK = """
import sys
from konkanivani.command_line import ignore_lost_output, run_script
from konkanivani.errors import DataError

def action():
    with ignore_lost_output():
        for _ in range(10_000):
            print("lost", flush=True)
            print("lost too", file=sys.stderr)
        open(sys.argv[1], "w").close()
    raise DataError("unheard")

sys.exit(run_script(action))
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_output_into_a_full_disk_ends_nothing_and_the_exit_code_stays(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PRINTS_TO_A_FULL_DISK, str(tmp_path / "done")]
        done = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 3 and (tmp_path / "done").exists()


def test_a_list_of_rejections_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, capsys):
    class Manifest(list):
        path, broken = "train.jsonl", ()

    rejections = Rejections(tmp_path / "nowhere" / "rejected.jsonl", most=1.0)
    rejections.begin(Manifest([1, 2]))
    rejections.add([Rejection("train.jsonl", 1, "a.flac", "it is not a file", is_broken=True)])
    said = capsys.readouterr().out
    assert said.count("cannot be written (No such file or directory)") == 2 and "Skipped: a.flac" in said
