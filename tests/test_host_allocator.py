"""Freed blocks go back to the system in a real process, and without the setting they do not."""

import os
import platform
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Every second of 64 blocks of 4 MiB is freed, after glibc has seen a larger one freed and raised its own threshold.
HOLES = """
import sys
from konkanivani.memory.host_allocator import MIB, map_large_blocks

larger = b"x" * (31 * MIB + len(sys.argv))
del larger
if sys.argv[1] == "mapped":
    assert map_large_blocks()
blocks = [bytes([number]) * (4 * MIB) for number in range(64)]
del blocks[::2]
print(int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1024)
"""


def resident_mib(way: str) -> float:
    free = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", HOLES, way]
    return float(subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_holes_are_given_back():
    mapped, kept = resident_mib("mapped"), resident_mib("kept")
    assert mapped < 128 + 60  # 32 blocks and Python
    assert kept > mapped + 100  # the negative control
