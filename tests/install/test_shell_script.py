"""Arguments that the shell script passes to the trainer or torchrun, recorded by a fake Python."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.timeouts import PROCESS_TIMEOUT

SCRIPT = "run_training_memory_optimized.sh"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the script, a fake Python that records its arguments, and a python3 whose bootstrap prints its path."""
    shutil.copy(ROOT / SCRIPT, tmp_path)
    passed = 'echo "$PET_SIGNALS_TO_HANDLE $*"\nprintf "%s\\n" "$@" > arguments.txt'
    named = f'if [ "$1" = training_scripts/bootstrap.py ]; then echo "{tmp_path}/python"; fi'
    for name, lines in (("python", passed), ("python3", named)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def run_script_with_sighup(checkout: Path, *flags: str, hang_up: signal.Handlers, **settings: str) -> str:
    command = [str(checkout / SCRIPT), "--train_manifest", "t.jsonl", "--device", "cpu", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PET_SIGNALS_TO_HANDLE"} | settings
    before = signal.signal(signal.SIGHUP, hang_up)  # child processes inherit ignored signals, as under nohup
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT, check=True
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    return done.stdout


def test_torchrun_does_not_handle_sighup_under_nohup(checkout):
    """Otherwise torchrun handles SIGHUP, and terminates its ranks when the terminal is closed."""
    output = run_script_with_sighup(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN)
    assert output.startswith("SIGTERM,SIGINT,SIGQUIT -m torch.distributed.run --nproc_per_node 2 --standalone")


def test_torchrun_signals_are_unchanged_without_nohup(checkout):
    assert run_script_with_sighup(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_DFL).startswith(
        " -m torch.distributed.run"
    )
    own = run_script_with_sighup(
        checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN, PET_SIGNALS_TO_HANDLE="SIGTERM"
    )
    assert own.startswith("SIGTERM -m")
    assert "distributed" not in run_script_with_sighup(checkout, hang_up=signal.SIG_IGN)


def trainer_arguments(checkout: Path, *arguments: str) -> list[str]:
    """Run the script and return the arguments of the trainer."""
    subprocess.run([str(checkout / SCRIPT), *arguments], check=True, capture_output=True, timeout=PROCESS_TIMEOUT)
    return (checkout / "arguments.txt").read_text(encoding="utf-8").splitlines()


def last_value(passed: list[str], flag: str) -> str | None:
    values = [
        word.removeprefix(flag + "=") if word != flag else passed[n + 1]
        for n, word in enumerate(passed)
        if word.split("=")[0] == flag
    ]
    return values[-1] if values else None


def test_each_corpus_gets_its_own_folder_and_run_name(checkout):
    builtin = trainer_arguments(checkout, "--device", "cpu")
    assert (last_value(builtin, "--checkpoint_dir"), last_value(builtin, "--run_name")) == (None, "builtin")
    for given in (["--train_manifest", "my own/train.jsonl"], ["--train-manifest=my own/train.jsonl"]):
        own = trainer_arguments(checkout, "--device", "cpu", *given)
        assert (last_value(own, "--checkpoint_dir"), last_value(own, "--run_name")) == ("checkpoints/my own", "my own")
        assert last_value(own, "--resume") == "auto" and "data/builtin/train.jsonl" not in own
    other = trainer_arguments(checkout, "--device", "cpu", "--train_manifest", "my own/men.jsonl")
    assert last_value(other, "--checkpoint_dir") == "checkpoints/my own-men"
    given = ("--train_manifest", "my/train.jsonl", "--checkpoint_dir", "/drive/kok", "--device", "cpu")
    own = trainer_arguments(checkout, *given)
    assert (last_value(own, "--checkpoint_dir"), last_value(own, "--run_name")) == ("/drive/kok", "kok")


def test_resume_by_path_adds_no_flags(checkout):
    passed = trainer_arguments(checkout, "--resume", "checkpoints/my/checkpoint_last.pt")
    assert passed[1:] == ["--resume", "checkpoints/my/checkpoint_last.pt"]


def test_fresh_starts_a_new_run(checkout):
    passed = trainer_arguments(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl", "--fresh")
    assert last_value(passed, "--resume") is None and last_value(passed, "--checkpoint_dir") == "checkpoints/my"


def test_preset_is_not_passed_for_pretrained_models(checkout):
    for given, preset in ((["--init_from", "x.pt"], None), (["--pretrained=w"], None), ([], "minimal")):
        passed = trainer_arguments(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl", *given)
        assert (last_value(passed, "--preset"), last_value(passed, "--resume")) == (preset, "auto")


def test_default_batch_size_depends_on_device(checkout):
    counted = ("cuda", "--gradient-accumulation-steps", "8")
    for given, size in ((("cuda",), "auto"), (("cpu",), "4"), (counted, "2")):
        assert last_value(trainer_arguments(checkout, "--device", *given), "--batch_size") == size


def test_resumed_run_keeps_its_name_and_preset(checkout):
    given = ("--device", "cpu", "--train_manifest", "my/train.jsonl")
    (checkout / "checkpoints" / "my").mkdir(parents=True)
    (checkout / "checkpoints" / "my" / "checkpoint_last.pt").touch()
    passed, fresh = (trainer_arguments(checkout, *given, *more) for more in ((), ("--fresh",)))
    assert (last_value(passed, "--run_name"), last_value(fresh, "--run_name")) == (None, "my")
    assert (last_value(passed, "--preset"), last_value(fresh, "--preset")) == (None, "minimal")


def test_run_of_earlier_version_is_resumed_in_its_folder(checkout):
    (checkout / "checkpoints").mkdir()
    (checkout / "checkpoints" / "checkpoint_last.pt").write_bytes(b"PK\0--train_manifest 'my/train.jsonl'\n--valid_\0")
    passed = trainer_arguments(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl")
    assert last_value(passed, "--checkpoint_dir") is None and last_value(passed, "--run_name") is None
    passed = trainer_arguments(checkout, "--device", "cpu", "--train_manifest", "new/train.jsonl")
    assert last_value(passed, "--checkpoint_dir") == "checkpoints/new"


@pytest.mark.parametrize("words", [("--help",), ("--help", "all"), ("--epochs", "3", "-h")])
def test_help_shows_script_examples_and_passes_arguments_to_trainer(checkout, words):
    command = [str(checkout / SCRIPT), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PROCESS_TIMEOUT)
    usage, _, rest = done.stdout.partition("\n\n ")
    assert usage.startswith("Set up .venv") and "--nproc_per_node 2" in rest and "#" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[:16])) <= 80
    passed = (checkout / "arguments.txt").read_text(encoding="utf-8").splitlines()
    assert passed == ["training_scripts/train_konkanivani_asr.py", *words]
