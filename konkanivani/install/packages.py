"""PyTorch build for this machine, and installation of packages.

Standard library only: training_scripts/bootstrap.py uses it before anything is installed.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# --------------------
# Choice of the PyTorch build for the GPUs and the driver of this machine.


GIB = 1024**3
SECONDS_TO_ANSWER = 5


@dataclass(frozen=True)
class TorchBuild:
    """PyTorch build: its name, its size in words, and the disk space in bytes that its installation needs."""

    name: str
    size: str
    disk_bytes: int

    @property
    def index(self) -> str | None:
        """URL of the package index; None for the default build, which is on PyPI."""
        return None if self.name == "default" else f"https://download.pytorch.org/whl/{self.name}"


# The default build is for CUDA 13: compute capability 7.5 (Turing) and later, driver 580 or newer.
DEFAULT = TorchBuild("default", "with its CUDA libraries: about 2.8 GB to download, 4.6 GB on disk", 7 * GIB)
# Blackwell (10.0 and later) too, with driver 525 or newer.
CU128 = TorchBuild("cu128", "for CUDA 12.8: about 3 GB to download, 7 GB on disk", 10 * GIB)
LAST_WITH_CU126 = "2.14"  # last release of torch with wheels for CUDA 12.6, and so for GPUs before Turing
# 5.0 (Maxwell, such as a GTX 980 with sm_52) to 9.0 (Hopper), with driver 525 or newer.
CU126 = TorchBuild("cu126", "for CUDA 12.6: about 2.6 GB to download, 5 GB on disk", 7 * GIB)
CPU = TorchBuild("cpu", "without CUDA: about 200 MB to download, 700 MB on disk", 2 * GIB)


@dataclass(frozen=True)
class BuildChoice:
    """Chosen build, and a sentence for the user about unsupported hardware, if any."""

    build: TorchBuild
    notice: str | None = None


def choose_build(nvidia_smi: str | None) -> BuildChoice:
    """Choose the PyTorch build for the GPUs.

    Args:
        nvidia_smi: its output, a line "7.5, 580.65.06" per GPU or the plain table; None without a GPU.
    """
    if sys.platform == "darwin":  # no CUDA, and PyPI has the right build
        return BuildChoice(DEFAULT)
    if nvidia_smi is None:
        return BuildChoice(CPU)
    cards = [(int(major), int(minor)) for major, minor in re.findall(r"(?m)^\s*(\d+)\.(\d+),", nvidia_smi)]
    drivers = [int(n) for n in re.findall(r"(?m)(?:^[^,\n]*, |Driver Version: )(\d+)\.\d", nvidia_smi)]
    if not drivers:
        return BuildChoice(CPU, f"nvidia-smi is installed but finds no working GPU ({last_line(nvidia_smi)})")
    cards = cards or [(7, 5)]  # the plain table has no compute capability: assume Turing
    driver = min(drivers)
    newest = max(cards)
    oldest = min(cards)
    if newest < (5, 0):
        capability = "{}.{}".format(*newest)
        notice = f"No PyTorch build supports a GPU of compute capability {capability}: training will run on the CPU"
        return BuildChoice(CPU, notice)
    if driver < 525:
        advice = "update it to 580 or newer, or train on the CPU"
        return BuildChoice(CU126, f"NVIDIA's driver {driver} is too old for every PyTorch build: {advice}")
    # One build must serve all GPUs: prefer the newest one.
    if newest >= (10, 0) and driver < 580:
        return BuildChoice(CU128)
    if newest >= (10, 0) and oldest < (7, 5):
        capability = "{}.{}".format(*oldest)
        words = f"The GPU of compute capability {capability} is too old for the PyTorch build that the newer GPU needs"
        return BuildChoice(DEFAULT, words)
    return BuildChoice(CU126 if oldest < (7, 5) or driver < 580 else DEFAULT)


def read_nvidia_smi() -> str | None:
    """Return the output of nvidia-smi for `choose_build`; None if there is no GPU."""
    query = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    output = None
    for command in (query, ["nvidia-smi"]):  # drivers before 2021 have no compute_cap: use the table
        try:  # nvidia-smi hangs if a GPU has fallen off the bus
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
        except subprocess.TimeoutExpired:
            output = "no answer within 20 seconds"
            continue
        except OSError:
            return None
        output = process.stdout.decode("utf-8", "replace")
        if process.returncode == 0:
            return None if "No devices were found" in output else output
    return output


def last_line(text: str) -> str:
    """Return the last line that is not blank, shortened for use inside a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return lines[-1].rstrip(".")[:200]


