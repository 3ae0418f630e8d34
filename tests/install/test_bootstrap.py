"""Setup: choice of Python and PyTorch, stored state, and one line per failure.

Nothing is installed: pip runs only against an unreachable address.
"""

import ast
import configparser
import contextlib
import errno
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

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
from tests.timeouts import PROCESS_TIMEOUT

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "training_scripts").glob("[a-z]*.py")) + [
    path for path in sorted((ROOT / "benchmarks").glob("**/*.py")) if path.read_text().startswith("#!")
]
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
OLD_TABLE = "| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |"

# Report 1 TiB of free disk space: the test machine needs none for an installation.
LARGE_DISK = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**40, 0, 2**40)\n"
# Link the pip of this Python into the environment: installing another one takes 5 s of CPU time.
LINKED_PIP = """
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
    """Import training_scripts/bootstrap.py of a checkout as a new module."""
    spec = importlib.util.spec_from_file_location(
        f"bootstrap_of_{root.name}", root / "training_scripts" / "bootstrap.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that the setup needs, without .venv."""
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


def write_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python_without_torch() -> str:
    """Return a Python without torch: the base interpreter of this environment."""
    path = getattr(sys, "_base_executable", sys.executable)
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    if subprocess.run([path, "-c", probe]).returncode != 0:
        pytest.skip("the Python below this environment has torch itself")
    return path


