"""Correct lines of text with a text-to-text model, or write pairs to train one from text with artificial errors.

    konkanivani correct said.txt --model flan-konkani
    konkanivani correct said.txt --corrupt 0.2 \\
        --output pairs.jsonl

Without --output, corrected lines are printed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from konkanivani.command_line import read_flags
from konkanivani.errors import ResourceError, UsageError, explained
from konkanivani.files import check_new_file


@dataclass(frozen=True)
class Flags:
    """Input, model and output."""

    files: Annotated[tuple[str, ...], Positional, arg(metavar="FILE ...")]
    """Text files, one text per line."""
    model: str | None = None
    """Checkpoint or folder of a T5 model that corrects the lines."""
    corrupt: float | None = None
    """Share of words that get an artificial error, such as 0.2; case and punctuation are removed."""
    copies: int = 1
    """Pairs per text with --corrupt, each with other errors."""
    confusions: str | None = None
    """Hypotheses written by konkanivani evaluate, whose confused characters --corrupt repeats."""
    output: str | None = None
    """File to write: corrected lines, or with --corrupt a manifest for training (None: print corrected lines)."""
    seed: int = 1234
    """Seed of the artificial errors."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on."""


def check_flags(flags: Flags) -> None:
    """Raise UsageError for flags that are invalid or contradict each other."""
    if not flags.files:
        raise UsageError("No input. Give text files with one text per line.")
    if (flags.model is None) == (flags.corrupt is None):
        raise UsageError("Give either --model to correct the lines, or --corrupt to write pairs for training.")
    if flags.corrupt is not None and not 0 <= flags.corrupt <= 1:
        raise UsageError("--corrupt must be between 0 and 1.")
    if flags.corrupt is not None and flags.output is None:
        raise UsageError("--corrupt writes a manifest: give its path with --output.")
    if flags.copies < 1:
        raise UsageError("--copies must be at least 1.")
    if flags.copies > 1 and flags.corrupt is None:
        raise UsageError("--copies has no effect without --corrupt: give both, or omit it.")
    if flags.confusions is not None and flags.corrupt is None:
        raise UsageError("--confusions has no effect without --corrupt: give both, or omit it.")
    if flags.output is not None:
        check_new_file(Path(flags.output), force=None)


def correct(flags: Flags) -> str:
    """Correct the lines, or write pairs; return the corrected lines or a sentence."""
    check_flags(flags)
    from konkanivani.files import atomic_write
    from konkanivani.recipe.correction import Confusions, load_corrector, read_confusions, read_lines, write_corrupted

    lines = [line for path in flags.files for line in read_lines(Path(path))]
    if flags.corrupt is not None and flags.output is not None:
        confusions = Confusions() if flags.confusions is None else read_confusions(Path(flags.confusions))
        output = Path(flags.output)
        texts = [line for line in lines if line]
        with explained(ResourceError, f"{output} could not be written", "Free disk space, or choose another file."):
            count = write_corrupted(texts, flags.corrupt, confusions, flags.seed, output, flags.copies)
        return f"{flags.output}: {count:,} pairs. Train with --train_manifest {flags.output} and a T5 folder."
    corrected = load_corrector(flags.model or "", flags.device).correct(lines)
    text = "\n".join(corrected)
    if flags.output is None:
        return text
    with atomic_write(Path(flags.output)) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return f"{flags.output}: {len(corrected):,} lines"


def main(arguments: list[str]) -> str:
    """Correct or corrupt according to the command line."""
    return correct(read_flags(Flags, arguments, description=__doc__))
