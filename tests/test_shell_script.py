"""The shell script's own part: what it hands to torchrun, with another program in Python's place that says so."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = "run_training_memory_optimized.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, a bootstrap that names the other program, and that program."""
    shutil.copy(ROOT / SCRIPT, tmp_path)
    (tmp_path / "training_scripts").mkdir()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PET_SIGNALS_TO_HANDLE $*"\n')
    python.chmod(0o755)
    (tmp_path / "training_scripts" / "bootstrap.py").write_text(f"print({str(python)!r})\n")
    return tmp_path


def started(checkout: Path, *flags: str, hang_up: signal.Handlers, **settings: str) -> str:
    command = [str(checkout / SCRIPT), "--train_manifest", "t.jsonl", "--device", "cpu", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PET_SIGNALS_TO_HANDLE"} | settings
    before = signal.signal(signal.SIGHUP, hang_up)  # a child keeps what is ignored, as of nohup
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    return done.stdout


def test_under_nohup_torchrun_leaves_the_hang_up_signal_ignored(checkout):
    """Seen with torchrun itself: else it takes up SIGHUP again, and ends its ranks when the terminal closes."""
    said = started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN)
    assert said.startswith("SIGTERM,SIGINT,SIGQUIT -m torch.distributed.run --nproc_per_node 2 --standalone")


def test_elsewhere_it_takes_what_signals_it_takes(checkout):
    assert started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_DFL).startswith(" -m torch.distributed.run")
    own = started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN, PET_SIGNALS_TO_HANDLE="SIGTERM")
    assert own.startswith("SIGTERM -m")
    assert "distributed" not in started(checkout, hang_up=signal.SIG_IGN)
