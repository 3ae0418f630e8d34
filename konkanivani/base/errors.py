"""Exception classes, one per exit code; a message names the problem, its place and cause, and the remedy.

Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 resources, 129 SIGHUP, 130 SIGINT, 143
SIGTERM.
"""

import contextlib
from collections.abc import Iterator


class KonkaniVaniError(Exception):
    """Base class of errors that the user can act on; scripts print the text and exit with `exit_code`."""

    exit_code = 1


class UsageError(KonkaniVaniError):
    """Unknown, mistyped, contradictory or inapplicable flag."""

    exit_code = 2


class DataError(KonkaniVaniError):
    """Unusable manifest, audio file, transcript or tokenizer."""

    exit_code = 3


class CheckpointError(KonkaniVaniError):
    """Missing or damaged checkpoint, or one with another shape than the run."""

    exit_code = 4


class NumericsError(KonkaniVaniError):
    """Training whose numbers are no longer finite."""

    exit_code = 5


class ResourceError(KonkaniVaniError):
    """Missing memory, disk space, device or permission."""

    exit_code = 6


class Interrupted(KonkaniVaniError):
    """Stop by a signal; the state was saved before this error is raised."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        # The shell's convention for a process that a signal ended.
        self.exit_code = 128 + signal_number


class ReportedByOtherRank(KonkaniVaniError):
    """End of this process for a reason that another rank reports; only the exit code is left."""

    def __init__(self, exit_code: int):
        super().__init__("")
        self.exit_code = exit_code


@contextlib.contextmanager
def explained(kind: type[KonkaniVaniError], what: str, advice: str, *others: type[Exception]) -> Iterator[None]:
    """Convert an OSError in the block, or one of the classes `others`, to `kind`.

    The message is "WHAT: reason (file). ADVICE"; the file is omitted if WHAT names it already.
    """
    caught: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except caught as error:
        # str(OSError) contains the errno and the file; strerror is the reason only.
        reason = getattr(error, "strerror", None) or error
        file = getattr(error, "filename", None)
        where = f" ({file})" if file and str(file).removesuffix(".partial") not in what else ""
        # The cause is dropped: the message is complete, and scripts print no traceback.
        raise kind(f"{what}: {reason}{where}. {advice}") from None


MAX_REPORTED = 20
# Errors of the input. NumericsError and Interrupted end a stage at once.
COLLECTED = (UsageError, DataError, CheckpointError, ResourceError)


class ErrorCollector:
    """Errors of one stage, collected so that the user can fix them all at once."""

    def __init__(self) -> None:
        self._found: list[KonkaniVaniError] = []

    def add(self, error: KonkaniVaniError) -> None:
        """Add an error that is not raised yet."""
        self._found.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Catch an error of the classes COLLECTED in the block, keep it, and continue after the block."""
        try:
            yield
        except COLLECTED as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raise the collected errors, if any: several as one error of the first one's class, one per line."""
        match self._found:
            case []:
                return
            case [error]:
                raise error
        kind = next(kind for kind in COLLECTED if isinstance(self._found[0], kind))
        lines = [str(error) for error in self._found[:MAX_REPORTED]]
        more = len(self._found) - len(lines)
        raise kind("\n".join(lines) + (f"\nand {more} more errors of this kind." if more else ""))