def is_answering(url: str, seconds: float) -> bool:
    """Return whether a URL responds within `seconds`."""
    question = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])"
    try:
        # A child process, because a DNS lookup has no timeout of its own.
        command = [sys.executable, "-c", question, url]
        return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fall_back_if_unreachable(build: TorchBuild) -> BuildChoice:
    """Return the build, or the default build with a notice if PyTorch's own index does not respond."""
    if build.index is None or is_answering(f"{build.index}/torch/", SECONDS_TO_ANSWER):
        return BuildChoice(build)
    if build == CPU:
        words = (
            "PyTorch's CPU package index does not respond: using the default build, which is larger and works as well"
        )
    else:
        words = (
            f"{build.index} does not respond: using the default build, which does not support this GPU with this "
            "driver, so training will run on the CPU. When the index is reachable, delete .venv and start again"
        )
    return BuildChoice(DEFAULT, words)


# --------------------
# Installation of packages into a virtual environment with uv, or pip.


# Lines of pip and uv that are shown: files of 100 MB and more.
LARGE_DOWNLOAD = re.compile(r"Downloading \S+ \((\d{3,}(\.\d+)? ?Mi?B|[\d.]+ ?Gi?B)\)")
FULL_DISK = re.compile(r"No space left|Errno 28|os error 28|Disk quota")
NO_PERMISSION = re.compile(r"Read-only file system|Permission denied|Errno 13|Errno 30")
NO_NETWORK = re.compile(
    r"connection|distribution found for setuptools|name resolution|name or service|timed? ?out|max retries|"
    r"unreachable|proxy|SSL|IncompleteRead",
    re.IGNORECASE,
)


class SetupError(Exception):
    """Failed set-up; the text is the one sentence that the user reads."""


class NothingChanged(SetupError):
    """Set-up that failed before it installed a package."""


