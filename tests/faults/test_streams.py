"""Scripts whose stdin, stdout or stderr is closed work as with /dev/null; each can be run as a module too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from konkanivani.training.checkpoint.checkpoint import read_checkpoint
from konkanivani.training.checkpoint.checkpointer import LAST
from tests.conftest import ROOT, TRAINER, run_folders, script_command
from tests.faults.small_run import SMALL_MODEL
from tests.faults.test_error_texts import SCRIPTS

ALL = "<&- >&- 2>&-"


def run_closed(closed: str, *command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command with these streams closed by a shell."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(shell, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", [*SCRIPTS, "bootstrap.py"])
def test_help_and_usage_errors_with_closed_streams(script):
    path = f"training_scripts/{script}"
    for closed in (">&-", ALL):
        process = run_closed(closed, *script_command(path, "--help"))
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    process = run_closed("2>&-", *script_command(path, "--help"))
    assert process.returncode == 0 and "usage: " in process.stdout
    assert run_closed(ALL, *script_command(path, "--no_such_flag")).returncode == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_a_module_too(script):
    module = f"training_scripts.{script.removesuffix('.py')}"
    process = run_closed("", sys.executable, "-m", module, "--help")
    assert (process.returncode, process.stderr) == (0, "") and "usage: " in process.stdout


@pytest.mark.parametrize("script", ["inspect_data.py", "plan_memory.py"])
def test_help_lists_a_scripts_own_flags_and_says_where_the_trainers_are(script):
    shown = run_closed("", *script_command(f"training_scripts/{script}", "--help")).stdout
    assert "train_konkanivani_asr.py --help" in shown and "--json" in shown and "--learning_rate" not in shown


def test_help_that_nobody_reads_to_its_end_is_quiet():
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
if sys.argv[2] == "mended":
    bootstrap.mend_streams()
with open(sys.argv[1], "wb") as file:
    os.write(1, b"printed by native code")
"""


@pytest.mark.parametrize("how, held", [("mended", b""), ("as it was", b"printed by native code")])
def test_what_is_printed_does_not_go_into_the_next_file(tmp_path, how, held):
    run_closed(">&-", sys.executable, "-c", OPEN_A_FILE, str(tmp_path / "checkpoint"), how)
    assert (tmp_path / "checkpoint").read_bytes() == held


def test_a_run_without_streams_is_trained_and_saved(corpus, tmp_path):
    flags = (*SMALL_MODEL, *corpus.flags(), "--max_steps", "2", "--save_steps", "1", "--num_workers", "0")
    process = run_closed(ALL, *script_command(TRAINER, *flags, *run_folders(tmp_path)))
    assert process.returncode == 0
    assert read_checkpoint(tmp_path / "checkpoints" / LAST).step == 2
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"utterances a step" in file for file in files)  # what the trainer prints at the start


@pytest.mark.parametrize("script", ["run_training_memory_optimized.sh", "run_tests.sh"])
def test_the_shell_scripts_open_what_is_closed_for_all_that_they_start(tmp_path, script):
    look = f'for n in 0 1 2; do if [ /proc/$$/fd/$n -ef /dev/null ]; then touch "{tmp_path}/null$n"; fi; done'
    (tmp_path / "python3").write_text(f'#!/bin/sh\n[ "$1" = -c ] || echo "{tmp_path}/python3"\n{look}\n')
    (tmp_path / "python3").chmod(0o755)
    process = run_closed(ALL, "env", f"PATH={tmp_path}:{os.environ['PATH']}", str(ROOT / script), "--help")
    assert process.returncode == 0
    assert [path.name for path in sorted(tmp_path.glob("null*"))] == ["null0", "null1", "null2"]
