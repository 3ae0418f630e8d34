"""What a process finds as it begins to run a script. PyTorch is not imported here."""

import os
import sys
from collections.abc import Sequence


def close_streams(*numbers: int) -> None:
    """Leaves this process as an interpreter begins where a shell has closed stdin (0), stdout (1) or stderr (2)."""
    for number in numbers:
        os.close(number)
        for prefix in ("", "__"):
            setattr(sys, prefix + ("stdin", "stdout", "stderr")[number] + prefix, None)


def print_at_once() -> None:
    """What is printed is in its file with each line."""
    sys.stdout.reconfigure(line_buffering=True)


def break_import(module: str, error: BaseException) -> None:
    """The error comes where the module is imported."""

    def hear(event: str, arguments: tuple) -> None:
        if event == "import" and arguments[0] == module:
            raise error

    sys.addaudithook(hear)


def without_torch(closed: Sequence[int] = (), error: BaseException | None = None) -> None:
    """What imports PyTorch ends in a traceback; streams are closed, and an error comes amid a script's imports."""
    close_streams(*closed)
    break_import("torch", AssertionError("PyTorch is imported."))
    if error:
        break_import("konkanivani.base.command_line", error)
