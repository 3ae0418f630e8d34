"""A script in a fork of the fork server has the same output and effects as in a new interpreter."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import run_script
from tests.faults.long_run import processes_in_group
from tests.fork_server import ROOT, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT

SCRIPT = """
import atexit, os, sys, threading, time
atexit.register(print, "the end")
threading.Thread(target=lambda: time.sleep(0.1) or print("a thread")).start()
print(__name__, sys.argv, os.getcwd(), os.environ["OMP_NUM_THREADS"], os.environ.get("VARIABLE"), sys.stdin.read())
print(sys.path[0], [path for path in sys.path if "konkani" in path], "set_by_script" in vars(sys), file=sys.stderr)
sys.set_by_script = True
os.environ["VARIABLE"] = "by another"
{end}
"""
ENDS = {
    "success": "",
    "exit code": "sys.exit(7)",
    "exit message": "sys.exit('why')",
    "exception": "1 / 0",
    "killed": "os.abort()",
}


@pytest.mark.parametrize("name", ENDS)
def test_fork_equals_new_interpreter_and_does_not_affect_next_fork(name, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT.format(end=ENDS[name]))
    monkeypatch.setenv("VARIABLE", "by the test")
    warm, again, cold = (
        run_script(str(tmp_path / "script.py"), "a", "b c", cwd=tmp_path, is_cold=is_cold)
        for is_cold in (False, False, True)
    )
    assert warm.returncode == again.returncode == cold.returncode
    assert warm.stdout == again.stdout == cold.stdout
    ends = [[done.stderr.splitlines()[0], done.stderr.splitlines()[-1]] for done in (warm, again, cold)]
    assert ends[0] == ends[1] == ends[2] or name == "killed"  # the interpreter reports its location


def test_startup_variables_require_a_new_interpreter(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "script.py").write_text("import torch; print(torch.__file__)")
    assert "site-packages" in run_script(str(tmp_path / "script.py"), cwd=Path("/")).stdout
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_script(str(tmp_path / "script.py"), cwd=Path("/")).stdout == f"{tmp_path}/torch.py\n"
    with pytest.raises(AssertionError):
        fork_server().start(Job(tmp_path / "script.py", (), tmp_path / "output"))


def test_running_forks_end_with_the_parent(tmp_path):
    (tmp_path / "script.py").write_text("import time; print('began', flush=True); time.sleep(3600)")
    output = tmp_path / "output"
    program = (
        "import sys, time; from pathlib import Path; from tests.fork_server import Job, ForkServer; "
        "parent, output = ForkServer(('torch',)), Path(sys.argv[2]); "
        "print(parent.start(Job(Path(sys.argv[1]), (), output)).pid, flush=True); "
        "[time.sleep(0.01) for _ in iter(lambda: output.exists() and output.read_text(), 'began\\n')]"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "script.py"), str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while processes_in_group(int(ended.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


TEST_FILE = (
    "import subprocess, pytest\ndef test_starts(): subprocess.run(['true'])\ndef test_does_not(): pass\n"
    "@pytest.mark.full\ndef test_more(): pass\n"
    "@pytest.mark.parametrize('number', [1, 2])\ndef test_both(number): pass\n"
)


@pytest.mark.parametrize(
    "flags, expected", [((), "4 passed"), (("--quick",), "2 passed, 1 skipped"), (("--full",), "5 passed")]
)
def test_quick_skips_processes_and_parameters_and_full_adds_tests(flags, expected, tmp_path, monkeypatch):
    (tmp_path / "test_two.py").write_text(TEST_FILE)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # a new process has none at its start
    plain = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path))
    done = fork_server().run_program("import pytest, sys; pytest.main(sys.argv[1:])", *plain, *flags, cwd=ROOT)
    assert expected in done.stdout
