"""A pool of workers ends at Ctrl-C at any moment, and if a worker is killed at any moment."""

import subprocess
import sys
import time

import pytest

from konkanivani.errors import DataError
from konkanivani.worker_processes import WorkerTraceback, worker_pool
from tests.conftest import ROOT
from tests.timeouts import PROCESS_TIMEOUT


def square_slowly(number: int) -> int:
    time.sleep(0.05 * (3 - number % 4))  # later tasks end first
    return number**2


def fail() -> None:
    raise DataError("no such row")


def test_results_arrive_in_order_and_errors_with_the_traceback_of_the_worker():
    with worker_pool(3) as pool:
        assert list(pool.run((square_slowly, number) for number in range(10))) == [n**2 for n in range(10)]
        assert list(pool.run([])) == []
        with pytest.raises(DataError, match="no such row") as raised:
            list(pool.run([(fail,)]))
        assert isinstance(raised.value.__cause__, WorkerTraceback) and "in fail" in str(raised.value.__cause__)


BEGIN = """
import errno, multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import _ExecutorManagerThread
from multiprocessing.process import BaseProcess
from konkanivani import worker_processes
from konkanivani.errors import ResourceError
from konkanivani.worker_processes import worker_pool
"""

INTERRUPTED_PLAIN_POOL = """
def interrupt(thread):
    if isinstance(thread, _ExecutorManagerThread):
        os.kill(os.getpid(), signal.SIGINT)
    start(thread)

start, threading.Thread.start = threading.Thread.start, interrupt
try:
    with ProcessPoolExecutor(2) as pool:
        pool.submit(os.getpid).result()
except RuntimeError as error:
    print(error, flush=True)
    os.killpg(0, signal.SIGKILL)  # it would wait for ever for its workers
"""


def test_negative_control_a_plain_pool_cannot_be_joined_after_ctrl_c():
    assert run_program(INTERRUPTED_PLAIN_POOL).stdout == "cannot join thread before it is started\n"


INTERRUPTED_START = """
def interrupt(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # takes signals, as threads of OpenBLAS do
start, BaseProcess.start = BaseProcess.start, interrupt
try:
    with worker_pool(2) as pool:
        print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children())
"""


def test_ctrl_c_during_the_start_leaves_no_worker():
    process = run_program(INTERRUPTED_START)
    assert process.stdout == "interrupted []\n" and process.stderr == ""


FAILED_FORK = """
def fail_second(fork=os.fork, calls=[]):
    calls.append(1)
    if len(calls) == 2:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

os.fork = fail_second
try:
    with worker_pool(2):
        pass
except ResourceError as error:
    print(error, multiprocessing.active_children())
"""


def test_failed_fork_leaves_no_worker():
    output = run_program(FAILED_FORK).stdout
    assert output.startswith("A worker process could not be started") and output.endswith(" []\n")


ENDING = """
def work(seconds, size):
    time.sleep(seconds)
    return os.getpid(), b"r" * size

class Task:
    def __init__(self, seconds, size=1):
        self.seconds, self.padding, self.size = seconds, b"t" * 1_000_000, size
    def __call__(self):
        return work(self.seconds, self.size)

def wait_and_kill(connections):
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    return wait(connections)

ending = sys.argv[1]
try:
    with worker_pool(1 if ending == "sending" else 2) as pool:
        (pid, _), *_ = list(pool.run([(Task(0.1),)] * 2))
        if ending == "idle":
            os.kill(pid, signal.SIGKILL)
        elif ending == "sending":
            wait, worker_processes.wait = worker_processes.wait, wait_and_kill
            list(pool.run([(Task(0, 10_000_000),)]))  # larger than the buffer of a connection
        else:
            if ending == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
            threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
            list(pool.run([(Task(600),)] * 5))
    print("ended")
except (ResourceError, KeyboardInterrupt) as error:
    print(type(error).__name__)
print(multiprocessing.active_children())
"""


@pytest.mark.parametrize(
    ("ending", "result"),
    [
        ("Ctrl-C", "KeyboardInterrupt"),
        ("a worker killed while it works", "ResourceError"),
        ("sending", "ResourceError"),
        ("idle", "ended"),
    ],
)
def test_pool_ends(ending, result):
    process = run_program(ENDING, ending)
    assert process.stdout == f"{result}\n[]\n" and process.returncode == 0, process.stderr


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process group of its own."""
    command = [sys.executable, "-c", BEGIN + program, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT, start_new_session=True
    )
