"""Choice of the PyTorch build for the GPUs and the driver of this machine.

Standard library only: training_scripts/bootstrap.py imports it before torch is installed.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

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
# 5.0 (Maxwell, such as a GTX 980 with sm_52) to 9.0 (Hopper), with driver 525 or newer.
CU126 = TorchBuild("cu126", "for CUDA 12.6: about 2.6 GB to download, 5 GB on disk", 7 * GIB)
CPU = TorchBuild("cpu", "without CUDA: about 200 MB to download, 700 MB on disk", 2 * GIB)


@dataclass(frozen=True)
class BuildChoice:
    """Chosen build, and a sentence for the user about what it does not support, if any."""

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
    said = None
    for command in (query, ["nvidia-smi"]):  # drivers before 2021 have no compute_cap: use the table
        try:  # nvidia-smi hangs if a GPU has fallen off the bus
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
        except subprocess.TimeoutExpired:
            said = "no answer within 20 seconds"
            continue
        except OSError:
            return None
        said = process.stdout.decode("utf-8", "replace")
        if process.returncode == 0:
            return None if "No devices were found" in said else said
    return said


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