def run(python: str, arguments: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a Python without the pip and allocator settings of this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTORCH_", "PYTHON"))}
    environment = kept | {"PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
    )


def assert_one_line_error(process: subprocess.CompletedProcess, *words: str) -> None:
    """Assert exit code 6, no stdout, no traceback, and one error line with all `words`."""
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert process.returncode == 6, process.stderr
    assert process.stdout == ""
    assert "Traceback" not in process.stderr
    assert len(errors) == 1, process.stderr
    assert all(word in errors[0] for word in words), errors[0]


class TestTorchBuild:
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
    def test_build_is_chosen_from_nvidia_smi_output(self, tmp_path, monkeypatch, script, build, notice):
        programs = tmp_path / "programs"
        programs.mkdir()
        if script is not None:
            write_program(programs, "nvidia-smi", script)
        monkeypatch.setenv("PATH", str(programs))
        choice = choose_build(read_nvidia_smi())
        assert choice.build.name == build
        assert (choice.build.index is None) == (build == "default")
        assert choice.notice is None if notice is None else notice in choice.notice

    @pytest.mark.parametrize(("build", "words"), [(CPU, "works as well"), (CU126, "does not support this GPU")])
    def test_unreachable_pytorch_index_falls_back_with_notice(self, monkeypatch, build, words):
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda url, seconds: False)
        choice = fall_back_if_unreachable(build)
        assert choice.build == DEFAULT and words in choice.notice

    def test_build_is_kept_if_index_is_reachable(self, monkeypatch):
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda url, seconds: True)
        assert fall_back_if_unreachable(CU126) == BuildChoice(CU126)

    def test_closed_port_is_not_reachable(self):
        assert not is_answering("http://127.0.0.1:9/", 3)

    def test_installing_requirements_keeps_installed_torch_build(self, venv, tmp_path, monkeypatch):
        write_program(tmp_path / "programs", "uv", f'echo "$@" > {tmp_path}/arguments.txt')
        write_program(venv.folder / "bin", "python", "exit 0")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
        monkeypatch.setattr(Venv, "missing", lambda *_: ["jiwer"])  # torch is installed, by hand, and suits
        monkeypatch.setattr(Venv, "check_disk", lambda *_: None)
        with venv.locked() as lock:
            venv.install({"test"}, CU126, lock)
        # No upgrade flag: uv and pip keep any installed build whose version fits.
        assert (tmp_path / "arguments.txt").read_text() == f"pip install --python {venv.python} --editable .[test]\n"

    def test_torch_is_installed_from_its_index_in_one_command(self, venv, monkeypatch):
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
        """Return a complete setup with the default build for a GPU that needs CUDA 12.6; the index is unreachable."""
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

    @pytest.mark.parametrize("build, is_valid", [(DEFAULT, True), (CU126, True), (CPU, True), (CU128, False)])
    def test_stamp_is_valid_for_wanted_installed_and_cpu_builds(self, venv, build, is_valid):
        assert venv.is_ready({"test"}, build) == is_valid

    def test_stamp_is_invalid_if_package_is_missing_or_folder_moved(self, venv, monkeypatch):
        for missing_packages in (["jiwer>=3 (found 2.0)"], None, []):  # None: the Python does not start
            monkeypatch.setattr(Venv, "missing", lambda *_, missing_packages=missing_packages: missing_packages)
            assert venv.is_ready(set(), DEFAULT) == (missing_packages == [])
        venv.write_stamp(Stamp("cu126", "default", "/elsewhere"))
        assert not venv.is_ready(set(), DEFAULT)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"wanted": "cpu"}', "null"])
    def test_damaged_stamp_is_ignored(self, venv, text):
        venv.stamp.write_text(text)
        assert venv.read_stamp() is None
        assert not venv.is_ready(set(), DEFAULT)
        venv.stamp.unlink()
        assert venv.is_ready(set(), DEFAULT)  # created by hand

    @pytest.mark.parametrize(("error", "is_marked"), [(NothingChanged, False), (SetupError, True), (None, False)])
    def test_unfinished_marker_stays_only_after_partial_installation(self, venv, monkeypatch, error, is_marked):
        def install(installer, *arguments):
            assert venv.unfinished.exists() and arguments == ("--editable", ".[test]")
            if error:
                raise error("as it is")

        monkeypatch.setattr(Installer, "install", install)
        with venv.locked() as lock, pytest.raises(SetupError, match="as it is") if error else contextlib.nullcontext():
            venv.install({"test"}, CU128, lock)
        assert venv.unfinished.exists() == is_marked
        assert venv.is_ready(set(), DEFAULT) != is_marked

    def test_update_keeps_environment_and_killed_or_moved_one_is_recreated(self, venv, monkeypatch, calls):
        created = []
        monkeypatch.setattr(Venv, "create", lambda self: created.append(True))
        with venv.locked() as lock:
            venv.install({"test"}, DEFAULT, lock)
            assert calls == [("--editable", ".[test]")] and not created
            venv.unfinished.touch()
            venv.install({"test"}, DEFAULT, lock)
            assert len(calls) == 3 and len(created) == 1
            venv.write_stamp(Stamp("default", "default", "/elsewhere"))
            venv.install({"test"}, DEFAULT, lock)
        assert len(created) == 2 and venv.read_stamp() == Stamp("default", "default", str(venv.root))

    def test_link_to_a_folder_is_followed(self, venv, monkeypatch, tmp_path, calls):
        disk = tmp_path / "disk"
        shutil.rmtree(venv.folder)
        venv.folder.symlink_to(disk)
        created = []
        monkeypatch.setattr(
            subprocess, "run", lambda command, **_: created.append(command) or SimpleNamespace(stdout="", returncode=0)
        )
        monkeypatch.setattr(Venv, "missing", lambda *_: [] if created else None)
        monkeypatch.setattr(Venv, "has_working_python", lambda self: False)
        with venv.locked() as lock:
            venv.install({"test"}, DEFAULT, lock)
        assert created[0][-1] == str(disk.resolve()) and calls and venv.is_ready({"test"}, DEFAULT)

    def test_link_to_the_environment_of_another_checkout_is_left_alone(self, venv, tmp_path, calls):
        other = tmp_path / "other" / ".venv"
        other.mkdir(parents=True)
        (other / "pyvenv.cfg").touch()
        shutil.rmtree(venv.folder)
        venv.folder.symlink_to(other)
        venv.write_stamp(Stamp("default", "default", str(other.parent)))
        before = sorted(other.iterdir())
        with venv.locked() as lock, pytest.raises(SetupError, match="a link to the environment of .*: remove the link"):
            venv.install({"test"}, DEFAULT, lock)
        assert sorted(other.iterdir()) == sorted([*before, venv.lock.resolve()]) and not calls

    def test_second_setup_waits_for_first_and_installs_nothing(self, venv, monkeypatch, capsys, calls):
        venv.stamp.unlink()
        venv.unfinished.touch()

        def flock(lock, operation):
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError
            venv.unfinished.unlink()  # the other process has finished

        monkeypatch.setattr(fcntl, "flock", flock)
        venv.prepare({"test"})
        assert "Another setup is running" in capsys.readouterr().err and not calls

    def test_setup_continues_with_one_line_on_file_system_without_locks(self, venv, monkeypatch, capsys, calls):
        def flock(lock, operation):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(fcntl, "flock", flock)
        with venv.locked() as lock:
            venv.install({"test"}, DEFAULT, lock)
        lines = capsys.readouterr().err.splitlines()
        assert calls and [line for line in lines if "cannot be locked (Function not implemented)" in line] == lines[:1]


