"""Start of scripts: --help and usage errors without torch, closed streams as /dev/null, also as a module."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from tests.conftest import ROOT, TRAINER, mark_full, run_folders, script_command
from tests.faults.process_start import close_streams, forbid_torch_import
from tests.faults.small_run import SMALL_MODEL
from tests.fork_server import DEV_NULL, ForkServer, Job, fork_server
from tests.timeouts import PROCESS_TIMEOUT

EXIT_CODES = ("0 done", "2 usage", "3 data", "4 checkpoint", "5 numerics", "6 resources", "130 ", "143 ")
ALL = "<&- >&- 2>&-"
SCRIPTS = sorted(path for path in (ROOT / "training_scripts").glob("[a-z]*.py") if path.name != "bootstrap.py")


def run_with_closed_streams(closed: str, *command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command with these streams closed by a shell."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(shell, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def light_parent() -> Iterator[ForkServer]:
    """Yield a process that has imported only the flag parsing modules of the scripts."""
    parent = ForkServer(("numpy", "tyro", "tyro._backends._tyro_backend"))
    yield parent
    parent.close()


def run_without_torch(
    light_parent: ForkServer,
    script: Path,
    *arguments: str,
    closed: tuple[int, ...] = (),
    error: BaseException | None = None,
) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a fork that cannot import torch."""
    done = light_parent.run(script, *arguments, before=partial(forbid_torch_import, closed, error))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_and_usage_errors_do_not_import_torch(script, light_parent):
    code, shown, errors = run_without_torch(light_parent, script, "--help")
    assert (code, errors) == (0, "") and shown.startswith("usage:")
    assert f"training_scripts/{script.name}" in shown  # the exact command
    if script.name in ("inspect_data.py", "plan_memory.py"):  # has its own flags and refers to the trainer's
        assert "train_konkanivani_asr.py --help" in shown and "--json" in shown and "--learning_rate" not in shown
    for code in EXIT_CODES if script.name == "train_konkanivani_asr.py" else ():
        assert code in " ".join(shown.split()), code
    code, shown, errors = run_without_torch(light_parent, script, "--no_such_flag")
    assert (code, shown) == (2, "") and "--no_such_flag" in errors and "Traceback" not in errors


def test_negative_control_a_script_that_imports_torch_ends_in_a_traceback(light_parent, tmp_path):
    (tmp_path / "heavy.py").write_text("import torch\n")
    code, _, errors = run_without_torch(light_parent, tmp_path / "heavy.py", "--help")
    assert code == 1 and "PyTorch is imported" in errors


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_ctrl_c_during_imports_prints_one_line(script, light_parent):
    assert run_without_torch(light_parent, script, error=KeyboardInterrupt()) == (130, "", "Interrupted.\n")


def test_other_error_during_imports_prints_a_traceback(light_parent):
    code, shown, errors = run_without_torch(light_parent, SCRIPTS[-1], error=ZeroDivisionError())
    assert (code, shown) == (1, "") and errors.startswith("Traceback")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_and_usage_errors_with_closed_streams(script, light_parent):
    assert run_without_torch(light_parent, script, "--help", closed=(0, 1, 2)) == (0, "", "")
    assert run_without_torch(light_parent, script, "--no_such_flag", closed=(0, 1, 2))[0] == 2


@pytest.mark.parametrize("script", ["bootstrap.py", "transcribe.py"])
def test_help_and_usage_errors_of_a_new_interpreter_with_closed_streams(script):
    path = f"training_scripts/{script}"
    for closed in (">&-", ALL):
        process = run_with_closed_streams(closed, *script_command(path, "--help"))
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    process = run_with_closed_streams("2>&-", *script_command(path, "--help"))
    assert process.returncode == 0 and "usage: " in process.stdout
    assert run_with_closed_streams(ALL, *script_command(path, "--no_such_flag")).returncode == 2


@pytest.mark.parametrize("script", [SCRIPTS[-1], *mark_full(*SCRIPTS[:-1])], ids=lambda path: path.name)
def test_script_runs_as_a_module(script):
    process = run_with_closed_streams("", sys.executable, "-m", f"training_scripts.{script.stem}", "--help")
    assert (process.returncode, process.stderr) == (0, "") and "usage: " in process.stdout


def test_help_into_a_closed_pipe_prints_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = script_command("training_scripts/inspect_data.py", "--help")
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=300)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


OPEN_A_FILE = """
import os, sys
sys.path.insert(0, "training_scripts")
import bootstrap
if sys.argv[2] == "repaired":
    bootstrap.mend_streams()
with open(sys.argv[1], "wb") as file:
    os.write(1, b"printed by native code")
"""


@pytest.mark.parametrize("how, held", [("repaired", b""), ("unchanged", b"printed by native code")])
def test_output_to_closed_stdout_does_not_go_into_the_next_file(tmp_path, how, held):
    run_with_closed_streams(">&-", sys.executable, "-c", OPEN_A_FILE, str(tmp_path / "checkpoint"), how)
    assert (tmp_path / "checkpoint").read_bytes() == held


def test_run_with_closed_streams_trains_and_saves(corpus, tmp_path):
    flags = (*SMALL_MODEL, *corpus.flags(), "--max_steps", "2", "--save_steps", "1", "--num_workers", "0")
    closed = partial(close_streams, 0, 1, 2)
    job = Job(ROOT / TRAINER, (*flags, *run_folders(tmp_path)), DEV_NULL, threads=1, before=closed)
    assert fork_server().start(job).wait(PROCESS_TIMEOUT) == 0
    assert read_checkpoint(tmp_path / "checkpoints" / LAST).step == 2
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"utterances a step" in file for file in files)  # first line of the trainer


@pytest.mark.parametrize("script", ["run_training_memory_optimized.sh", "run_tests.sh"])
def test_shell_scripts_open_closed_streams_for_their_child_processes(tmp_path, script):
    look = f'for n in 0 1 2; do if [ /proc/$$/fd/$n -ef /dev/null ]; then touch "{tmp_path}/null$n"; fi; done'
    (tmp_path / "python3").write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "{tmp_path}/python3"\n{look}\n')
    (tmp_path / "python3").chmod(0o755)
    process = run_with_closed_streams(ALL, "env", f"PATH={tmp_path}:{os.environ['PATH']}", str(ROOT / script), "--help")
    assert process.returncode == 0
    assert [path.name for path in sorted(tmp_path.glob("null*"))] == ["null0", "null1", "null2"]
