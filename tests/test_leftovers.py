"""No process outlives its test, and a test run under nohup is like any other."""

import os
import signal
import subprocess
import sys

from tests.conftest import ROOT
from tests.leftovers import descendants, kill_leftovers

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
HEARS = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, end='')"
IGNORING = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if sys.argv[1] == "heeding":
    import tests.conftest
subprocess.run([sys.executable, "-c", sys.argv[2]])
signal.raise_signal(signal.SIGHUP)
print(" and lives on", end="")
"""


def test_what_a_test_leaves_behind_is_ended_and_nothing_else():
    began: list[subprocess.Popen] = []
    try:
        for command, own in ((SLEEP, False), (SLEEP, False), ([sys.executable, "-c", GROUP, SLEEP[2]], True)):
            began.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own))
            began[-1].stdout.readline()
        left = descendants(os.getpid())
        assert left >= {one.pid for one in began} and len(descendants(began[2].pid)) == 1
        kill_leftovers(left - {began[0].pid})
        assert [one.wait() for one in began[1:]] == [-signal.SIGKILL] * 2
        assert began[2].stdout.read() == b""  # no process holds the other end
        assert began[0].poll() is None
    finally:
        for one in began:
            one.kill()
            one.wait()


def test_a_fork_of_a_program_that_serves_several_tests_is_that_programs_affair():
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE) as program:
        fork = int(program.stdout.readline())
        kill_leftovers({fork})
        assert program.wait() == 0


def test_what_is_started_under_nohup_hears_its_terminal_close():
    for mode, heard in (("heeding", "True"), ("as it is", "False")):
        command = [sys.executable, "-c", IGNORING, mode, HEARS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == f"{heard} and lives on", done.stderr