class TestSetupFailures:
    Version = namedtuple("Version", "major minor micro")

    @pytest.mark.parametrize("pip", [LINKED_PIP, *mark_full("")], ids=["linked pip", "ensurepip"])
    def test_unreachable_package_index_is_reported_in_one_line(self, checkout, pip):
        arguments = ["training_scripts/bootstrap.py", "--extras", "synthesis"]
        (checkout / "sitecustomize.py").write_text(LARGE_DISK + pip)
        network = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "PYTHONPATH": str(checkout)}
        process = run(python_without_torch(), arguments, checkout, **network)
        assert_one_line_error(process, "check the network", "PIP_INDEX_URL")
        again = run(python_without_torch(), arguments, checkout, **network | {"PIP_RETRIES": "1"})
        assert_one_line_error(again, "The package index could not be reached")
        assert "Creating the environment" not in again.stderr  # the existing environment is kept

    def test_missing_ensurepip_names_the_package(self, venv, monkeypatch):
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
    def test_environment_command_depends_on_available_tools(self, monkeypatch, modules, has_uv, words):
        monkeypatch.setattr("konkanivani.install.environment.has_module", lambda name: name in modules)
        monkeypatch.setattr(shutil, "which", lambda name: name if has_uv else None)
        assert creating_command("python", Path("x")) == words

    def test_failed_environment_creation_reports_last_output_line(self, venv, monkeypatch):
        venv.folder.mkdir()
        failed = [sys.executable, "-c", "print('line'); print('last words'); raise SystemExit(1)"]
        monkeypatch.setattr("konkanivani.install.environment.creating_command", lambda python, folder: failed)
        with pytest.raises(SetupError, match="the command failed: last words"):
            venv.create()

    def test_too_little_disk_space_is_reported(self, venv):
        venv.check_disk(8 * 1024**3, 7 * 1024**3)
        with pytest.raises(SetupError, match=r"needs 7\.0 GB of free space .* 1\.0 GB are free"):
            venv.check_disk(1024**3, 7 * 1024**3)

    def test_read_only_folder_exits_with_6(self, bootstrap, checkout, monkeypatch, capsys):
        monkeypatch.setattr(Requirements, "missing", lambda *_: ["torch"])
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert bootstrap.main([]) == 6
        message = capsys.readouterr().err
        assert "is not writable" in message and f"let its owner (user {os.getuid()})" in message
        assert not (checkout / ".venv").exists()

    def test_error_of_operating_system_is_not_attributed_to_pip(self, bootstrap, monkeypatch, capsys):
        def prepare(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(Requirements, "missing", lambda *_: ["torch"])
        monkeypatch.setattr(Venv, "prepare", prepare)
        assert bootstrap.main([]) == 6
        assert capsys.readouterr().err.startswith("error: The set-up failed: [Errno 5] Input/output error")

    def test_folder_other_than_environment_is_not_deleted(self, venv):
        venv.folder.mkdir()
        (venv.folder / "thesis.tex").write_text("years of work")
        with pytest.raises(SetupError, match="not a virtual environment"):
            venv.clear()
        assert (venv.folder / "thesis.tex").exists()

    def test_clearing_environment_keeps_lock_marker_and_downloads(self, venv):
        for name in ("bin", "lib", "uv-cache"):
            (venv.folder / name).mkdir(parents=True)
        for path in (venv.lock, venv.unfinished, venv.stamp):
            path.touch()
        venv.clear()
        assert sorted(venv.folder.iterdir()) == sorted([venv.lock, venv.unfinished, venv.cache])

    @pytest.mark.parametrize("version", [Version(3, 9, 18), Version(3, 15, 0), Version(2, 7, 18)])
    def test_unsupported_python_version_exits_with_6(self, bootstrap, monkeypatch, capsys, version):
        monkeypatch.setattr(sys, "version_info", version)
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(SystemExit) as ending:
            bootstrap.leave_unsuitable_python()
        assert ending.value.code == 6
        assert f"This is Python {version.major}.{version.minor}," in capsys.readouterr().err

    def test_complete_environment_without_pip_is_used_as_it_is(self, venv, tmp_path, monkeypatch):
        """As `uv venv` makes it."""
        (tmp_path / "without_pip").mkdir()
        (tmp_path / "without_pip" / "pip.py").write_text("raise ImportError")
        start = f'PYTHONPATH={tmp_path}/without_pip exec {sys.executable} "$@"'
        python = write_program(venv.folder / "bin", "python", start)
        package = write_program(venv.folder / "lib", "package.py", "")
        assert subprocess.run([python, "-c", "import pip"], capture_output=True).returncode != 0
        monkeypatch.setattr(Venv, "create", lambda self: pytest.fail("is created again"))
        venv.prepare({"test"})
        assert package.exists() and not venv.unfinished.exists()

    @pytest.mark.parametrize("state", ["made by hand", "interrupted", "moved", "broken"])
    def test_unusable_environment_is_emptied_only_if_set_up_made_it_or_python_is_broken(self, venv, monkeypatch, state):
        # Starts, but cannot import the project, as Python 3.9.
        answer = "exit 1" if state == "broken" else 'case "$*" in *konkanivani*) exit 1;; esac'
        write_program(venv.folder / "bin", "python", answer)
        if state == "interrupted":
            venv.unfinished.touch()
        if state == "moved":
            venv.write_stamp(Stamp("cpu", "cpu", "/elsewhere"))
        before = set(venv.folder.rglob("*"))
        monkeypatch.setattr("konkanivani.install.environment.creating_command", lambda python, folder: [])
        monkeypatch.setattr("konkanivani.install.packages.is_answering", lambda *_: True)
        monkeypatch.setattr(Venv, "check_disk", lambda *_: None)
        words = "not made by this set-up.*move it away" if state == "made by hand" else "could not create"
        with venv.locked() as lock, pytest.raises(SetupError, match=words):
            venv.install({"test"}, CPU, lock)
        after = set(venv.folder.rglob("*"))
        expected = before if state == "made by hand" else {venv.unfinished}
        assert after == expected | {venv.lock}

    def test_environment_created_without_pip_is_an_error(self, venv, monkeypatch):
        venv.folder.mkdir()
        failing = [sys.executable, "-c", "print('ensurepip: exit status 1'); raise SystemExit(1)"]
        monkeypatch.setattr("konkanivani.install.environment.creating_command", lambda python, folder: failing)
        monkeypatch.setattr(Venv, "missing", lambda *_: ["torch"])  # its Python starts
        with pytest.raises(SetupError, match="ensurepip: exit status 1"):
            venv.create()

    def test_newest_suitable_python_on_path_is_executed(self, bootstrap, tmp_path, monkeypatch):
        programs = tmp_path / "programs"
        write_program(
            programs, "python3.14", "echo 'python3.14: command not found'; exit 127"
        )  # shim of a version manager
        write_program(programs, "python3.13", "exit 1")  # without ensurepip
        write_program(programs, "python3.12", "echo '/opt/python 3.12/bin/python3.12'")
        write_program(programs, "python3.11", "echo /usr/bin/python3.11")
        monkeypatch.setenv("PATH", str(programs))
        started = []
        monkeypatch.setattr(os, "execv", lambda path, command: started.append((path, command[1:])) or sys.exit(0))
        monkeypatch.setattr(sys, "argv", ["script.py", "--flag"])
        with pytest.raises(SystemExit):
            bootstrap.leave_unsuitable_python()
        assert started == [("/opt/python 3.12/bin/python3.12", ["script.py", "--flag"])]

    def test_bootstrap_syntax_is_valid_for_python_3_6(self):
        text = (ROOT / "training_scripts" / "bootstrap.py").read_text()
        ast.parse(text, feature_version=(3, 6))
        assert text.isascii()

    @pytest.mark.parametrize("name", ["python3.6", "python3.8", "python3.9"])
    def test_installed_old_python_exits_with_its_version(self, checkout, name):
        installed = Path.home().glob(f".pyenv/versions/{name[6:]}.*/bin/{name}")
        pythons = [*map(str, installed), *filter(None, [shutil.which(name)])]
        pythons = [p for p in pythons if subprocess.run([p, "-c", ""], capture_output=True).returncode == 0]
        if not pythons:
            pytest.skip(f"no {name} here")
        process = run(pythons[0], ["training_scripts/bootstrap.py"], checkout, PATH="/nonexistent")
        assert_one_line_error(process, f"This is Python {name[6:]}")

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
    def test_pip_errors_are_explained_in_one_line(self, output, is_harmless, words):
        error = explain_failure(output, ROOT)
        assert isinstance(error, NothingChanged) is is_harmless
        assert words in str(error)
        assert "\n" not in str(error)

    def test_pip_is_tried_after_uv_fails_and_only_large_downloads_are_shown(self, venv, tmp_path, capsys):
        uv = 'echo "Downloading torch (505.9MiB)"; echo "Downloading tqdm (1.2MiB)"; exit 2'
        write_program(tmp_path / "programs", "uv", uv)
        write_program(venv.folder / "bin", "python", f'echo "$@" >> {tmp_path}/arguments.txt')
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
            with venv.locked() as lock:
                Installer(venv.root, venv.python, venv.cache, lock).install("torch")
        shown = capsys.readouterr().err
        assert "Downloading torch (505.9MiB)" in shown and "trying pip" in shown and "tqdm" not in shown
        assert (tmp_path / "arguments.txt").read_text().endswith("--no-input install torch\n")

    def test_pip_is_taken_from_ensurepip_if_there_is_no_uv(self, venv, tmp_path, monkeypatch):
        log = tmp_path / "arguments.txt"
        # pip is absent, and ensurepip installs it; pip does not find uv.
        script = (
            f'echo "$@" >> {log}\ncase "$*" in *"import pip") exit 1;; *" install --quiet uv") exit 1;; esac\nexit 0'
        )
        write_program(venv.folder / "bin", "python", script)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with venv.locked() as lock:
            Installer(venv.root, venv.python, venv.cache, lock).install("jiwer")
        lines = log.read_text().splitlines()
        assert lines[:2] == ["-c import pip", "-m ensurepip"] and lines[-1].endswith("install jiwer")

    def test_environment_is_kept_if_there_is_neither_uv_nor_pip(self, venv, monkeypatch):
        python = write_program(venv.folder / "bin", "python", "exit 1")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(Venv, "missing", lambda *_: ["jiwer"])
        monkeypatch.setattr(Venv, "check_disk", lambda *_: None)
        with venv.locked() as lock, pytest.raises(NothingChanged, match=r"neither pip nor ensurepip.*install uv"):
            venv.install({"test"}, CPU, lock)
        assert python.exists() and not venv.unfinished.exists()

    def test_failure_of_uv_is_explained_if_there_is_no_pip(self, venv, tmp_path, monkeypatch):
        write_program(tmp_path / "programs", "uv", "echo 'No solution found'; exit 1")
        write_program(venv.folder / "bin", "python", "exit 1")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
        with venv.locked() as lock, pytest.raises(SetupError, match="uv failed: No solution found"):
            Installer(venv.root, venv.python, venv.cache, lock).install("jiwer")

    def test_uv_gets_index_of_pip_and_full_disk_is_not_retried(self, venv, tmp_path, monkeypatch):
        uv = (
            f'echo "$UV_DEFAULT_INDEX" > {tmp_path}/arguments.txt; echo "No space left on device (os error 28)"; exit 2'
        )
        write_program(tmp_path / "programs", "uv", uv)
        write_program(venv.folder / "bin", "python", "echo \"global.index-url='https://mirror/simple'\"")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=os.pathsep)
        with venv.locked() as lock, pytest.raises(SetupError, match="disk became full"):
            Installer(venv.root, venv.python, venv.cache, lock).install("torch")
        assert (tmp_path / "arguments.txt").read_text() == "https://mirror/simple\n"

    @pytest.mark.parametrize(("missing", "makes_venv"), [([], False), (["jiwer"], True)])
    def test_python_with_all_requirements_needs_no_environment(
        self, bootstrap, monkeypatch, capsys, missing, makes_venv
    ):
        """For example a notebook with a suitable PyTorch, after `pip install .`."""
        prepared = []
        monkeypatch.setattr(Requirements, "missing", lambda *_: missing)
        monkeypatch.setattr(Venv, "prepare", lambda *_: prepared.append(True))
        assert bootstrap.main(["--extras", "synthesis"]) == 0
        assert bool(prepared) == makes_venv
        assert (capsys.readouterr().out.strip() == sys.executable) != makes_venv

    def test_unknown_extra_exits_with_2(self, bootstrap, capsys):
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

    def test_script_is_not_rerun_if_requirements_are_met(self, script, checkout):
        process = run(sys.executable, [str(script), "a", "b c"], checkout)
        assert process.stdout == "['a', 'b c'] ['expandable_segments:True', 'expandable_segments:True']\n"

    def test_script_is_rerun_in_venv_with_same_command_line(self, script, checkout):
        write_program(checkout / ".venv" / "bin", "python", f'exec {sys.executable} "$@"')
        process = run(python_without_torch(), ["-X", "utf8", str(script), "a", "b c"], checkout)
        assert process.stdout.startswith("['a', 'b c']"), process.stderr

    def test_script_is_rerun_at_most_once(self, script, checkout):
        bare = python_without_torch()
        write_program(checkout / ".venv" / "bin", "python", f'exec {bare} "$@"')
        assert_one_line_error(run(bare, [str(script)], checkout), "does not have torch", "bootstrap.py")

    def test_missing_packages_are_named_if_there_is_no_venv(self, script, checkout):
        words = ("does not have torch, torchaudio, sentencepiece", "run_training_memory_optimized.sh")
        assert_one_line_error(run(python_without_torch(), [str(script)], checkout), *words)

    def test_command_that_installs_missing_extras_is_named(self, script, checkout):
        script.write_text(self.SCRIPT.replace("venv()", "venv('test')"))
        words = ("does not have", "pytest", "python3 training_scripts/bootstrap.py --extras test in ")
        assert_one_line_error(run(python_without_torch(), [str(script)], checkout), *words)

    def test_incomplete_environment_is_rejected(self, script, checkout):
        write_program(checkout / ".venv" / "bin", "python", "echo never")
        (checkout / ".venv" / "konkanivani-unfinished.json").touch()
        assert_one_line_error(run(python_without_torch(), [str(script)], checkout), "is incomplete")

    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_allocator_settings_of_user_are_kept(self, name):
        environment = {name: "max_split_size_mb:64"}
        set_allocator_defaults(environment)
        assert environment == {name: "max_split_size_mb:64"}

    def test_user_id_without_name_gets_logname(self, monkeypatch):
        """Importing torch._dynamo, as for a memory plan, calls getpass, which fails without a user name."""
        named, unnamed = {"USER": "anita"}, {}
        set_process_defaults(unnamed)
        assert "LOGNAME" not in unnamed  # the user of the test process has a name
        monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
        for environment in (named, unnamed):
            set_process_defaults(environment)
        assert "LOGNAME" not in named and unnamed["LOGNAME"] == f"uid-{os.getuid()}"

    def test_new_requirement_is_reported_as_missing(self, venv, monkeypatch):
        real = importlib.util.find_spec
        requirements = Requirements(venv.root)
        assert "nvidia-ml-py" in requirements.lines([]) and venv.missing([]) is None  # no .venv here
        assert requirements.missing(["test"]) == []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pynvml" else real(name))
        assert requirements.missing([]) == ["nvidia-ml-py"]

    def test_missing_packages_are_checked_with_python_of_venv(self, venv):
        write_program(venv.folder / "bin", "python", f'exec {sys.executable} "$@"')
        assert venv.missing(["test"]) == []
        setup = venv.root / "setup.cfg"
        setup.write_text(setup.read_text().replace("    jiwer>=4\n", "    jiwer>=99\n    magic\n"))
        assert [words.split()[0] for words in venv.missing([])] == ["jiwer>=99", "magic"]

    def test_version_ranges_are_compared(self):
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
def test_huge_pages_are_added_to_tunables_of_user(before, after):
    add_huge_pages(before)
    assert before == {"GLIBC_TUNABLES": after}


