"""One class per exit code. Every message says what happened, where, why, and what to do about it.

Exit codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 numerics, 6 resources, 129 SIGHUP, 130 SIGINT, 143
SIGTERM.
"""

import contextlib
from collections.abc import Iterator


class KonkaniVaniError(Exception):
    """An error that a person can act on; scripts print its text and end with `exit_code`."""

    exit_code = 1


class UsageError(KonkaniVaniError):
    """A flag that is unknown, mistyped, contradictory or impossible here."""

    exit_code = 2


class DataError(KonkaniVaniError):
    """A manifest, audio file, transcript or tokenizer that cannot be used."""

    exit_code = 3


class CheckpointError(KonkaniVaniError):
    """A checkpoint that is absent, damaged, or of another shape than asked for."""

    exit_code = 4


class NumericsError(KonkaniVaniError):
    """Training that no longer produces finite numbers."""

    exit_code = 5


class ResourceError(KonkaniVaniError):
    """Memory, disk, devices or permissions that are not there."""

    exit_code = 6


class Interrupted(KonkaniVaniError):
    """A signal asked the process to stop; its state was saved first."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ReportedByOtherRank(KonkaniVaniError):
    """What ends this process was told by another rank; nothing is left to say but the exit code."""

    def __init__(self, exit_code: int):
        super().__init__("")
        self.exit_code = exit_code


@contextlib.contextmanager
def explained(kind: type[KonkaniVaniError], what: str, advice: str, *others: type[Exception]) -> Iterator[None]:
    """Makes of an OSError in the block, or one of the `others`, "what: its reason (its file). advice"."""
    try:
        yield
    except (OSError, *others) as error:
        reason, file = getattr(error, "strerror", None) or error, getattr(error, "filename", None)
        where = f" ({file})" if file and str(file).removesuffix(".partial") not in what else ""
        raise kind(f"{what}: {reason}{where}. {advice}") from None


MAX_REPORTED = 20
COLLECTED = (UsageError, DataError, CheckpointError, ResourceError)


class ErrorCollector:
    """The errors of one stage, collected so that a person mends them in one go."""

    def __init__(self) -> None:
        self._found: list[KonkaniVaniError] = []

    def add(self, error: KonkaniVaniError) -> None:
        """Takes an error that is not raised yet."""
        self._found.append(error)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Goes on behind a block that one of our errors has ended; the error is kept."""
        try:
            yield
        except COLLECTED as error:
            self.add(error)

    def raise_all(self) -> None:
        """Raises what was found, if anything: several as one error of the first one's class, a line each."""
        match self._found:
            case []:
                return
            case [error]:
                raise error
        kind = next(kind for kind in COLLECTED if isinstance(self._found[0], kind))
        lines = [str(error) for error in self._found[:MAX_REPORTED]]
        more = len(self._found) - len(lines)
        raise kind("\n".join(lines) + (f"\nand {more} more errors of this kind." if more else ""))
