"""What is wrong in one stage of a start, all of it told at once."""

import contextlib
from collections.abc import Iterator

from konkanivani.errors import CheckpointError, DataError, KonkaniVaniError, ResourceError, UsageError

MOST_TOLD = 20
COLLECTED = (UsageError, DataError, CheckpointError, ResourceError)


class Problems:
    """The errors of one stage, collected so that a person mends them in one go."""

    def __init__(self) -> None:
        self._found: list[KonkaniVaniError] = []

    def add(self, error: KonkaniVaniError) -> None:
        """Takes an error that is not raised yet."""
        self._found.append(error)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
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
        lines = [str(error) for error in self._found[:MOST_TOLD]]
        more = len(self._found) - len(lines)
        raise kind("\n".join(lines) + (f"\nAnd {more} more of this kind." if more else ""))
