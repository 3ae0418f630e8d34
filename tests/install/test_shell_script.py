"""The shell script alone: its arguments for the trainer or torchrun, tested with a replacement of Python."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.patience import PATIENCE

SCRIPT = "run_training_memory_optimized.sh"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a folder with the script, a python3 whose bootstrap names the replacement, and the replacement."""
    shutil.copy(ROOT / SCRIPT, tmp_path)
    told = 'echo "$PET_SIGNALS_TO_HANDLE $*"\nprintf "%s\\n" "$@" > told.txt'
    named = f'if [ "$1" = training_scripts/bootstrap.py ]; then echo "{tmp_path}/python"; fi'
    for name, lines in (("python", told), ("python3", named)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def started(checkout: Path, *flags: str, hang_up: signal.Handlers, **settings: str) -> str:
    command = [str(checkout / SCRIPT), "--train_manifest", "t.jsonl", "--device", "cpu", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PET_SIGNALS_TO_HANDLE"} | settings
    before = signal.signal(signal.SIGHUP, hang_up)  # a child inherits ignored signals, as from nohup
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    return done.stdout


def test_under_nohup_torchrun_leaves_the_hang_up_signal_ignored(checkout):
    """Observed with torchrun: otherwise it handles SIGHUP again, and ends its ranks when the terminal closes."""
    said = started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN)
    assert said.startswith("SIGTERM,SIGINT,SIGQUIT -m torch.distributed.run --nproc_per_node 2 --standalone")


def test_elsewhere_it_takes_what_signals_it_takes(checkout):
    assert started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_DFL).startswith(" -m torch.distributed.run")
    own = started(checkout, "--nproc_per_node", "2", hang_up=signal.SIG_IGN, PET_SIGNALS_TO_HANDLE="SIGTERM")
    assert own.startswith("SIGTERM -m")
    assert "distributed" not in started(checkout, hang_up=signal.SIG_IGN)


def told_to_the_trainer(checkout: Path, *arguments: str) -> list[str]:
    """Return the arguments of the trainer, one per line."""
    subprocess.run([str(checkout / SCRIPT), *arguments], check=True, capture_output=True, timeout=PATIENCE)
    return (checkout / "told.txt").read_text(encoding="utf-8").splitlines()


def last_of(told: list[str], flag: str) -> str | None:
    spelt = [
        word.removeprefix(flag + "=") if word != flag else told[n + 1]
        for n, word in enumerate(told)
        if word.split("=")[0] == flag
    ]
    return spelt[-1] if spelt else None


def test_the_script_gives_each_corpus_a_folder_and_a_name_of_its_own(checkout):
    builtin = told_to_the_trainer(checkout, "--device", "cpu")
    assert (last_of(builtin, "--checkpoint_dir"), last_of(builtin, "--run_name")) == (None, "builtin")
    for given in (["--train_manifest", "my own/train.jsonl"], ["--train-manifest=my own/train.jsonl"]):
        own = told_to_the_trainer(checkout, "--device", "cpu", *given)
        assert (last_of(own, "--checkpoint_dir"), last_of(own, "--run_name")) == ("checkpoints/my own", "my own")
        assert last_of(own, "--resume") == "auto" and "data/builtin/train.jsonl" not in own
    other = told_to_the_trainer(checkout, "--device", "cpu", "--train_manifest", "my own/men.jsonl")
    assert last_of(other, "--checkpoint_dir") == "checkpoints/my own-men"
    given = ("--train_manifest", "my/train.jsonl", "--checkpoint_dir", "/drive/kok", "--device", "cpu")
    own = told_to_the_trainer(checkout, *given)
    assert (last_of(own, "--checkpoint_dir"), last_of(own, "--run_name")) == ("/drive/kok", "kok")


def test_the_script_tells_nothing_that_would_change_a_checkpoint_named_by_its_path(checkout):
    told = told_to_the_trainer(checkout, "--resume", "checkpoints/my/checkpoint_last.pt")
    assert told[1:] == ["--resume", "checkpoints/my/checkpoint_last.pt"]


def test_the_script_begins_anew_where_it_is_told_to(checkout):
    told = told_to_the_trainer(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl", "--fresh")
    assert last_of(told, "--resume") is None and last_of(told, "--checkpoint_dir") == "checkpoints/my"


def test_the_script_leaves_a_model_that_has_learnt_its_shape_and_goes_on_when_started_again(checkout):
    for given, preset in ((["--init_from", "x.pt"], None), (["--pretrained=w"], None), ([], "minimal")):
        told = told_to_the_trainer(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl", *given)
        assert (last_of(told, "--preset"), last_of(told, "--resume")) == (preset, "auto")


def test_a_card_is_filled_and_a_cpu_has_both_cores_at_work(checkout):
    counted = ("cuda", "--gradient-accumulation-steps", "8")
    for given, size in ((("cuda",), "auto"), (("cpu",), "4"), (counted, "2")):
        assert last_of(told_to_the_trainer(checkout, "--device", *given), "--batch_size") == size


def test_the_script_lets_a_run_that_goes_on_keep_its_name_and_shape(checkout):
    given = ("--device", "cpu", "--train_manifest", "my/train.jsonl")
    (checkout / "checkpoints" / "my").mkdir(parents=True)
    (checkout / "checkpoints" / "my" / "checkpoint_last.pt").touch()
    told, anew = (told_to_the_trainer(checkout, *given, *more) for more in ((), ("--fresh",)))
    assert (last_of(told, "--run_name"), last_of(anew, "--run_name")) == (None, "my")
    assert (last_of(told, "--preset"), last_of(anew, "--preset")) == (None, "minimal")


def test_the_script_goes_on_with_a_run_of_an_earlier_version_where_that_left_it(checkout):
    (checkout / "checkpoints").mkdir()
    (checkout / "checkpoints" / "checkpoint_last.pt").write_bytes(b"PK\0--train_manifest 'my/train.jsonl'\n--valid_\0")
    told = told_to_the_trainer(checkout, "--device", "cpu", "--train_manifest", "my/train.jsonl")
    assert last_of(told, "--checkpoint_dir") is None and last_of(told, "--run_name") is None
    told = told_to_the_trainer(checkout, "--device", "cpu", "--train_manifest", "new/train.jsonl")
    assert last_of(told, "--checkpoint_dir") == "checkpoints/new"


@pytest.mark.parametrize("words", [("--help",), ("--help", "all"), ("--epochs", "3", "-h")])
def test_help_shows_the_scripts_own_examples_and_passes_its_words_to_the_trainer(checkout, words):
    command = [str(checkout / SCRIPT), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    usage, _, rest = done.stdout.partition("\n\n ")
    assert usage.startswith("Set up .venv") and "--nproc_per_node 2" in rest and "#" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[:16])) <= 80
    told = (checkout / "told.txt").read_text(encoding="utf-8").splitlines()
    assert told == ["training_scripts/train_konkanivani_asr.py", *words]
