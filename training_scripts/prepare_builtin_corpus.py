#!/usr/bin/env python3
"""Writes the built-in corpus: synthetic, Marathi voice. It shows that the machine works, not how well it hears Konkani.

python3 training_scripts/prepare_builtin_corpus.py --output data/builtin
"""

import bootstrap

bootstrap.rerun_under_venv()

import sys
import time
from dataclasses import dataclass

from konkanivani.command_line import read_flags, run_script
from konkanivani.data.builtin_corpus import WHAT_IT_IS, CorpusSize, build_builtin_corpus

FULL = CorpusSize()


@dataclass(frozen=True)
class Flags:
    """Where the corpus goes, and how large it is."""

    output: str = "data/builtin"
    """Folder to make."""
    train_utterances: int = FULL.train
    """Utterances in train.jsonl."""
    valid_utterances: int = FULL.valid
    """Utterances in valid.jsonl."""
    test_utterances: int = FULL.test
    """Utterances in test.jsonl."""


def prepare(flags: Flags) -> str:
    """Builds the corpus where it is not there yet; returns a sentence about it."""
    size = CorpusSize(flags.train_utterances, flags.valid_utterances, flags.test_utterances)
    started = time.monotonic()
    is_new = build_builtin_corpus(flags.output, size)
    count, seconds = size.train + size.valid + size.test, time.monotonic() - started
    done = f"{count} utterances written in {seconds:.0f} s" if is_new else f"{count} utterances are there already"
    return f"{flags.output}: {done} ({WHAT_IT_IS})"


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: prepare(flags)))
