#!/usr/bin/env python3
"""Writes the built-in corpus: synthetic, Marathi voice. It shows that the machine works, not how well it hears Konkani.

python3 training_scripts/prepare_builtin_corpus.py --output data/builtin
"""

import bootstrap

bootstrap.rerun_under_venv()

import argparse  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

from konkanivani.data.builtin_corpus import WHAT_IT_IS, CorpusSize, build_builtin_corpus  # noqa: E402
from konkanivani.errors import KonkaniVaniError  # noqa: E402


def read_flags() -> argparse.Namespace:
    """The command line; ends with code 2 and one sentence for a flag that cannot be used."""
    size = CorpusSize()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", default="data/builtin", help="folder to make (default: %(default)s)")
    for split, count in (("train", size.train), ("valid", size.valid), ("test", size.test)):
        parser.add_argument(
            f"--{split}_utterances", type=int, default=count, metavar="N", help=f"{split} utterances (default: {count})"
        )
    return parser.parse_args()


def main() -> int:
    """Builds the corpus; returns the exit code."""
    flags = read_flags()
    size = CorpusSize(flags.train_utterances, flags.valid_utterances, flags.test_utterances)
    started = time.monotonic()
    try:
        is_new = build_builtin_corpus(flags.output, size)
    except KonkaniVaniError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    count = size.train + size.valid + size.test
    done = f"{count} utterances written in {seconds:.0f} s" if is_new else f"{count} utterances are there already"
    print(f"{flags.output}: {done} ({WHAT_IT_IS})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
