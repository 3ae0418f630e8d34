"""Generate the built-in corpus of synthetic speech (Marathi voice), which tests the training pipeline.

    konkanivani builtin --output data/builtin

With --sentences, synthesise your own text, one sentence per line:

    konkanivani builtin \\
        --sentences mine.txt --output data/mine
"""

import time
from dataclasses import dataclass

from konkanivani.command_line import read_flags
from konkanivani.corpora.builtin import WHAT_IT_IS, SplitSizes, build_builtin_corpus
from konkanivani.corpora.sentences import SentenceReport, build_sentence_corpus
from konkanivani.errors import UsageError

FULL = SplitSizes()
MAX_NAMED = 10  # skipped lines to print; left_out.jsonl lists all


@dataclass(frozen=True)
class Flags:
    """Output, text and size."""

    output: str | None = None
    """Folder to write (None: data/builtin, or data/sentences with --sentences)."""
    sentences: tuple[str, ...] | None = None
    """Text files in UTF-8, one sentence per line, to synthesise instead of the built-in sentences."""
    train_utterances: int | None = None
    """Utterances in train.jsonl (None: 1250; with --sentences all that remain)."""
    valid_utterances: int | None = None
    """Utterances in valid.jsonl (None: 60, or 5 % of --sentences)."""
    test_utterances: int | None = None
    """Utterances in test.jsonl (None: 140, or 10 % of --sentences)."""


def prepare(flags: Flags) -> str:
    """Create the corpus if it does not exist yet, and return a summary."""
    return prepare_builtin(flags) if flags.sentences is None else prepare_sentences(flags)


def prepare_builtin(flags: Flags) -> str:
    """Create the built-in corpus."""
    size = SplitSizes(
        train=FULL.train if flags.train_utterances is None else flags.train_utterances,
        valid=FULL.valid if flags.valid_utterances is None else flags.valid_utterances,
        test=FULL.test if flags.test_utterances is None else flags.test_utterances,
    )
    output = flags.output or "data/builtin"
    started = time.monotonic()
    is_new = build_builtin_corpus(output, size)
    return summary(output, size, is_new, started)


def prepare_sentences(flags: Flags) -> str:
    """Create a corpus from the user's sentences."""
    if not flags.sentences:
        raise UsageError("--sentences is empty: give one or more text files, one sentence per line, in UTF-8.")
    if flags.train_utterances is not None:
        raise UsageError(
            "--train_utterances has no effect with --sentences: all sentences that are not for validation or "
            "testing are for training. Omit it, or use fewer sentences."
        )
    output = flags.output or "data/sentences"
    started = time.monotonic()
    report = build_sentence_corpus(flags.sentences, output, flags.valid_utterances, flags.test_utterances)
    return summary(output, report.size, report.is_new, started) + losses_summary(output, report)


def summary(output: str, size: SplitSizes, is_new: bool, started: float) -> str:
    """Return a sentence on the written or existing corpus."""
    count = size.train + size.valid + size.test
    seconds = time.monotonic() - started
    done = f"{count} utterances written in {seconds:.0f} s" if is_new else f"{count} utterances exist already"
    return f"{output}: {done} ({WHAT_IT_IS})"


def losses_summary(output: str, report: SentenceReport) -> str:
    """Return the size of each split and the skipped lines as text."""
    size = report.size
    left_out = report.left_out
    text = f"; {size.train} train, {size.valid} valid, {size.test} test"
    if report.blank or report.repeated:
        text += f"; {report.blank} blank and {report.repeated} repeated lines dropped"
    if left_out:
        text += f"; {len(left_out)} lines skipped, listed in {output}/left_out.jsonl:"
        text += "".join(f"\n  {line.file}, line {line.row}: {line.reason}" for line in left_out[:MAX_NAMED])
        text += f"\n  and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
    return text


def main(arguments: list[str]) -> str:
    """Create the corpus according to the command line; return a summary."""
    return prepare(read_flags(Flags, arguments, description=__doc__))
