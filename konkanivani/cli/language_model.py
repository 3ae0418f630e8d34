"""Train an n-gram language model (interpolated Kneser-Ney) on a checkpoint's tokens, for shallow fusion.

    konkanivani lm \\
        --checkpoint checkpoints/checkpoint_best.pt \\
        --text sentences.txt --held_out data/valid.jsonl --output lm.arpa

The text has one sentence per line, in UTF-8; it is normalised like the checkpoint's transcripts. The output is an ARPA
file for --language_model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from konkanivani.command_line import read_flags
from konkanivani.console import count
from konkanivani.errors import DataError, UsageError
from konkanivani.files import check_new_file

if TYPE_CHECKING:  # usage errors do not wait for torch
    from konkanivani.data.text import Vocabulary
    from konkanivani.decoding.ngram import Ngrams

MAX_ORDER = 16
# Characters need a longer context for the same number of words.
CHARACTER_ORDER = 6
SUBWORD_ORDER = 4


@dataclass(frozen=True)
class Flags:
    """Input and output."""

    checkpoint: str
    """Checkpoint whose tokenizer is used."""
    output: str
    """ARPA file to write; compressed if its name ends in .gz."""
    text: tuple[str, ...] = ()
    """Text files in UTF-8, one sentence per line."""
    manifest: tuple[str, ...] = ()
    """JSONL manifests whose transcripts are used as text."""
    order: int | None = None
    """Maximum n-gram order (None: 6 for characters, 4 for subwords)."""
    held_out: str | None = None
    """Text file or manifest (.jsonl) to compute the perplexity on."""
    force: bool = False
    """Overwrite an existing output file."""


def check_flags(flags: Flags) -> None:
    """Raise an error for invalid flags before anything is read."""
    if not flags.text and not flags.manifest:
        raise UsageError("No training text: give --text sentences.txt, --manifest train.jsonl, or both.")
    if flags.order is not None and not 1 <= flags.order <= MAX_ORDER:
        raise UsageError(f"--order must be between 1 and {MAX_ORDER}, not {flags.order}.")
    read = (flags.checkpoint, *flags.text, *flags.manifest, flags.held_out)
    inputs = [Path(file).resolve() for file in read if file]
    if Path(flags.output).resolve() in inputs:
        raise UsageError(
            f"--output {flags.output} would overwrite an input file. Choose another name, such as lm.arpa."
        )
    check_new_file(Path(flags.output), flags.force)


@dataclass
class TextCorpus:
    """Normalised sentences and their counts, which are complete once all sentences have been read."""

    tokenizer: "Vocabulary"
    digits: Literal["keep", "spell"]
    sentences: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0
    broken_rows: int = 0

    def read(self, files: tuple[str, ...], manifests: tuple[str, ...]) -> Iterator[list[int]]:
        """Yield the token ids of every sentence of the text files and manifests; blank lines are skipped.

        Raises DataError if there is no sentence.
        """
        from konkanivani.data.text import normalize_text

        unknown_token = self.tokenizer.special.unknown
        for text in chain(*map(self._lines_of, files), *map(self._transcripts_of, manifests)):
            normalised = normalize_text(text, self.digits)
            if not normalised:
                continue
            tokens = self.tokenizer.encode(normalised)
            self.sentences += 1
            # Words for the perplexity per word, which is comparable between tokenizers.
            self.words += len(normalised.split())
            self.tokens += len(tokens)
            if unknown_token is not None:
                self.unknown += tokens.count(unknown_token)
            yield tokens
        if not self.sentences:
            raise DataError(
                f"No sentence found in {', '.join(files + manifests)}. Write one sentence per line, in UTF-8."
            )

    def _lines_of(self, file: str) -> Iterator[str]:
        from konkanivani.corpora.sentences import read_source_lines

        if Path(file).exists() and not Path(file).is_file():
            raise DataError(f"The sentences in {file} cannot be read: it is not a file. Give the path of a text file.")
        yield from (line.text for line in read_source_lines(file))

    def _transcripts_of(self, manifest: str) -> Iterator[str]:
        from konkanivani.data.index import BadRow, parse_row

        for row, line in enumerate(filter(None, self._lines_of(manifest)), start=1):
            try:  # the audio need not exist
                yield parse_row(line.encode(), "", row).text
            except BadRow:
                self.broken_rows += 1

    def summary(self) -> str:
        """Return the counts as text."""
        unknown = f", {self.unknown / self.tokens:.1%} of them unknown to the tokenizer" if self.unknown else ""
        broken = f"; {count(self.broken_rows, 'broken row')} skipped" if self.broken_rows else ""
        counts = ", ".join((count(self.sentences, "sentence"), count(self.words, "word"), count(self.tokens, "token")))
        return f"{counts}{unknown}{broken}"


def train(flags: Flags) -> str:
    """Write the language model; return the size of the text, of the model, and the perplexity of --held_out."""
    check_flags(flags)
    from konkanivani.checkpoints.checkpoint import read_checkpoint
    from konkanivani.decoding.ngram import estimate_ngrams, write_arpa
    from konkanivani.flags import config_from_text
    from konkanivani.inference.speech_model import load_tokenizer

    checkpoint = read_checkpoint(flags.checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    # The search accepts only language models over the project's own tokenizer, which has a blank.
    if tokenizer.special.blank is None:
        raise UsageError(f"{flags.checkpoint} has a pretrained tokenizer: use a model with a KonkaniVani tokenizer.")
    settings = config_from_text(checkpoint.config).text
    order = flags.order or (CHARACTER_ORDER if settings.tokenizer_type == "char" else SUBWORD_ORDER)
    held_out = TextCorpus(tokenizer, settings.digits)
    # Read before the long estimation, so that an unreadable file is reported at once.
    held_out_sentences = list(held_out.read(*apart(flags.held_out))) if flags.held_out else []
    corpus = TextCorpus(tokenizer, settings.digits)
    # The sentences are streamed and counted; `corpus` is complete after this call.
    orders = estimate_ngrams(corpus.read(flags.text, flags.manifest), tokenizer.size, order, tokenizer.special)
    write_arpa(flags.output, orders, tokenizer)
    sizes = ", ".join(f"{len(ngrams):,} {number}-grams" for number, ngrams in enumerate(orders, start=1))
    lines = [f"read: {corpus.summary()}", f"{flags.output}: {sizes}"]
    if held_out_sentences:
        lines.append(f"{flags.held_out}: {measured(orders, held_out, held_out_sentences)}")
    return "\n".join(lines)


def apart(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (text files, manifests), with the file in one of them according to its name."""
    return ((), (file,)) if file.endswith(".jsonl") else ((file,), ())


def measured(orders: tuple["Ngrams", ...], corpus: TextCorpus, sentences: list[list[int]]) -> str:
    """Return the perplexity per token and per word as text; the end of a sentence counts as a token and as a word."""
    import torch

    from konkanivani.decoding.language_model import build_language_model, score_sentences

    model = build_language_model(orders, corpus.tokenizer.size, torch.device("cpu"), corpus.tokenizer.special)
    # Natural logarithms; fsum, since the sum has many small terms.
    total = math.fsum(score_sentences(model, sentences))
    a_token, a_word = (math.exp(-total / (count + len(sentences))) for count in (corpus.tokens, corpus.words))
    return f"{corpus.summary()}; perplexity {a_token:.4g} per token, {a_word:.4g} per word"


def main(arguments: list[str]) -> str:
    """Train a language model according to the command line; return its size and perplexity."""
    return train(read_flags(Flags, arguments, description=__doc__))
