"""Disks without room; benchmarks/faults.py --parts room --full has all positions."""

import os
import subprocess
import sys

import pytest

from konkanivani.data.rejections import Rejection, Rejections
from tests.conftest import ROOT
from tests.faults.resuming import ResumeBench
from tests.faults.room import (
    FULL_DISKS,
    full_disk_findings,
    full_log_findings,
    small_disk,
    three_failures_findings,
    two_trainers_findings,
)

CASES = {case.name: case for case in FULL_DISKS}


@pytest.fixture
def mounts(tmp_path):
    """Skips where no disk can be mounted."""
    try:
        with small_disk(tmp_path / "try", 2**16):
            pass
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["no file beyond 50.00% of a checkpoint", "replace 2 refused", "read-only"])
def test_one_save_that_fails_keeps_the_old_checkpoint_and_is_made_up_for(bench: ResumeBench, name, tmp_path):
    assert full_disk_findings(bench, CASES[name], tmp_path / "run") == []


def test_a_full_disk_too(bench, mounts, tmp_path):
    assert full_disk_findings(bench, CASES["room for 90.00% of a checkpoint"], tmp_path / "run") == []


def test_three_in_a_row_end_with_6(bench, tmp_path):
    assert three_failures_findings(bench, 0.5, tmp_path / "run") == []


def test_a_full_disk_of_logs_costs_records_only(bench, mounts, tmp_path):
    assert full_log_findings(bench, tmp_path / "run") == []


def test_a_second_trainer_is_refused_and_the_first_one_is_exact(bench, tmp_path):
    assert two_trainers_findings(bench, tmp_path / "run") == []


PRINTS_TO_A_FULL_DISK = """
import sys
from konkanivani.command_line import output_may_be_lost, run_script
from konkanivani.errors import DataError

def action():
    with output_may_be_lost():
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
        done = subprocess.run(command, stdout=full, stderr=full, cwd=ROOT, timeout=60)
    assert done.returncode == 3 and (tmp_path / "done").exists()


def test_a_list_of_rejections_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, capsys):
    class Manifest(list):
        path, broken = "train.jsonl", ()

    rejections = Rejections(tmp_path / "nowhere" / "rejected.jsonl", most=1.0)
    rejections.begin(Manifest([1, 2]))
    rejections.add([Rejection("train.jsonl", 1, "a.flac", "it is no file", is_broken=True)])
    said = capsys.readouterr().out
    assert said.count("cannot be written (No such file or directory)") == 2 and "Left out: a.flac" in said
