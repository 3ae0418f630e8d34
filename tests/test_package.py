"""The wheel: built once, installed in a virtual environment, used outside of the checkout."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import konkanivani
from konkanivani.cli.main import COMMANDS, main_of
from konkanivani.command_line import SCRIPTS
from tests.conftest import ROOT
from tests.timeouts import PROCESS_TIMEOUT

SHAPE = "--encoder_layers 1 --decoder_layers 1 --d_model 16 --attention_heads 2 --feedforward_dim 32".split()
QUICK = "--epochs 1 --device cpu --num_workers 0".split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel of the working tree, built from a copy, so that the checkout gets no `build` folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("konkanivani", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """Return the folder of a virtual environment with the wheel, which finds torch in the test environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    # The dependencies of the test environment, but not this checkout.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*install, str(wheel)], check=True, timeout=PROCESS_TIMEOUT)
    return folder


def run(environment: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in `folder`."""
    names = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(environment / "bin" / "konkanivani"), *words]
    return subprocess.run(command, cwd=folder, env=names, capture_output=True, text=True, timeout=PROCESS_TIMEOUT)


def test_wheel_has_every_file_of_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = [path for path in (ROOT / "konkanivani").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [path.relative_to(ROOT).as_posix() for path in kept if path.relative_to(ROOT).as_posix() not in names]
    assert len(kept) > 100 and missing == []


def test_version_and_help_come_from_the_installed_package(environment, tmp_path):
    assert run(environment, tmp_path, "--version").stdout.strip() == konkanivani.__version__
    listed = run(environment, tmp_path, "--help").stdout
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert "usage: konkanivani evaluate" in run(environment, tmp_path, "evaluate", "--help").stdout
    imported = [str(environment / "bin" / "python"), "-c", "import konkanivani; print(konkanivani.__file__)"]
    result = subprocess.run(imported, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert result.startswith(str(environment))  # and not from the checkout


def test_train_transcribe_and_plan_outside_the_checkout(environment, tmp_path):
    sizes = ("--train_utterances", "12", "--valid_utterances", "3", "--test_utterances", "3")
    built = run(environment, tmp_path, "builtin", "--output", "data/builtin", *sizes)
    assert built.returncode == 0, built.stderr
    manifests = [
        word for part in ("train", "valid", "test") for word in (f"--{part}_manifest", f"data/builtin/{part}.jsonl")
    ]
    trained = run(environment, tmp_path, "train", *manifests, *SHAPE, *QUICK)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout.splitlines()[-1])["epochs"] == 1
    row = json.loads((tmp_path / "data/builtin/test.jsonl").read_text().splitlines()[0])
    recording = tmp_path / "data/builtin" / row["audio_filepath"]
    texts = run(environment, tmp_path, "transcribe", str(recording), "--device", "cpu", "--format", "json")
    assert texts.returncode == 0 and "segments" in json.loads(texts.stdout), texts.stderr
    planned = run(environment, tmp_path, "plan", "--gpu", "T4", *SHAPE, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout.splitlines()[-1])


def test_every_script_runs_its_subcommand():
    assert SCRIPTS.keys() == COMMANDS.keys()
    for command, script in SCRIPTS.items():
        assert f'run_command("{command}")' in (ROOT / "training_scripts" / script).read_text(encoding="utf-8")
        assert callable(main_of(command))


@pytest.mark.parametrize("words", [["trian"], ["--trian"], ["konkanivani"]])
def test_unknown_command_is_a_usage_error(words):
    done = subprocess.run(
        [sys.executable, "-m", "konkanivani", *words], cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
    )
    assert done.returncode == 2 and "There is no command" in done.stderr and "Traceback" not in done.stderr
    assert ("Did you mean train?" in done.stderr) == (words != ["konkanivani"])


@pytest.mark.parametrize(
    ("program", "advised"),
    [
        (["-m", "konkanivani", "publish"], "python -m konkanivani export"),
        (["training_scripts/publish_model.py"], "python3 training_scripts/export_asr.py"),
    ],
)
def test_error_names_commands_as_the_process_was_started(program, advised):
    done = subprocess.run(
        [sys.executable, *program, "missing", "me/model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT,
    )
    assert done.returncode == 2 and f"written by {advised} --hub_folder." in done.stderr


def test_shell_completion_offers_commands_and_flags():
    script = subprocess.run(
        [sys.executable, "-m", "konkanivani", "completion"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    complete = 'COMP_WORDS=(konkanivani {}); COMP_CWORD={}; _konkanivani; echo "${{COMPREPLY[@]}}"'
    lines = [script, complete.format("tra", 1), complete.format("train --batch", 2), complete.format("plan --batch", 2)]
    result = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert result.splitlines()[:2] == ["train transcribe", "--batch_size"]


WITHOUT_EXTRAS = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, "training_scripts")
from konkanivani.install.environment import Requirements
requirements = Requirements(Path.cwd())
for name in {*requirements.modules(requirements.extras)} - {*requirements.modules([])}:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
for script in sorted(Path("benchmarks").glob("*.py")):
    try:
        runpy.run_path(str(script), run_name="imported")
    except SystemExit as ending:
        print(script.stem, ending.code)
"""


def test_benchmarks_start_without_extras_or_name_them():
    process = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    # They run the tests' own cases.
    assert process.stdout.split() == ["faults", "6", "scaling", "6"]
    assert process.stderr.count("Run python3 training_scripts/bootstrap.py --extras test in ") == 2
