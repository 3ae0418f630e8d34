"""Processes that a failed test left running, and the signals that child processes inherit as ignored."""

import os
import signal
from contextlib import suppress
from pathlib import Path

HELPERS = (b"tests.fork_server", b"multiprocessing.resource_tracker")  # each serves many tests


def reset_ignored_signals() -> None:
    """Let child processes receive SIGHUP and SIGINT, even if this process runs under nohup or in the background.

    A program inherits ignored signals from its parent, but not handlers. This process still ignores both.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def descendants(of: int) -> set[int]:
    """Return the ids of all child processes, recursively, or an empty set if the kernel does not list them."""
    result: set[int] = set()
    for path in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(OSError):  # the process just ended
            for child in map(int, path.read_text().split()):
                result |= {child} | descendants(child)
    return result


def kill_leftovers(left: set[int]) -> None:
    """Kill these processes with their process groups.

    In the group of this process, forks, such as persistent workers of a loader, and HELPERS are not killed.
    """
    for pid in left:
        with suppress(OSError):  # the process just ended
            group = os.getpgid(pid)
            if group != os.getpgrp():
                os.killpg(group, signal.SIGKILL)
            elif _is_program(pid):
                os.kill(pid, signal.SIGKILL)


def _is_program(pid: int) -> bool:
    """Return whether the process runs another program than its parent, and is not one of HELPERS.

    A fork, as a speech synthesizer makes for each request, has the command line of its parent, which waits for it.
    """
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    command, parents = (Path(f"/proc/{process}/cmdline").read_bytes() for process in (pid, parent))
    return command != parents and not any(helper in command for helper in HELPERS)
