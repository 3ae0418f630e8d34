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
from tests.faults.resumed_runs import ResumeBench
from tests.timeouts import PROCESS_TIMEOUT

CASES = {case.name: case for case in FULL_DISKS}


@pytest.fixture
def requires_mount(tmp_path):
    """Skip the test if no disk can be mounted."""
    try:
        with small_disk(tmp_path / "try", 2**16):
            pass
    except PermissionError as error:
        pytest.skip(str(error))


def test_failed_save_keeps_the_old_checkpoint_and_the_next_save_succeeds(bench: ResumeBench, tmp_path):
    assert full_disk_findings(bench, CASES["no file beyond 50.00% of a checkpoint"], tmp_path / "run") == []


def make_checkpoint(step: int) -> Checkpoint:
    states = {"model": {"weight": torch.full((1000,), float(step))}, "progress": {"step": step}}
    return Checkpoint("", b"tokens", 3, step, 0, states)


@pytest.mark.parametrize("name, number", [*OPERATIONS, ("replace", 3), ("replace", 4)])
def test_failed_file_operation_in_a_save_leaves_only_whole_checkpoints(name, number, tmp_path, monkeypatch):
    """The save has the epoch and the best checkpoint, so four names are written."""
    keeper = Checkpointer(tmp_path, keep=2)
    keeper.save(make_checkpoint(2))
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
            keeper.save(make_checkpoint(4), epoch=1, is_best=True)
    assert len(calls) == number and (tmp_path / LAST).read_bytes() == before
    assert all(read_checkpoint(path).step in (2, 4) for path in tmp_path.iterdir()), "something half written is left"
    keeper.save(make_checkpoint(6))
    steps = [read_checkpoint(tmp_path / file).step for file in (LAST, PREVIOUS)]
    assert steps == [6, 2]


def test_three_failed_saves_in_a_row_exit_with_6(bench, tmp_path):
    assert three_failures_findings(bench, 0.5, tmp_path / "run") == []


def test_full_log_disk_loses_only_log_records(bench, requires_mount, tmp_path):
    assert full_log_findings(bench, tmp_path / "run") == []


def test_second_trainer_in_a_folder_is_rejected_and_the_first_unchanged(bench, tmp_path):
    assert two_trainers_findings(bench, tmp_path / "run") == []


PROGRAM_WITH_LOST_OUTPUT = """
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
def test_output_to_a_full_disk_changes_neither_run_nor_exit_code(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM_WITH_LOST_OUTPUT, str(tmp_path / "done")]
        done = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, timeout=PROCESS_TIMEOUT)
    assert done.returncode == 3 and (tmp_path / "done").exists()


def test_unwritable_rejection_list_is_reported_without_stopping(tmp_path, capsys):
    class Manifest(list):
        path, broken = "train.jsonl", ()

    rejections = Rejections(tmp_path / "nowhere" / "rejected.jsonl", most=1.0)
    rejections.begin(Manifest([1, 2]))
    rejections.add([Rejection("train.jsonl", 1, "a.flac", "it is not a file", is_broken=True)])
    output = capsys.readouterr().out
    assert output.count("cannot be written (No such file or directory)") == 2 and "Skipped: a.flac" in output
