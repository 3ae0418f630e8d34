"""No process outlives its test, and a test run under nohup behaves as without it."""

import os
import signal
import subprocess
import sys

from tests.conftest import ROOT
from tests.process_cleanup import descendants, kill_leftovers

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(3600)"]
GROUP = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
FORKS = """
import os, time
if (fork := os.fork()) == 0:
    time.sleep(1)
    os._exit(0)
print(fork, flush=True)
raise SystemExit(os.waitpid(fork, 0)[1])
"""
PRINT_DEFAULT_HANDLER = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, end='')"
IGNORE_SIGHUP = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.argv[1] == "reset":
    import tests.conftest
subprocess.run([sys.executable, "-c", sys.argv[2]])
signal.raise_signal(signal.SIGHUP)
print(" and still runs", end="")
"""


def test_only_leftover_processes_are_killed():
    started: list[subprocess.Popen] = []
    try:
        for command, own_session in ((SLEEP, False), (SLEEP, False), ([sys.executable, "-c", GROUP, SLEEP[2]], True)):
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session))
            started[-1].stdout.readline()
        left = descendants(os.getpid())
        assert left >= {one.pid for one in started} and len(descendants(started[2].pid)) == 1
        kill_leftovers(left - {started[0].pid})
        assert [one.wait() for one in started[1:]] == [-signal.SIGKILL] * 2
        assert started[2].stdout.read() == b""  # no process holds the other end
        assert started[0].poll() is None
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_fork_of_a_running_program_is_not_killed():
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE) as program:
        fork = int(program.stdout.readline())
        kill_leftovers({fork})
        assert program.wait() == 0


def test_child_process_receives_sighup_under_nohup():
    for mode, expected in (("reset", "True"), ("unchanged", "False")):
        command = [sys.executable, "-c", IGNORE_SIGHUP, mode, PRINT_DEFAULT_HANDLER]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == f"{expected} and still runs", done.stderr
