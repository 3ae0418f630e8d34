"""Processes that a test has started and not ended, as one that fails does, and signals that it hands on to them."""

import os
import signal
from contextlib import suppress
from pathlib import Path

HELPERS = (b"tests.warm", b"multiprocessing.resource_tracker")  # each serves many tests


def heed_what_nohup_ignores() -> None:
    """What is started from here hears SIGHUP and SIGINT, though this process was started with nohup, or behind a `&`.

    A program inherits what its parent ignores, not what its parent handles; and this process goes on all the same.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def descendants(of: int) -> set[int]:
    """The processes below this one; none where the kernel does not tell."""
    found: set[int] = set()
    for path in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for child in map(int, path.read_text().split()):
                found |= {child} | descendants(child)
    return found


def end_leftovers(left: set[int]) -> None:
    """Kills these processes, whole groups where they have one of their own.

    Not forks in this process's own group, such as workers that a loader keeps, nor what serves many tests.
    """
    for pid in left:
        with suppress(OSError):  # it has just ended
            group = os.getpgid(pid)
            if group != os.getpgrp():
                os.killpg(group, signal.SIGKILL)
            elif _is_program(pid):
                os.kill(pid, signal.SIGKILL)


def _is_program(pid: int) -> bool:
    """Whether it was started, and is no fork that its parent waits for, such as each answer of a speech synthesizer."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    command, parents = (Path(f"/proc/{process}/cmdline").read_bytes() for process in (pid, parent))
    return command != parents and not any(helper in command for helper in HELPERS)
