"""The state of a process when it starts to run a script. PyTorch is not imported here."""

import os
import sys
from collections.abc import Sequence


def close_streams(*numbers: int) -> None:
    """Close stdin (0), stdout (1) or stderr (2), and set `sys` as an interpreter does for streams closed by a shell."""
    for number in numbers:
        os.close(number)
        for prefix in ("", "__"):
            setattr(sys, prefix + ("stdin", "stdout", "stderr")[number] + prefix, None)


def flush_each_line() -> None:
    """Flush stdout after each line."""
    sys.stdout.reconfigure(line_buffering=True)


def raise_on_import(module: str, error: BaseException) -> None:
    """Raise the error when the module is imported."""

    def audit_hook(event: str, arguments: tuple) -> None:
        if event == "import" and arguments[0] == module:
            raise error

    sys.addaudithook(audit_hook)


def forbid_torch_import(closed: Sequence[int] = (), error: BaseException | None = None) -> None:
    """Fail on an import of PyTorch, close streams, and raise an error during the imports of a script."""
    close_streams(*closed)
    raise_on_import("torch", AssertionError("PyTorch is imported."))
    if error:
        raise_on_import("konkanivani.command_line", error)