class TestMalloc:
    # Allocate blocks of mixed sizes, separated by small ones, after freeing one of 30 MiB, as in every training run.
    # M_TOP_PAD is 0: otherwise its 16 MiB would hold a few of the blocks if the heap grew now.
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

    def run_program(self, program: str, mode: str, variables: dict[str, str]) -> str:
        """Run the program with the default settings of glibc and these variables; return its output."""
        if not os.path.exists("/proc/self/status") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
            pytest.skip("no glibc on Linux here")
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
        command = [sys.executable, "-c", program, mode]
        done = subprocess.run(
            command, cwd=ROOT, env=plain | variables, capture_output=True, text=True, timeout=PROCESS_TIMEOUT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def memory_growth(self, mode: str, **variables: str) -> tuple[str, int, int]:
        """Return the result of set_malloc_options, and the RSS growth in KiB before and after freeing the blocks."""
        answer, full, freed = self.run_program(self.PROGRAM, mode, variables).split()
        return answer, int(full), int(freed)

    def test_freed_blocks_of_mixed_sizes_are_returned_to_system(self):
        answer, full, freed = self.memory_growth("set")
        assert answer == "True" and full > 100_000 and freed < 8_000

    def test_negative_control_without_malloc_options_memory_stays(self):
        _, full, freed = self.memory_growth("leave")
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
    def test_malloc_threshold_of_user_is_kept(self, variables):
        assert self.memory_growth("set", **variables, MALLOC_ARENA_MAX="2")[0] == "False"

    # Print the RSS in KiB of the main heap while another thread holds 40 blocks of 1 MiB.
    THREAD_PROGRAM = (
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
    def test_threads_share_one_heap_unless_user_sets_arenas(self, mode, variables, is_shared):
        heap = int(self.run_program(self.THREAD_PROGRAM, mode, variables))
        assert (heap > 40_000) == is_shared

    def test_unrelated_tunable_of_user_does_not_prevent_options(self):
        assert self.memory_growth("set", GLIBC_TUNABLES="glibc.malloc.perturb=0")[0] == "True"

    @pytest.mark.parametrize("absent", [None, ValueError, OSError])
    def test_malloc_options_are_not_set_without_glibc(self, monkeypatch, absent):
        def confstr(name):
            if absent is not None:
                raise absent(name)

        monkeypatch.setattr(os, "confstr", confstr)
        assert process_defaults.set_malloc_options({}) is False

    def test_scripts_set_malloc_options_without_environment_variables(self, checkout):
        script = checkout / "training_scripts" / "script.py"
        script.write_text(
            "import bootstrap; environments = []; bootstrap.set_malloc_options = environments.append\n"
            "bootstrap.rerun_under_venv(); import os\n"
            "print(len(environments), [name for name in os.environ if 'MALLOC' in name or 'GLIBC' in name])\n"
        )
        assert run(sys.executable, [str(script)], checkout).stdout == "1 []\n"


class TestScripts:
    @pytest.mark.parametrize("path", [p for p in SCRIPTS if p.name != "bootstrap.py"], ids=lambda path: path.name)
    def test_scripts_parse_in_old_python_before_version_check(self, path):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
        assert not any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        calls = [n for n in tree.body if isinstance(n, ast.Expr) and "rerun_under_venv(" in ast.unparse(n)]
        imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module.startswith("konkanivani")]
        assert calls, "no rerun_under_venv() at the top"
        assert all(n.lineno > calls[0].lineno for n in imports)

    def test_torch_range_equals_setup_cfg(self):
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        required = setup["options"]["install_requires"].split()
        assert f"torch{TORCH_RANGE}" in required and f"torchaudio{TORCHAUDIO_RANGE}" in required
        # Later releases have no CUDA 12.6 wheels, which GPUs before Turing need: change `choose_build` with this bound.
        assert LAST_WITH_CU126 == "2.14" and is_version_in(f"{LAST_WITH_CU126}.1+cu126", TORCH_RANGE)
        assert not is_version_in("2.15.0", TORCH_RANGE)


class TestGPUArchitecture:
    CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
    CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]

    @pytest.mark.parametrize(
        ("name", "capability", "architectures"),
        [
            ("Tesla T4", (7, 5), CUDA_13),
            ("NVIDIA GeForce RTX 4090", (8, 9), CUDA_13),  # binary compatible with 8.0 and 8.6
            ("NVIDIA H100", (9, 0), CUDA_13),
            ("NVIDIA GB10", (12, 1), CUDA_13),
            ("future GPU", (13, 0), CUDA_13),  # compiled from PTX
            ("GeForce GTX 980", (5, 2), CUDA_12_6),
            ("NVIDIA H100", (9, 0), ["sm_90a"]),
        ],
    )
    def test_gpu_supported_by_build_is_accepted(self, name, capability, architectures):
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
    def test_unsupported_gpu_message_names_a_suitable_build(self, name, capability, architectures, words):
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

    def test_cudnn_is_disabled_for_cuda_device(self, monkeypatch):
        card = {"is_available": True, "get_device_name": "NVIDIA H100", "current_device": 0}
        card |= {"get_device_capability": (9, 0), "get_arch_list": ["sm_90"]}
        for name, value in card.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
        monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert choose_device("cuda") == torch.device("cuda", 0)
        assert not torch.backends.cudnn.enabled and not torch.backends.cuda.cudnn_sdp_enabled()
