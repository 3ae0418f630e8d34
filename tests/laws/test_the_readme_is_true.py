"""Law 10: every command of the README but the two at its top runs on a miniature corpus, and its tree matches.

The two at the top are run by `.ci/run` and by `benchmarks/first_run.sh`.
"""

import dataclasses
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from konkanivani.base.config import PRESETS, DecodingConfig, TrainConfig, settings_of
from konkanivani.model.architecture import architecture_of
from konkanivani.model.asr import parameter_count
from tests.conftest import ROOT, Corpus
from tests.patience import PATIENCE
from tests.test_formats import common_voice

README = (ROOT / "README.md").read_text(encoding="utf-8")
TOP = ("./run_training_memory_optimized.sh", "./run_tests.sh")
UNLISTED = {"README.md", "LICENSE", "CONTRIBUTING.md", "pyproject.toml"}  # what every project has


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Every shell command, continuation lines joined."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip()]


def tracked() -> list[str]:
    """Files of the repository, without what runs leave behind."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so what belongs to the project is not known")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def copy(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project in a folder of its own, a miniature corpus where the README has the reader's."""
    directory = tmp_path_factory.mktemp("readme") / "konkanivani"
    for name in tracked():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    shutil.copytree(corpus.directory, directory / "corpus")
    common_voice(directory)
    return directory


def miniature(command: str, max_steps: int) -> list[str]:
    """The command as the test runs it: this Python, this machine's device, few steps."""
    words = shlex.split(command)
    words[0] = sys.executable
    if not torch.cuda.is_available():
        words = ["cpu" if word == "cuda" else word for word in words]
    if "train_konkanivani_asr.py" in command:
        words += ["--max_steps", str(max_steps), "--num_workers", "0"]
    return words


def test_the_two_commands_stand_at_the_top():
    assert tuple(commands()[:2]) == TOP
    for command in TOP:
        assert (ROOT / command).stat().st_mode & 0o111


def test_every_other_command_runs(copy):
    ran, shown = [], json.loads(blocks("json")[0])
    for number, command in enumerate(c for c in commands() if c not in TOP and c.startswith("python3 ")):
        done = subprocess.run(
            miniature(command, 8 + number), cwd=copy, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        ran.append(command)
        if "train_konkanivani_asr.py" in command:
            summary = json.loads(done.stdout.splitlines()[-1])
            assert summary["steps"] == 8 + number
            # Only the built-in corpus marks its patterns.
            kinds = [f"test_cer_{kind}_patterns{by}" for kind in ("seen", "unseen") for by in ("", "_joint")]
            assert set(shown) == {*summary, *kinds}
    assert len(ran) >= 6 and {"--resume", "--init_from"} <= set(" ".join(ran).split())
    others = [c for c in commands() if c not in TOP and c not in ran]
    assert [c.split()[0] for c in others] == [".venv/bin/tensorboard"]


def test_tensorboard_shows_the_run(copy, tmp_path):
    command = next(c for c in commands() if c.startswith(".venv/bin/tensorboard"))
    program = Path(sys.executable).with_name("tensorboard")
    if not program.exists():
        pytest.skip("this Python has no tensorboard program beside it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (copy / "runs").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [str(program), *shlex.split(command)[1:], "--port", str(port)],
        cwd=copy,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_for(f"http://127.0.0.1:{port}/data/environment")
    finally:
        process.kill()
        process.wait()


def wait_for(address: str) -> bool:
    """Whether the address answers in time."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            time.sleep(0.5)
    return False


def test_every_flag_it_names_exists():
    known = {f"--{setting.name}" for setting in settings_of(TrainConfig())}
    known |= {"--help", "--logdir", "--host", "--checkpoint", "--manifest", "--json", "--last", "--output"}
    known |= {"--batch", "--accum", "--gpu", "--sentences", "--html", "--references", "--hypotheses", "--compare"}
    known |= {"--text", "--held_out", "--bundle", "--onnx", "--int8", "--timestamps", "--output_dir"}
    known |= {"--nproc_per_node", "--max_restarts"}  # torchrun's
    known |= {f"--{setting.name}" for setting in dataclasses.fields(DecodingConfig)}
    prepare = (ROOT / "training_scripts" / "prepare_data.py").read_text(encoding="utf-8")
    known |= {f"--{name}" for name in re.findall(r"^    (\w+): \w+", prepare, re.MULTILINE)}
    named = set(re.findall(r"--[a-z][a-z0-9_]+", README))
    assert len(named) > 15 and named <= known, named - known


def test_its_preset_table_is_the_models():
    rows = re.findall(r"\| `(\w+)` \| (\d+) wide, (\d+) \+ (\d+) layers \| ([\d.]+) M \|", README)
    assert {row[0] for row in rows} == set(PRESETS)
    for name, width, encoder, decoder, millions in rows:
        preset = PRESETS[name]
        shape = preset.d_model, preset.encoder_layers, preset.decoder_layers
        assert shape == (int(width), int(encoder), int(decoder))
        count = parameter_count(architecture_of(TrainConfig(model=preset), 1000).build_without_values())
        assert f"{count / 1e6:.1f}" == millions


def test_its_tree_matches():
    tree = blocks("text")[0]
    listed, folder = set(), ""
    for line in tree.splitlines():
        names = re.match(r"( *)((?:[\w./]+ )*[\w./]+)", line)
        parent = folder if names.group(1) else ""
        for name in names.group(2).split():
            if re.search(r"[./]", name):
                assert (ROOT / parent / name).exists(), name
                listed.add((parent + name).split("/")[0])
        if not names.group(1) and names.group(2).endswith("/"):
            folder = names.group(2)
    visible = {name.split("/")[0] for name in tracked() if not name.startswith(".")}
    assert visible - UNLISTED == listed
