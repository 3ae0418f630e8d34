"""A pool of workers ends at Ctrl-C at any moment of its start, and if a worker is killed."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.timeouts import PROCESS_TIMEOUT

INTERRUPTED_START = """
import os, signal, sys, threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import _ExecutorManagerThread
from konkanivani.worker_processes import worker_pool

def interrupt(thread):
    if isinstance(thread, _ExecutorManagerThread):
        os.kill(os.getpid(), signal.SIGINT)
    start(thread)

start, threading.Thread.start = threading.Thread.start, interrupt
try:
    with worker_pool(2) if sys.argv[1] == "worker_pool" else ProcessPoolExecutor(2) as pool:
        pool.submit(os.getpid).result()
except RuntimeError as error:
    print(error, flush=True)
    os.killpg(0, signal.SIGKILL)  # it would wait for ever for its workers
"""


def test_ctrl_c_during_the_start_of_a_pool_ends_the_process():
    process = run_program(INTERRUPTED_START, "worker_pool")
    assert process.returncode == -signal.SIGINT and process.stderr.endswith("KeyboardInterrupt\n")


def test_negative_control_a_plain_pool_cannot_be_joined():
    process = run_program(INTERRUPTED_START, "ProcessPoolExecutor")
    assert process.stdout == "cannot join thread before it is started\n"


ENDED_POOL = """
import os, signal, sys, time
from konkanivani.errors import ResourceError
from konkanivani.worker_processes import worker_pool

def sleep_or_return(seconds, task):
    time.sleep(seconds)
    return os.getpid()

try:
    with worker_pool(2, is_killed_at_error=True) as pool:
        pids = pool.map(sleep_or_return, [0.1, 0.1, 600, 600, 600], [b"t" * int(sys.argv[2])] * 5)
        pid = next(pids)
        if sys.argv[1] == "error":
            raise ValueError("an error in the block")
        os.kill(pid, signal.SIGKILL)
        list(pids)
except (ResourceError, ValueError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small tasks", "tasks larger than a pipe"])
@pytest.mark.parametrize("ending, error", [("error", "ValueError an error"), ("killed", "ResourceError A worker")])
def test_pool_ends_while_tasks_run(ending, error, size):
    process = run_program(ENDED_POOL, ending, str(size))
    assert process.returncode == 0 and process.stdout.startswith(error), process.stderr


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process group of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT, start_new_session=True
    )
