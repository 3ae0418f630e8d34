"""Average the weights of several checkpoints of one run, for evaluation and transcription.

    konkanivani average \\
        --checkpoint_dir checkpoints --last 3

writes checkpoints/checkpoint_averaged.pt. The file has no optimizer state: use it with --init_from, not with --resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from konkanivani.command_line import read_flags
from konkanivani.console import count
from konkanivani.errors import UsageError
from konkanivani.files import atomic_write, check_new_file

if TYPE_CHECKING:  # usage errors do not wait for torch
    from konkanivani.checkpoints.averaging import NamedCheckpoint

AVERAGED = "checkpoint_averaged.pt"


@dataclass(frozen=True)
class Flags:
    """Input and output."""

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Checkpoints to average, all from one run."""
    output: str | None = None
    """File to write (None: checkpoint_averaged.pt in the folder of the checkpoints)."""
    checkpoint_dir: str | None = None
    """Folder of a run, instead of a list of checkpoints."""
    last: int = 3
    """Number of epoch checkpoints of --checkpoint_dir to average, newest first."""
    force: bool = False
    """Overwrite an existing output file."""
    allow_different_runs: bool = False
    """Allow checkpoints of different runs; their average is rarely useful."""


def check_flags(flags: Flags) -> None:
    """Raise UsageError if the flags do not select checkpoints in exactly one way."""
    if bool(flags.checkpoints) == (flags.checkpoint_dir is not None):
        raise UsageError("Give either the checkpoints to average, or --checkpoint_dir with --last.")
    if flags.last < 1:
        raise UsageError(f"--last must be at least 1, not {flags.last}.")


def average(flags: Flags) -> str:
    """Write the averaged checkpoint atomically and return a sentence on it."""
    check_flags(flags)
    from konkanivani.checkpoints.averaging import average_checkpoints, newest_epochs
    from konkanivani.checkpoints.checkpoint import write_checkpoint
    from konkanivani.checkpoints.checkpointer import is_name_of_a_run

    paths = [Path(path) for path in flags.checkpoints]
    if flags.checkpoint_dir is not None:
        paths = newest_epochs(flags.checkpoint_dir, flags.last)
    output = Path(flags.output) if flags.output else paths[0].parent / AVERAGED
    # --resume auto must not find an average, which has no optimizer state.
    if is_name_of_a_run(output) or output.resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"--output {output} is reserved for checkpoints of a run; name it {AVERAGED}, for example.")
    check_new_file(output, flags.force)
    averaged = average_checkpoints(read_each(paths), flags.allow_different_runs)
    with atomic_write(output) as partial:
        write_checkpoint(partial, averaged)
    names = ", ".join(path.name for path in paths)
    return f"{output}: average of {count(len(paths), 'checkpoint')} ({names})."


def read_each(paths: list[Path]) -> Iterator["NamedCheckpoint"]:
    """Yield the checkpoints, each read when it is needed."""
    from konkanivani.checkpoints.averaging import NamedCheckpoint
    from konkanivani.checkpoints.checkpoint import read_checkpoint

    for path in paths:
        yield NamedCheckpoint(str(path), read_checkpoint(path))


def main(arguments: list[str]) -> str:
    """Average the checkpoints that the command line names; return a sentence on the result."""
    return average(read_flags(Flags, arguments, description=__doc__))
