"""The set-up: choice of Python and PyTorch, remembered state, and one sentence per failure.

Nothing is installed here: pip only runs against an unreachable address.
"""

import ast
import configparser
import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from konkanivani.distributed import TORCH_RANGE, TORCHAUDIO_RANGE, check_gpu_architecture, choose_device
from konkanivani.errors import ResourceError
from konkanivani.install import environment as process_defaults
from konkanivani.install.environment import (
    Requirements,
    Stamp,
    Venv,
    add_huge_pages,
    creating_command,
    is_version_in,
    set_allocator_defaults,
    set_process_defaults,
)
from konkanivani.install.packages import (
    CPU,
    CU126,
    CU128,
    DEFAULT,
    LAST_WITH_CU126,
    BuildChoice,
    Installer,
    NothingChanged,
    SetupError,
    choose_build,
    explain_failure,
    fall_back_if_unreachable,
    is_answering,
    read_nvidia_smi,
)
from tests.conftest import mark_full
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "training_scripts").glob("[a-z]*.py")) + [
    path for path in sorted((ROOT / "benchmarks").glob("**/*.py")) if path.read_text().startswith("#!")
]
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
OLD_TABLE = "| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |"

# The test machine does not need the disk space of an installation.
ROOMY_DISK = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40)\n"
# An environment with the pip of this Python: installing another one takes five CPU seconds.
PIP_AT_HAND = """
import pathlib, pip, subprocess
run = subprocess.run
def run_without_ensurepip(command, **options):
    done = run(command + (["--without-pip"] if command[1:3] == ["-m", "venv"] else []), **options)
    for packages in pathlib.Path(command[-1]).glob("lib/python*/site-packages"):
        (packages / "pip").symlink_to(pathlib.Path(pip.__file__).parent)
    return done
subprocess.run = run_without_ensurepip
"""


