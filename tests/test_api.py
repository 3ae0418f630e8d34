"""Python API: training in a child process, and plans; equal to the commands."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import konkanivani
from konkanivani import DataConfig, MemoryConfig, ModelConfig, PretrainedConfig, RunConfig, TrainConfig
from konkanivani.errors import DataError, ResourceError, UsageError
from konkanivani.flags import changed_settings, parse_args, words_of
from konkanivani.training_process import summary_of
from tests.conftest import ROOT, Corpus, run_script, well
from tests.patience import PATIENCE

TINY = ModelConfig(d_model=16, attention_heads=2, feedforward_dim=32, encoder_layers=1, decoder_layers=1)


def config_of(corpus: Corpus, folder: Path, **run: object) -> TrainConfig:
    """Return the settings of a small run on the corpus."""
    manifests = dict(zip(corpus.flags()[::2], corpus.flags()[1::2], strict=True))
    return TrainConfig(
        model=TINY,
        data=DataConfig(
            train_manifest=str(manifests["--train_manifest"]),
            valid_manifest=str(manifests["--valid_manifest"]),
            num_workers=0,
        ),
        run=RunConfig(checkpoint_dir=f"{folder}/checkpoints", log_dir=f"{folder}/runs", device="cpu", **run),
    )


def test_words_of_settings_give_the_same_settings():
    config = TrainConfig(
        model=TINY,
        data=DataConfig(train_manifest="-odd name.jsonl", audio_roots=("a", "b c")),
        memory=MemoryConfig(mixed_precision=True),
        run=RunConfig(preset="minimal", epochs=3),
    )
    words = [word for setting in changed_settings(config) for word in words_of(setting)]
    assert parse_args(words).config == config
    assert "--mixed_precision" in words and "--encoder_layers=1" in words
    assert changed_settings(TrainConfig()) == []
    tuned = TrainConfig(pretrained=PretrainedConfig(pretrained="whisper", language="mr"))
    assert [setting.name for setting in changed_settings(tuned)] == ["pretrained", "language"]


def test_train_returns_what_the_command_prints(corpus, tmp_path, capfd):
    summary = konkanivani.train(config_of(corpus, tmp_path / "api", max_steps=2, epochs=1))
    assert (summary.is_interrupted, summary.steps) == (False, 2)
    assert summary.checkpoint.is_file() and summary.tensorboard.is_dir()
    words = [
        word
        for s in changed_settings(config_of(corpus, tmp_path / "cli", max_steps=2, epochs=1))
        for word in words_of(s)
    ]
    printed = json.loads(well(run_script("training_scripts/train_konkanivani_asr.py", *words)).stdout.splitlines()[-1])
    assert summary.scores["best_valid_score"] == printed["best_valid_score"]
    assert (summary.parameters, summary.epochs) == (printed["parameters"], printed["epochs"])
    assert "Peak memory" in capfd.readouterr().err  # the run's output is shown


def test_errors_of_the_run_are_raised_with_its_message(tmp_path, corpus):
    broken = config_of(corpus, tmp_path)
    nowhere = dataclasses.replace(broken.data, train_manifest=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="nowhere.jsonl"):
        konkanivani.train(dataclasses.replace(broken, data=nowhere))
    with pytest.raises(UsageError, match="train_manifest"):
        konkanivani.train(TrainConfig())
    with pytest.raises(ResourceError, match="without a summary"):
        summary_of(["no JSON"])


def test_ctrl_c_saves_and_returns(corpus, tmp_path):
    """Interrupt this process like a notebook's kernel: Python raises KeyboardInterrupt in the main thread."""
    config = config_of(corpus, tmp_path, epochs=5000, save_minutes=60.0)
    words = json.dumps([word for setting in changed_settings(config) for word in words_of(setting)])
    program = (
        "import json, sys, konkanivani\n"
        "from konkanivani.flags import parse_args\n"
        "summary = konkanivani.train(parse_args(json.loads(sys.argv[1])).config)\n"
        "print(summary.is_interrupted, summary.checkpoint)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "runs"
    until = time.monotonic() + PATIENCE
    while not list(log.rglob("log.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(2.0)  # into the training loop
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert said.split() == ["True", f"{tmp_path}/checkpoints/checkpoint_last.pt"]
    assert Path(said.split()[1]).is_file()


def test_plan_equals_the_command(capfd):
    config = TrainConfig(run=RunConfig(preset="minimal"))  # the model has the shape of the preset
    report = konkanivani.plan(config, gpu="GTX 980")
    command = ("training_scripts/plan_memory.py", "--preset", "minimal", "--gpu", "GTX 980", "--json")
    assert json.loads(report.as_json()) == json.loads(well(run_script(*command)).stdout)
    with pytest.raises(UsageError, match="memory_budget"):
        konkanivani.plan(TrainConfig())


def test_import_is_lazy():
    program = "import sys, konkanivani; konkanivani.TrainConfig; konkanivani.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    with pytest.raises(AttributeError):
        konkanivani.trian  # noqa: B018
