"""What every script does: flags from a dataclass, and errors as one sentence and an exit code. No torch here."""

import contextlib
import faulthandler
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO, TypeVar

from konkanivani.base.config import OLD_NAMES
from konkanivani.base.console import say
from konkanivani.base.errors import KonkaniVaniError, ReportedByOtherRank, ResourceError

Flags = TypeVar("Flags")

STDERR = 2
GRACE_SECONDS = 1.0  # that a rank with nothing to say leaves the others to say it


def read_flags(
    kind: type[Flags], arguments: list[str], default: Flags | None = None, shown: type | None = None
) -> Flags:
    """A `kind` from the command line, fields that are not given from `default`; nested fields have no prefix.

    An unknown or mistyped flag ends the process with exit code 2 and the nearest name. The script's own docstring
    stands in --help, which lists the flags of `shown`, or of `kind`.
    """
    import tyro

    if shown is not None and {"-h", "--help"} & set(arguments):
        kind, default, arguments = shown, None, ["--help"]
    try:
        return tyro.cli(
            kind,
            args=list(map(with_new_name, arguments)),
            default=tyro.MISSING_NONPROP if default is None else default,
            description=(sys.modules["__main__"].__doc__ or "").strip(),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            use_underscores=True,
        )
    except BrokenPipeError:  # of --help
        sys.exit(_leave_pipe())


def with_new_name(flag: str) -> str:
    """A flag, with its value or without; where it has been renamed (OLD_NAMES), under its name of today."""
    return re.sub(r"^--([\w-]+)", lambda found: "--" + OLD_NAMES.get(found[1].replace("-", "_"), found[1]), flag)


def run_script(action: Callable[[], str]) -> int:
    """Prints what `action` returns, if anything; the exit code, after a sentence on stderr where it failed."""
    # Python's signal handlers run on a stack of their own, and a crash in native code says where it was. oneDNN before
    # 3.11.2 lets the stack register point into its heap while it multiplies (its pull request 4855): what the system
    # puts on the stack for a handler would overwrite what lies there.
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)
    try:
        if text := action():
            say(text)
        return 0
    except KonkaniVaniError as error:
        with contextlib.suppress(OSError):  # the code says it too where the disk that stderr goes to is full
            if str(error):  # else another rank has told it
                say(error, sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return _leave_pipe()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error) or "the system gave no more").splitlines()[0]
        say(
            f"Out of memory: {reason} Give a smaller --batch_size with more --gradient_accumulation_steps (the result "
            "is the same), --gradient_checkpointing always, a lower --max_duration, or a smaller --preset.",
            sys.stderr,
        )
        return ResourceError.exit_code


def _leave_pipe() -> int:
    """The exit code where the reader of stdout, such as head, has ended; what is left is not flushed into the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Drops what the block writes on stdout and stderr."""
    with open(os.devnull, "w") as out, open(os.devnull, "w") as err:  # two, so that they can be told apart
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


@contextlib.contextmanager
def print_on_local_rank0() -> Iterator[None]:
    """What the block writes, and what is wrong in it, is told by the first rank of those that torchrun started here.

    For what comes before the ranks can speak to each other: they were all given the same command line.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        yield
        return
    try:
        with silence_output():
            yield
    except (KonkaniVaniError, SystemExit) as error:
        time.sleep(GRACE_SECONDS)  # torchrun ends all ranks when it sees the first one end, which should have spoken
        raise ReportedByOtherRank(error.exit_code if isinstance(error, KonkaniVaniError) else error.code or 0) from None


def end_script(code: int) -> NoReturn:
    """Ends the process; after a signal, and as one of torchrun's ranks, without Python freeing what it holds.

    That takes a second, and who sends a signal counts the seconds until SIGKILL. In a rank gloo's threads outlive
    dist.destroy_process_group where weights were sharded, and 1 of 48 such ends was an abort (PyTorch's issue
    190489). What was to be saved is saved.
    """
    if code > 128 or "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _LossyStream:
    """A stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def ignore_lost_output() -> Iterator[None]:
    """Lets work go on that matters more than what it prints: into a file on a full disk, to a reader who has gone."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_LossyStream, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # What is stuck in it would fail once more at the exit, and change the exit code.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a CPU or a GPU; by name, so that torch need not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # The allocator of a CPU, C++, the CUDA driver, then cuBLAS, cuFFT and cuDNN (..._ALLOCATION_FAILED from 9 on).
    signs = ("can't allocate memory", "bad_alloc", "CUDA error: out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
    return any(sign in str(error) for sign in signs)