class Installer:
    """uv, or pip where uv is absent and cannot be installed, for the environment of `python`.

    On two cores the set-up takes 36 s with uv, 98 s with pip (45 and 95 s of CPU time; 2026-11-28, `synthesis,test`),
    and 19 s with the downloads in uv's cache. If uv is not on PATH, pip installs it in 1.5 s.

    Children inherit `lock`: if this process is killed, the next set-up still waits until they have ended.
    """

    def __init__(self, root: Path, python: Path, spare_cache: Path, lock: IO[str]) -> None:
        self._root = root
        self._python = python
        self._lock = lock
        self._pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        # A configured user = true is an error inside an environment.
        self._environment = {**os.environ, "PIP_USER": "0"}
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~"))
        if "UV_CACHE_DIR" not in os.environ and not is_on_disk_of(cache, root):
            # uv unpacks into its cache and links from there: on another disk, .venv would take its space twice.
            self._environment["UV_CACHE_DIR"] = str(spare_cache)
        self._uv = self._find_uv()

    def _find_uv(self) -> str | None:
        """Return the path of uv, installed with pip if it is not on PATH; None if that fails.

        Raises:
            NothingChanged: If there is neither uv nor pip.
        """
        uv = shutil.which("uv")
        if uv is None:
            own = self._python.with_name("uv")
            if not own.exists() and not self._ensure_pip():
                raise NothingChanged(
                    f"{self._python} has neither pip nor ensurepip, and uv is not on PATH, so nothing can be "
                    "installed: install uv, and start again"
                )
            fetched = [*self._pip, "--retries", "0", "--timeout", "15", "install", "--quiet", "uv"]
            uv = str(own) if own.exists() or self._run(fetched) is None else None
        index = self._pip_index() if uv else None
        if index:  # uv does not read pip's settings
            self._environment.setdefault("UV_DEFAULT_INDEX", index)
        return uv

    def _ensure_pip(self) -> bool:
        """Return whether the environment has pip; one made with `uv venv` gets it from ensurepip, if possible."""
        python = str(self._python)
        return self._run([python, "-c", "import pip"]) is None or self._run([python, "-m", "ensurepip"]) is None

    def _pip_index(self) -> str | None:
        """Return the package index that pip is configured to use, if any."""
        shown = subprocess.run([*self._pip, "config", "list"], capture_output=True, text=True).stdout
        indexes = re.findall(r"(?m)\.index-url='(.+)'$", shown)
        return indexes[-1] if indexes else None

    def install(self, *arguments: str) -> None:
        """Install packages; raise SetupError, with one sentence, if that fails."""
        if self._uv is not None:
            output = self._run([self._uv, "pip", "install", "--python", str(self._python), *arguments])
            if output is None:
                return
            if FULL_DISK.search(output) or not self._ensure_pip():
                raise explain_failure(output, self._root, "uv")
            # pip knows more sources and certificates (pip.conf), and its words are explained.
            say("uv could not install the packages: trying pip")
            self._uv = None
        output = self._run([*self._pip, "install", *arguments])
        if output is not None:
            raise explain_failure(output, self._root)

    def _run(self, command: list[str]) -> str | None:
        """Run a command and show its large downloads; return its output if it fails."""
        process = subprocess.Popen(
            command,
            cwd=self._root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self._lock.fileno(),),
            text=True,
            errors="replace",
        )
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            shown = LARGE_DOWNLOAD.search(line)
            if shown:
                say(f"      {shown[0]}")
            if line.startswith("WARNING: Retrying"):
                say("The package index does not respond; pip retries")
        return None if process.wait() == 0 else "".join(lines)


def say(text: str) -> None:
    """Print one line of progress on stderr; stdout is for the path only."""
    print(text, file=sys.stderr, flush=True)


def is_on_disk_of(folder: Path, path: Path) -> bool:
    """Return whether hard links between two folders are possible."""
    return folder.is_dir() and folder.stat().st_dev == path.stat().st_dev


def explain_failure(output: str, root: Path, program: str = "pip") -> SetupError:
    """Return the error for a failed installation, from the output of `program`, or the text of an exception."""
    if FULL_DISK.search(output):
        return SetupError(
            f"The disk became full during installation: free disk space at {root} and in the folder for temporary "
            f"files ({os.environ.get('TMPDIR', '/tmp')}), or set TMPDIR to another disk, and start again"
        )
    if NO_PERMISSION.search(output):
        return SetupError(
            f"The installer has no write permission ({last_line(output)}): copy the folder to a place that you own"
        )
    if NO_NETWORK.search(output):
        return NothingChanged(
            "The package index could not be reached: check the network (and, where you use them, HTTPS_PROXY and "
            "PIP_INDEX_URL) and start again; completed downloads are kept"
        )
    absent = re.search(r"No matching distribution found for (\S+)", output)
    if absent:
        system = os.uname()
        python = "Python {}.{}".format(*sys.version_info[:2])
        return NothingChanged(
            f"The package index has no {absent[1]} for this machine ({system.sysname} {system.machine}, {python}), or "
            "cannot be reached: check the network and, where you use it, PIP_INDEX_URL"
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    return SetupError(f"{program} failed: {last_line(chr(10).join(errors) or output)}")