def load_bootstrap(root: Path):
    """Import training_scripts/bootstrap.py of a checkout as a separate module."""
    spec = importlib.util.spec_from_file_location(
        f"bootstrap_of_{root.name}", root / "training_scripts" / "bootstrap.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that the set-up needs, without .venv."""
    paths = ["training_scripts/bootstrap.py", "setup.cfg", "pyproject.toml", "konkanivani/__init__.py"]
    startup = (ROOT / "konkanivani/install").glob("*.py")
    for name in [*paths, *(path.relative_to(ROOT) for path in startup)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def bootstrap(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", sys.path[:])  # the import adds the checkout
    return load_bootstrap(checkout)


@pytest.fixture
def venv(checkout: Path) -> Venv:
    return Venv(checkout)


def put_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def bare_python() -> str:
    """Return a Python without torch: the base interpreter of this environment."""
    path = getattr(sys, "_base_executable", sys.executable)
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    if subprocess.run([path, "-c", probe]).returncode != 0:
        pytest.skip("the Python below this environment has torch itself")
    return path


def run(python: str, arguments: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a Python without the settings of pip and the allocator on this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTORCH_", "PYTHON"))}
    environment = kept | {"PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def assert_one_sentence(process: subprocess.CompletedProcess, *words: str) -> None:
    """Assert exit code 6, no stdout, no traceback, and one error with all `words`."""
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 6, process.stderr
    assert process.stdout == ""
    assert "Traceback" not in process.stderr
    assert len(errors) == 1, process.stderr
    assert all(word in errors[0] for word in words), errors[0]


class TestWheels:
    @pytest.mark.parametrize(
        ("script", "build", "notice"),
        [
            (None, "cpu", None),
            ('echo "5.2, 535.183.01"', "cu126", None),  # GTX 980
            ('echo "7.5, 580.65.06"', "default", None),  # T4
            ('echo "7.5, 525.105.17"', "cu126", None),
            ('echo "9.0, 580.65.06"', "default", None),  # H100
            ('echo "9.0, 580.65.06"; echo "6.1, 580.65.06"', "cu126", None),
            ('echo "12.0, 580.65.06"; echo "5.2, 580.65.06"', "default", "too old"),
            ('echo "12.0, 570.86.10"', "cu128", None),
            ('echo "3.7, 535.10.02"', "cpu", "No PyTorch build supports"),
            ('echo "7.0, 470.82.01"', "cu126", "470 is too old"),
            (f'echo "{NO_DRIVER}"; exit 9', "cpu", "couldn't communicate"),
            ('echo "No devices were found"', "cpu", None),
            ("echo $$; echo 'segmentation what, ever'", "cpu", "finds no working GPU"),
            ("exit 1", "cpu", "no output"),
            (
                'if [ $# -gt 0 ]; then echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2; fi\n'
                f'echo "{OLD_TABLE}"',
                "cu126",
                "470 is too old",
            ),
        ],
    )
    def test_follow_what_nvidia_smi_says(self, tmp_path, monkeypatch, script, build, notice):
        programs = tmp_path / "programs"
        programs.mkdir()
        if script is not None:
            put_program(programs, "nvidia-smi", script)
        monkeypatch.setenv("PATH", str(programs))
        choice = choose_build(read_nvidia_smi())
        assert choice.build.name == build
        assert (choice.build.index is None) == (build == "default")
        assert choice.notice is None if notice is None else notice in choice.notice

    @pytest.mark.parametrize(("build", "words"), [(CPU, "works as well"), (CU126, "does not support this GPU")])
    def test_fall_back_with_a_line_where_pytorchs_index_is_out_of_reach(self, monkeypatch, build, words):
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda url, seconds: False)
        choice = fall_back_if_unreachable(build)
        assert choice.build == DEFAULT and words in choice.notice

    def test_are_kept_where_the_index_answers(self, monkeypatch):
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda url, seconds: True)
        assert fall_back_if_unreachable(CU126) == BuildChoice(CU126)

    def test_an_address_where_nobody_listens_does_not_answer(self):
        assert not is_answering("http://127.0.0.1:9/", 3)

    def test_the_other_libraries_never_replace_an_installed_build(self, venv, tmp_path, monkeypatch):
        put_program(tmp_path / "programs", "uv", f'echo "$@" > {tmp_path}/told.txt')
        put_program(venv.folder / "bin", "python", "exit 0")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
        monkeypatch.setattr(Venv, "missing", lambda *_: ["jiwer"])  # torch is there, made by hand, and fits
        monkeypatch.setattr(Venv, "check_disk", lambda *_: None)
        with venv.locked() as lock:
            venv.install({"test"}, CU126, lock)
        # Nothing that upgrades: uv and pip keep an installed version that fits, whichever its build.
        assert (tmp_path / "told.txt").read_text() == f"pip install --python {venv.python} --editable .[test]\n"

    def test_come_from_their_index_and_replace_another_build_only_after_the_download(self, venv, monkeypatch):
        calls = []
        monkeypatch.setattr(Installer, "install", lambda self, *arguments: calls.append(arguments))
        installer = Installer.__new__(Installer)
        for build, has_torch in ((CU126, True), (CU126, False), (DEFAULT, False)):
            venv.install_torch(installer, build, has_torch)
        index = ("--index-url", "https://download.pytorch.org/whl/cu126")
        torches = (f"torch{TORCH_RANGE}", f"torchaudio{TORCHAUDIO_RANGE}")
        assert calls == [(*torches, *index, "--force-reinstall"), (*torches, *index), torches]


class TestStamp:
    @pytest.fixture
    def calls(self) -> list[tuple[str, ...]]:
        return []

    @pytest.fixture
    def venv(self, checkout, monkeypatch, calls) -> Venv:
        """Return a full set-up of the default build for a GPU that needs CUDA 12.6, whose index is unreachable now."""
        venv = Venv(checkout)
        venv.folder.mkdir()
        venv.write_stamp(Stamp("cu126", "default", str(checkout)))
        monkeypatch.setattr(Venv, "missing", lambda *_: [])
        monkeypatch.setattr(Venv, "check_disk", lambda *_: None)
        monkeypatch.setattr(Venv, "compile", lambda *_: None)
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda *_: False)
        monkeypatch.setattr(Installer, "_find_uv", lambda self: None)
        monkeypatch.setattr(Installer, "install", lambda self, *arguments: calls.append(arguments))
        return venv

    @pytest.mark.parametrize("build, holds", [(DEFAULT, True), (CU126, True), (CPU, True), (CU128, False)])
    def test_holds_for_the_builds_wanted_and_installed_and_for_no_card(self, venv, build, holds):
        assert venv.is_ready({"test"}, build) == holds

    def test_does_not_make_up_for_what_lacks_and_ends_in_another_place(self, venv, monkeypatch):
        for lacking in (["jiwer>=3 (found 2.0)"], None, []):  # None: a Python that does not start
            monkeypatch.setattr(Venv, "missing", lambda *_, lacking=lacking: lacking)
            assert venv.is_ready(set(), DEFAULT) == (lacking == [])
        venv.write_stamp(Stamp("cu126", "default", "/elsewhere"))
        assert not venv.is_ready(set(), DEFAULT)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"wanted": "cpu"}', "null"])
    def test_a_damaged_one_counts_as_none(self, venv, text):
        venv.stamp.write_text(text)
        assert venv.read_stamp() is None
        assert not venv.is_ready(set(), DEFAULT)
        venv.stamp.unlink()
        assert venv.is_ready(set(), DEFAULT)  # created by hand

    @pytest.mark.parametrize(("error", "is_marked"), [(NothingChanged, False), (SetupError, True), (None, False)])
    def test_the_mark_stands_until_it_is_done_or_as_before(self, venv, monkeypatch, error, is_marked):
        def install(installer, *arguments):
            assert venv.unfinished.exists() and arguments == ("--editable", ".[test]")
            if error:
                raise error("as it is")

        monkeypatch.setattr(Installer, "install", install)
        with venv.locked() as lock, pytest.raises(SetupError, match="as it is") if error else contextlib.nullcontext():
            venv.install({"test"}, CU128, lock)
        assert venv.unfinished.exists() == is_marked
        assert venv.is_ready(set(), DEFAULT) != is_marked

    def test_an_update_keeps_the_environment_and_one_that_was_killed_or_moved_is_made_anew(
        self, venv, monkeypatch, calls
    ):
        made = []
        monkeypatch.setattr(Venv, "create", lambda self: made.append(True))
        with venv.locked() as lock:
            venv.install({"test"}, DEFAULT, lock)
            assert calls == [("--editable", ".[test]")] and not made
            venv.unfinished.touch()
            venv.install({"test"}, DEFAULT, lock)
            assert len(calls) == 3 and len(made) == 1
            venv.write_stamp(Stamp("default", "default", "/elsewhere"))
            venv.install({"test"}, DEFAULT, lock)
        assert len(made) == 2 and venv.read_stamp() == Stamp("default", "default", str(venv.root))

    def test_a_second_process_waits_for_the_first_and_finds_its_work_done(self, venv, monkeypatch, capsys, calls):
        venv.stamp.unlink()
        venv.unfinished.touch()

        def flock(lock, operation):
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError
            venv.unfinished.unlink()  # the other process ends

        monkeypatch.setattr(fcntl, "flock", flock)
        venv.prepare({"test"})
        assert "Another setup is running" in capsys.readouterr().err and not calls


class TestWhatCannotBeDone:
    Version = namedtuple("Version", "major minor micro")

    @pytest.mark.parametrize("pip", [PIP_AT_HAND, *mark_full("")], ids=["pip at hand", "ensurepip"])
    def test_no_network(self, checkout, pip):
        arguments = ["training_scripts/bootstrap.py", "--extras", "synthesis"]
        (checkout / "sitecustomize.py").write_text(ROOMY_DISK + pip)
        network = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PYTHONPATH": str(checkout)}
        process = run(bare_python(), arguments, checkout, **network)
        assert_one_sentence(process, "check the network", "PIP_INDEX_URL")
        again = run(bare_python(), arguments, checkout, **network | {"PIP_RETRIES": "1"})
        assert_one_sentence(again, "The package index could not be reached")
        assert "Creating the environment" not in again.stderr  # the existing environment is kept

    def test_no_ensurepip(self, venv, monkeypatch):
        venv.folder.mkdir()
        monkeypatch.setattr("konkanivani.install.environment.has_module", lambda name: False)
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(SetupError, match=r"apt install python3\.\d+-venv"):
            venv.create()

    @pytest.mark.parametrize(
        ("modules", "has_uv", "words"),
        [
            (["ensurepip", "virtualenv"], True, ["python", "-m", "venv", "x"]),
            (["virtualenv"], True, ["uv", "venv", "--quiet", "--seed", "--allow-existing", "--python", "python", "x"]),
            (["virtualenv"], False, ["python", "-m", "virtualenv", "--quiet", "x"]),
        ],
    )
    def test_makes_the_environment_by_what_there_is(self, monkeypatch, modules, has_uv, words):
        monkeypatch.setattr("konkanivani.install.environment.has_module", lambda name: name in modules)
        monkeypatch.setattr(shutil, "which", lambda name: name if has_uv else None)
        assert creating_command("python", Path("x")) == words

    def test_the_last_words_of_what_could_not_make_it(self, venv, monkeypatch):
        venv.folder.mkdir()
        failed = [sys.executable, "-c", "print('line'); print('last words'); raise SystemExit(1)"]
        monkeypatch.setattr("konkanivani.install.environment.creating_command", lambda python, folder: failed)
        with pytest.raises(SetupError, match="last words"):
            venv.create()

    def test_full_disk(self, venv):
        venv.check_disk(8 * 1024**3, 7 * 1024**3)
        with pytest.raises(SetupError, match=r"needs 7\.0 GB of free space .* 1\.0 GB are free"):
            venv.check_disk(1024**3, 7 * 1024**3)

    def test_read_only_folder(self, bootstrap, checkout, monkeypatch, capsys):
        monkeypatch.setattr(Requirements, "missing", lambda *_: ["torch"])
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert bootstrap.main([]) == 6
        said = capsys.readouterr().err
        assert "is not writable" in said and f"let its owner (user {os.getuid()})" in said
        assert not (checkout / ".venv").exists()

    def test_a_folder_that_is_no_environment_is_left_alone(self, venv):
        venv.folder.mkdir()
        (venv.folder / "thesis.tex").write_text("years of work")
        with pytest.raises(SetupError, match="not a virtual environment"):
            venv.clear()
        assert (venv.folder / "thesis.tex").exists()

    def test_what_is_made_anew_keeps_the_lock_the_mark_and_the_downloads(self, venv):
        for name in ("bin", "lib", "uv-cache"):
            (venv.folder / name).mkdir(parents=True)
        for path in (venv.lock, venv.unfinished, venv.stamp):
            path.touch()
        venv.clear()
        assert sorted(venv.folder.iterdir()) == sorted([venv.lock, venv.unfinished, venv.cache])

    @pytest.mark.parametrize("version", [Version(3, 9, 18), Version(3, 15, 0), Version(2, 7, 18)])
    def test_a_python_that_pytorch_is_not_built_for(self, bootstrap, monkeypatch, capsys, version):
        monkeypatch.setattr(sys, "version_info", version)
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(SystemExit) as ending:
            bootstrap.leave_unsuitable_python()
        assert ending.value.code == 6
        assert f"This is Python {version.major}.{version.minor}," in capsys.readouterr().err

    def test_hands_over_to_the_newest_python_on_the_path(self, bootstrap, tmp_path, monkeypatch):
        programs = tmp_path / "programs"
        put_program(programs, "python3.14", "echo 'python3.14: command not found'; exit 127")  # of a version manager
        put_program(programs, "python3.13", "exit 1")  # without ensurepip
        put_program(programs, "python3.12", "echo '/opt/python 3.12/bin/python3.12'")
        put_program(programs, "python3.11", "echo /usr/bin/python3.11")
        monkeypatch.setenv("PATH", str(programs))
        started = []
        monkeypatch.setattr(os, "execv", lambda path, command: started.append((path, command[1:])) or sys.exit(0))
        monkeypatch.setattr(sys, "argv", ["script.py", "--flag"])
        with pytest.raises(SystemExit):
            bootstrap.leave_unsuitable_python()
        assert started == [("/opt/python 3.12/bin/python3.12", ["script.py", "--flag"])]

    def test_the_syntax_is_that_of_python_3_6(self):
        text = (ROOT / "training_scripts" / "bootstrap.py").read_text()
        ast.parse(text, feature_version=(3, 6))
        assert text.isascii()

    @pytest.mark.parametrize("name", ["python3.6", "python3.8", "python3.9"])
    def test_a_real_old_python_says_so(self, checkout, name):
        installed = Path.home().glob(f".pyenv/versions/{name[6:]}.*/bin/{name}")
        pythons = [*map(str, installed), *filter(None, [shutil.which(name)])]
        pythons = [p for p in pythons if subprocess.run([p, "-c", ""], capture_output=True).returncode == 0]
        if not pythons:
            pytest.skip(f"no {name} here")
        process = run(pythons[0], ["training_scripts/bootstrap.py"], checkout, PATH="/nonexistent")
        assert_one_sentence(process, f"This is Python {name[6:]}")

    @pytest.mark.parametrize(
        ("output", "is_harmless", "words"),
        [
            ("ERROR: Could not install packages for an OSError: [Errno 28] No space left on device", False, "TMPDIR"),
            ("ERROR: Could not install: [Errno 13] Permission denied: '/x'", False, "no write permission"),
            ("WARNING: Retrying (Retry(total=0)) ... Temporary failure in name resolution", True, "check the network"),
            ("ERROR: No matching distribution found for torch<2.12,>=2.10", True, "has no torch<2.12,>=2.10 for this"),
            ("ERROR: something unheard of", False, "something unheard of"),
            ("", False, "no output"),
        ],
    )
    def test_pips_errors_become_a_sentence(self, output, is_harmless, words):
        error = explain_failure(output, ROOT)
        assert isinstance(error, NothingChanged) is is_harmless
        assert words in str(error)
        assert "\n" not in str(error)

    def test_uv_that_fails_leaves_it_to_pip_and_only_large_downloads_are_shown(self, venv, tmp_path, capsys):
        uv = 'echo "Downloading torch (505.9MiB)"; echo "Downloading tqdm (1.2MiB)"; exit 2'
        put_program(tmp_path / "programs", "uv", uv)
        put_program(venv.folder / "bin", "python", f'echo "$@" >> {tmp_path}/told.txt')
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
            with venv.locked() as lock:
                Installer(venv.root, venv.python, venv.cache, lock).install("torch")
        shown = capsys.readouterr().err
        assert "Downloading torch (505.9MiB)" in shown and "trying pip" in shown and "tqdm" not in shown
        assert (tmp_path / "told.txt").read_text().endswith("--no-input install torch\n")

    def test_uv_is_told_of_pips_index_and_a_full_disk_is_not_tried_twice(self, venv, tmp_path, monkeypatch):
        uv = f'echo "$UV_DEFAULT_INDEX" > {tmp_path}/told.txt; echo "No space left on device (os error 28)"; exit 2'
        put_program(tmp_path / "programs", "uv", uv)
        put_program(venv.folder / "bin", "python", "echo \"global.index-url='https://mirror/simple'\"")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
        with venv.locked() as lock, pytest.raises(SetupError, match="disk became full"):
            Installer(venv.root, venv.python, venv.cache, lock).install("torch")
        assert (tmp_path / "told.txt").read_text() == "https://mirror/simple\n"

    @pytest.mark.parametrize(("missing", "makes_venv"), [([], False), (["jiwer"], True)])
    def test_a_python_with_all_requirements_is_used_as_it_is(self, bootstrap, monkeypatch, capsys, missing, makes_venv):
        """As in a notebook whose own PyTorch fits, after `pip install .`."""
        prepared = []
        monkeypatch.setattr(Requirements, "missing", lambda *_: missing)
        monkeypatch.setattr(Venv, "prepare", lambda *_: prepared.append(True))
        assert bootstrap.main(["--extras", "synthesis"]) == 0
        assert bool(prepared) == makes_venv
        assert (capsys.readouterr().out.strip() == sys.executable) != makes_venv

    def test_an_unknown_extra_is_a_usage_error(self, bootstrap, capsys):
        with pytest.raises(SystemExit) as ending:
            bootstrap.main(["--extras", "synthesis,magic"])
        assert ending.value.code == 2
        assert "magic" in capsys.readouterr().err


class TestRerun:
    SCRIPT = (
        "import bootstrap; bootstrap.rerun_under_venv(); import os, sys; "
        "print(sys.argv[1:], [os.environ.get(n) for n in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')])\n"
    )

    @pytest.fixture
    def script(self, checkout) -> Path:
        path = checkout / "training_scripts" / "script.py"
        path.write_text(self.SCRIPT)
        return path

    def test_stays_where_all_is_there(self, script, checkout):
        process = run(sys.executable, [str(script), "a", "b c"], checkout)
        assert process.stdout == "['a', 'b c'] ['expandable_segments:True', 'expandable_segments:True']\n"

    def test_goes_to_the_venv_with_the_same_command_line(self, script, checkout):
        put_program(checkout / ".venv" / "bin", "python", f'exec {sys.executable} "$@"')
        process = run(bare_python(), ["-X", "utf8", str(script), "a", "b c"], checkout)
        assert process.stdout.startswith("['a', 'b c']"), process.stderr

    def test_does_not_go_in_circles(self, script, checkout):
        bare = bare_python()
        put_program(checkout / ".venv" / "bin", "python", f'exec {bare} "$@"')
        assert_one_sentence(run(bare, [str(script)], checkout), "does not have torch", "bootstrap.py")

    def test_says_what_lacks_where_there_is_no_venv(self, script, checkout):
        words = ("does not have torch, torchaudio, sentencepiece", "run_training_memory_optimized.sh")
        assert_one_sentence(run(bare_python(), [str(script)], checkout), *words)

    def test_refuses_an_environment_that_is_incomplete(self, script, checkout):
        put_program(checkout / ".venv" / "bin", "python", "echo never")
        (checkout / ".venv" / "konkanivani-unfinished.json").touch()
        assert_one_sentence(run(bare_python(), [str(script)], checkout), "is incomplete")

    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_leaves_the_allocator_to_a_user_who_set_it(self, name):
        environment = {name: "max_split_size_mb:64"}
        set_allocator_defaults(environment)
        assert environment == {name: "max_split_size_mb:64"}

    def test_gives_a_name_to_a_user_of_a_container_who_has_none(self, monkeypatch):
        """torch._dynamo calls getpass during its import, as for a memory plan."""
        named, nameless = {"USER": "anita"}, {}
        set_process_defaults(nameless)
        assert "LOGNAME" not in nameless  # the user of this test has a name
        monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
        for environment in (named, nameless):
            set_process_defaults(environment)
        assert "LOGNAME" not in named and nameless["LOGNAME"] == f"uid-{os.getuid()}"

    def test_notices_a_requirement_that_was_added_since(self, venv, monkeypatch):
        real = importlib.util.find_spec
        requirements = Requirements(venv.root)
        assert "nvidia-ml-py" in requirements.lines([]) and venv.missing([]) is None  # no .venv here
        assert requirements.missing(["test"]) == []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pynvml" else real(name))
        assert requirements.missing([]) == ["nvidia-ml-py"]

    def test_asks_the_environments_own_python(self, venv):
        put_program(venv.folder / "bin", "python", f'exec {sys.executable} "$@"')
        assert venv.missing(["test"]) == []
        setup = venv.root / "setup.cfg"
        setup.write_text(setup.read_text().replace("    jiwer\n", "    jiwer>=99\n    magic\n"))
        assert [words.split()[0] for words in venv.missing([])] == ["jiwer>=99", "magic"]

    def test_versions_count(self):
        assert is_version_in("2.11.0+cu126", ">=2.10,<2.12")
        assert not is_version_in("2.9.1", ">=2.10,<2.12")
        assert not is_version_in("2.12.0", ">=2.10,<2.12")


@pytest.mark.parametrize(
    "before, after",
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, "glibc.malloc.perturb=0:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
    ids=str,
)
def test_large_pages_are_asked_for_beside_a_users_own_settings(before, after):
    add_huge_pages(before)
    assert before == {"GLIBC_TUNABLES": after}


class TestMalloc:
    # Blocks of mixed sizes, separated by small ones; malloc has freed one of 30 MiB before, as in every training run.
    # Without the pad, whose 16 MiB would take a few of the blocks if the heap grew now.
    PROGRAM = (
        "import os, sys; sys.path.insert(0, '.')\n"
        "from konkanivani.install import environment as process_defaults\n"
        "status = lambda: int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])\n"
        "process_defaults.MALLOC_THRESHOLD, process_defaults.MALLOC_TOP_PAD = 1 << 20, 0\n"
        "answer = process_defaults.set_malloc_options(os.environ) if sys.argv[1] == 'set' else None\n"
        "bytearray(30 << 20)\n"
        "before, blocks, apart = status(), [], []\n"
        "for number in range(50):\n"
        "    blocks.append(bytearray((2 << 20) + number * 65536)); apart.append(bytearray(8192))\n"
        "full = status(); blocks.clear(); print(answer, full - before, status() - before)\n"
    )

    def said_by(self, program: str, mode: str, variables: dict[str, str]) -> str:
        """Return the output of the program with glibc's default settings and these variables."""
        if not os.path.exists("/proc/self/status") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
            pytest.skip("no glibc on Linux here")
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
        command = [sys.executable, "-c", program, mode]
        done = subprocess.run(
            command, cwd=ROOT, env=plain | variables, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def grown(self, mode: str, **variables: str) -> tuple[str, int, int]:
        """Return the answer of the setting, and resident KiB with the blocks and after they are freed."""
        answer, full, freed = self.said_by(self.PROGRAM, mode, variables).split()
        return answer, int(full), int(freed)

    def test_freed_blocks_of_mixed_sizes_go_back_to_the_system(self):
        answer, full, freed = self.grown("set")
        assert answer == "True" and full > 100_000 and freed < 8_000

    def test_without_it_they_stay(self):
        _, full, freed = self.grown("leave")
        assert full > 100_000 and freed > 30_000

    @pytest.mark.parametrize(
        "variables",
        [
            {"MALLOC_MMAP_THRESHOLD_": "33554432"},
            {"MALLOC_TRIM_THRESHOLD_": "67108864"},
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold=33554432"},
        ],
        ids=str,
    )
    def test_a_users_own_setting_stays(self, variables):
        assert self.grown("set", **variables, MALLOC_ARENA_MAX="2")[0] == "False"

    # Size in KiB of the first heap of the process while another thread has 40 blocks of 1 MiB.
    OF_A_THREAD = (
        "import os, sys, threading; sys.path.insert(0, '.')\n"
        "from konkanivani.install import environment as process_defaults\n"
        "sys.argv[1] == 'set' and process_defaults.set_malloc_options(os.environ)\n"
        "def hold():\n"
        "    blocks = [bytearray(1 << 20) for _ in range(40)]\n"
        "    print(open('/proc/self/smaps').read().split('[heap]')[1].split('Rss:')[1].split()[0])\n"
        "thread = threading.Thread(target=hold); thread.start(); thread.join()\n"
    )

    @pytest.mark.parametrize(
        "mode, variables, is_shared",
        [
            ("set", {}, True),
            ("leave", {}, False),
            ("set", {"MALLOC_ARENA_MAX": "4"}, False),
            ("set", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, False),
        ],
        ids=str,
    )
    def test_threads_take_from_one_heap_unless_a_user_wants_more(self, mode, variables, is_shared):
        heap = int(self.said_by(self.OF_A_THREAD, mode, variables))
        assert (heap > 40_000) == is_shared

    def test_a_users_setting_of_something_else_is_no_hindrance(self):
        assert self.grown("set", GLIBC_TUNABLES="glibc.malloc.perturb=0")[0] == "True"

    @pytest.mark.parametrize("absent", [None, ValueError, OSError])
    def test_elsewhere_than_on_glibc_nothing_happens(self, monkeypatch, absent):
        def confstr(name):
            if absent is not None:
                raise absent(name)

        monkeypatch.setattr(os, "confstr", confstr)
        assert process_defaults.set_malloc_options({}) is False

    def test_every_script_sets_it_and_hands_nothing_on(self, checkout):
        script = checkout / "training_scripts" / "script.py"
        script.write_text(
            "import bootstrap; asked = []; bootstrap.set_malloc_options = asked.append\n"
            "bootstrap.rerun_under_venv(); import os\n"
            "print(len(asked), [name for name in os.environ if 'MALLOC' in name or 'GLIBC' in name])\n"
        )
        assert run(sys.executable, [str(script)], checkout).stdout == "1 []\n"


class TestScripts:
    @pytest.mark.parametrize("path", [p for p in SCRIPTS if p.name != "bootstrap.py"], ids=lambda path: path.name)
    def test_old_pythons_can_read_a_script_far_enough_to_say_so(self, path):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
        assert not any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        calls = [n for n in tree.body if isinstance(n, ast.Expr) and "rerun_under_venv()" in ast.unparse(n)]
        imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module.startswith("konkanivani")]
        assert calls, "no rerun_under_venv() at the head"
        assert all(n.lineno > calls[0].lineno for n in imports)

    def test_the_torch_range_is_written_once_more_only_in_preflight(self):
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        required = setup["options"]["install_requires"].split()
        assert f"torch{TORCH_RANGE}" in required and f"torchaudio{TORCHAUDIO_RANGE}" in required
        # CUDA 12.6 wheels, for GPUs before Turing, end here: a higher bound needs another choice of builds.
        assert LAST_WITH_CU126 == "2.14" and is_version_in(f"{LAST_WITH_CU126}.1+cu126", TORCH_RANGE)
        assert not is_version_in("2.15.0", TORCH_RANGE)


class TestGPUArchitecture:
    CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
    CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]

    @pytest.mark.parametrize(
        ("name", "capability", "architectures"),
        [
            ("Tesla T4", (7, 5), CUDA_13),
            ("NVIDIA GeForce RTX 4090", (8, 9), CUDA_13),  # runs builds for 8.0 and 8.6
            ("NVIDIA H100", (9, 0), CUDA_13),
            ("NVIDIA GB10", (12, 1), CUDA_13),
            ("a card to come", (13, 0), CUDA_13),  # compiles the PTX
            ("GeForce GTX 980", (5, 2), CUDA_12_6),
            ("NVIDIA H100", (9, 0), ["sm_90a"]),
        ],
    )
    def test_lets_a_card_pass_that_the_build_drives(self, name, capability, architectures):
        check_gpu_architecture(name, capability, architectures, "2.11.0+cu130")

    @pytest.mark.parametrize(
        ("name", "capability", "architectures", "words"),
        [
            ("GeForce GTX 980", (5, 2), CUDA_13, "--index-url https://download.pytorch.org/whl/cu126"),
            ("Tesla V100", (7, 0), CUDA_13, "--index-url https://download.pytorch.org/whl/cu126"),
            ("NVIDIA GeForce RTX 5090", (12, 0), CUDA_12_6, "Install the default build"),
            ("Tesla K80", (3, 7), CUDA_13, "--device cpu"),
            ("NVIDIA Thor", (11, 0), ["sm_90a", "sm_100", "sm_120"], "Install the default build"),
            ("Tesla T4", (7, 5), [], "no GPU code at all"),
        ],
    )
    def test_says_how_to_get_a_build_for_any_other_card(self, name, capability, architectures, words):
        with pytest.raises(ResourceError) as raised:
            check_gpu_architecture(name, capability, architectures, "2.11.0")
        message = str(raised.value)
        assert raised.value.exit_code == 6
        assert words in message
        assert f"{name} has architecture sm_{capability[0]}{capability[1]}" in message
        assert all(architecture in message for architecture in architectures)
        command = (
            f'{sys.executable} -m pip install --force-reinstall "torch{TORCH_RANGE}" "torchaudio{TORCHAUDIO_RANGE}"'
        )
        assert capability < (5, 0) or command in message

    def test_a_run_on_a_card_asks_nothing_of_cudnn(self, monkeypatch):
        card = {"is_available": True, "get_device_name": "NVIDIA H100", "current_device": 0}
        card |= {"get_device_capability": (9, 0), "get_arch_list": ["sm_90"]}
        for name, value in card.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
        monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert choose_device("cuda") == torch.device("cuda", 0)
        assert not torch.backends.cudnn.enabled and not torch.backends.cuda.cudnn_sdp_enabled()
