"""Audio workers that are lost; benchmarks/faults.py --parts loaders --full has all cases."""

import signal

import pytest

from tests.faults.disk_full import small_disk
from tests.faults.resumed_runs import ResumeBench
from tests.faults.worker_failures import LostWorker, lost_worker_findings, shared_memory_findings

CASES = (LostWorker("killed once", signal.SIGKILL, True), LostWorker("crashes each time", signal.SIGSEGV, False))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dead_worker_is_replaced_once(bench: ResumeBench, case, tmp_path):
    assert lost_worker_findings(bench, case, tmp_path / "run") == []


@pytest.mark.full  # it waits for the whole timeout
def test_stopped_worker_ends_the_run_within_the_timeout(bench, tmp_path):
    assert lost_worker_findings(bench, LostWorker("stopped", signal.SIGSTOP, False, 1), tmp_path / "run") == []


def test_run_with_too_little_shared_memory_equals_undisturbed_run(bench, tmp_path):
    try:
        with small_disk(tmp_path / "try", 2**16):
            pass
    except PermissionError as error:
        pytest.skip(str(error))
    assert shared_memory_findings(bench, tmp_path / "run", 64) == []
    # Negative control: with enough shared memory, the run does not mention it.
    assert shared_memory_findings(bench, tmp_path / "enough", 2**16) == [
        "it does not say that shared memory is too small"
    ]
