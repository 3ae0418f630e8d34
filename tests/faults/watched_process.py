"""Handling of possibly hostile input in a child process with limits on time, memory, files and other programs."""

import faulthandler
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from konkanivani.data.audio.media import PROGRAM
from konkanivani.errors import KonkaniVaniError

MAX_SECONDS = 5.0  # CPU seconds, or seconds of waiting for anything but the CPU
CONTAINER_SECONDS = 30.0  # audio and video: starts another process, perhaps on a busy machine
BUSY_FACTOR = 120  # factor on the wall-clock limit for a busy machine
MAX_GROWTH_MIB = 200.0
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events for other programs, other machines, and files changed without being opened.
PROGRAM_EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
    "ctypes.dlopen",
)
NETWORK_EVENTS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
FILE_CHANGE_EVENTS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)


@dataclass(frozen=True)
class Verdict:
    """Result of handling an input: `outcome` is `taken`, the class of the project's error, or the fault.

    `opened` are the opened paths, `touched` the changed paths outside the allowed folder and the started programs.
    `seconds` excludes time in which other processes had the CPU. `growth_mib` is the peak growth of the process.
    """

    outcome: str
    message: str = ""
    seconds: float = 0.0
    growth_mib: float = 0.0
    opened: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    most_seconds: float = MAX_SECONDS

    @property
    def fault(self) -> str | None:
        """Return the fault, or None."""
        if self.outcome == "fault":
            return self.message
        if self.touched:
            return f"it reached out: {', '.join(self.touched[:3])}"
        if self.seconds > self.most_seconds:
            return f"it took {self.seconds:.1f} s"
        if self.growth_mib > MAX_GROWTH_MIB:
            return f"the process grew by {self.growth_mib:.0f} MiB"
        return None


def watch(handle: Callable[[], object], folder: Path, seconds: float = MAX_SECONDS) -> Verdict:
    """Run `handle()` in a fork that may write to `folder` only, kill it after `seconds`, and return its verdict."""
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            faulthandler.disable()  # pytest's copy of stderr would show the crash of a negative control
            for alarm in (signal.SIGALRM, signal.SIGPROF):
                signal.signal(alarm, signal.SIG_DFL)  # the default action ends the process even if C code hangs
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, BUSY_FACTOR * seconds)
            verdict = _run_handler(handle, os.path.realpath(folder))
            _write_all(writing, json.dumps(asdict(verdict)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    spent = time.monotonic() - started
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hung, died = f"it hung for {seconds:g} s", f"it died of {signal.Signals(number).name}"
        return Verdict("fault", hung if number in (signal.SIGALRM, signal.SIGPROF) else died, spent)
    fields = json.loads(output)
    lists = {name: tuple(fields[name]) for name in ("opened", "touched")}
    return Verdict(**fields | lists | {"most_seconds": seconds})


def _run_handler(handle: Callable[[], object], folder: str) -> Verdict:
    opened, touched = [], []
    is_recording = True

    def audit_hook(event: str, arguments: tuple) -> None:
        if not is_recording:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            opened.append(path)
            if arguments[2] & WRITE_FLAGS and not _is_allowed(path, folder):
                touched.append(f"wrote {path}")
        elif event in FILE_CHANGE_EVENTS and not _is_allowed(os.path.abspath(os.fsdecode(arguments[0])), folder):
            touched.append(f"{event} {os.fsdecode(arguments[0])}")
        elif (event in PROGRAM_EVENTS or event in NETWORK_EVENTS) and not _is_reader(event, arguments):
            touched.append(event)

    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)  # the other threads stayed in the parent
    gc.freeze()  # otherwise a collection would visit, and copy, every object of the parent
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    before, started, starved = _memory_mib("VmRSS"), time.monotonic(), _runnable_wait_seconds()
    sys.addaudithook(audit_hook)
    outcome, message = "taken", ""
    try:
        handle()
    except KonkaniVaniError as error:
        outcome, message = type(error).__name__, str(error)
    except SystemExit as error:
        outcome, message = ("UsageError", "") if error.code == 2 else ("fault", f"it ended with {error.code}")
    except BaseException:  # any other exception is a finding
        outcome, message = "fault", traceback.format_exc()[-1500:]
    is_recording = False
    seconds, growth = time.monotonic() - started - (_runnable_wait_seconds() - starved), _memory_mib("VmHWM") - before
    return Verdict(outcome, message, seconds, growth, tuple(opened), tuple(touched))


def _is_reader(event: str, arguments: tuple) -> bool:
    """Return whether the event starts the FFmpeg decoding process, which has its own sandbox."""
    return event == "subprocess.Popen" and list(arguments[1][:3]) == [sys.executable, "-I", str(PROGRAM)]


def _is_allowed(path: str, folder: str) -> bool:
    return path.startswith((folder + "/", "/dev/null")) or path == folder


def _runnable_wait_seconds() -> float:
    """Return the seconds for which this process was runnable while others ran."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _memory_mib(name: str) -> float:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
