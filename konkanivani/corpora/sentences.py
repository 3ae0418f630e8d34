"""A corpus of any sentences, spoken like the built-in ones: synthetic, Marathi voice.

The sentences come from text files, one per line. No sentence is in two splits (sentences with the same normalised text
are one), and no voice is in two splits. An unusable line is left out, with the reason.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from konkanivani.corpora.builtin import (
    TEST_VOICES,
    TRAIN_VOICES,
    VALID_VOICES,
    CorpusPlan,
    CorpusRecipe,
    SplitSizes,
    assign_styles,
    hold_out,
    publish_corpus,
    read_sizes,
    write_corpus,
)
from konkanivani.data.text import normalize_text
from konkanivani.errors import DataError, UsageError, explained
from konkanivani.files import write_json_lines

SENTENCE_CORPUS = "corpus of sentences"
LEFT_OUT = "left_out.jsonl"
# of the sentences, by default
VALID_SHARE = 0.05
TEST_SHARE = 0.1


@dataclass(frozen=True)
class SourceLine:
    """A line of a text file, counted from 1, with runs of spaces collapsed; with a reason if it is not spoken."""

    file: str
    row: int
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Sentences:
    """The distinct sentences of some files, the lines left out, and the numbers of blank and of repeated lines."""

    used: tuple[SourceLine, ...]
    left_out: tuple[SourceLine, ...]
    blank: int
    repeated: int


@dataclass(frozen=True)
class SentenceReport:
    """Result of a build; `is_new` is False if the corpus existed already."""

    is_new: bool
    size: SplitSizes
    blank: int
    repeated: int
    left_out: tuple[SourceLine, ...]


def build_sentence_corpus(
    files: Sequence[str], directory: str | Path, valid: int | None = None, test: int | None = None
) -> SentenceReport:
    """Create a corpus of the files' sentences at `directory`, as `publish_corpus` does, with left_out.jsonl.

    `valid` and `test` sentences (None: 5 % and 10 %) are taken at even distances; the others are for training.

    Raises:
        DataError: If a file is not UTF-8, or there are too few sentences.
        UsageError: If the sizes are impossible.
    """
    directory = Path(directory)
    sentences = read_sentences(files)
    plan = plan_splits([line.text for line in sentences.used], valid, test)
    files_made = (*CorpusRecipe.files, LEFT_OUT)
    # The digest covers everything that determines the corpus, including the rows in left_out.jsonl.
    rows = [(line.row, line.text) for line in sentences.used + sentences.left_out]
    digest = hashlib.sha256(json.dumps([plan.digest(), rows], ensure_ascii=False).encode()).hexdigest()
    recipe = CorpusRecipe(SENTENCE_CORPUS, plan, digest, files_made)
    is_new = publish_corpus(directory, recipe, lambda partial: write_sentence_corpus(recipe, sentences, partial))
    size = read_sizes(directory)
    return SentenceReport(is_new, size, sentences.blank, sentences.repeated, read_left_out(directory))


def read_sentences(files: Sequence[str]) -> Sentences:
    """Load the sentences of UTF-8 text files, in order.

    Raises:
        DataError: If a file cannot be read, a line is not UTF-8 (the message names both), or there is no sentence.
    """
    line_by_text: dict[str, SourceLine] = {}
    left_out = []
    blank = 0
    repeated = 0
    for line in (line for file in files for line in read_source_lines(file)):
        normalised = normalize_text(line.text)
        if not line.text:
            blank += 1
        elif any(unicodedata.category(character) == "Cc" for character in line.text):
            left_out.append(replace(line, reason="it contains a control character"))
        elif not normalised:
            left_out.append(replace(line, reason="it is empty after normalisation"))
        elif normalised in line_by_text:
            repeated += 1
        else:
            line_by_text[normalised] = line
    if not line_by_text:
        raise DataError(f"No sentence found in {', '.join(files)}. Write one sentence per line, in UTF-8.")
    return Sentences(tuple(line_by_text.values()), tuple(left_out), blank, repeated)


def read_source_lines(file: str) -> Iterator[SourceLine]:
    """Yield the lines of a text file with any line ending; a DataError names the line that is not UTF-8."""
    with explained(DataError, f"The sentences in {file} cannot be read", "Give the path of a text file.", ValueError):
        content = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    # Split the bytes: str.splitlines() would also split at U+2028 and form feeds.
    for row, line in enumerate(content.splitlines(), start=1):
        try:
            yield SourceLine(file, row, " ".join(line.decode("utf-8").split()))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}, line {row}: not UTF-8 at byte {error.start + 1} of the line ({error.reason}). Save "
                "the file as UTF-8."
            ) from None


def plan_splits(sentences: Sequence[str], valid: int | None, test: int | None) -> CorpusPlan:
    """Return the sentences and voices of each split; the same for the same sentences.

    Raises:
        UsageError: If a split, training included, would be empty.
    """
    valid = max(1, round(VALID_SHARE * len(sentences))) if valid is None else valid
    test = max(1, round(TEST_SHARE * len(sentences))) if test is None else test
    if min(valid, test) < 1 or valid + test >= len(sentences):
        raise UsageError(
            f"{len(sentences)} different sentences cannot be split into {valid} valid, {test} test and the "
            "rest for training: each split needs at least 1. Use more --sentences, or other "
            "--valid_utterances and --test_utterances."
        )
    held_out, for_training = hold_out(sentences, valid + test)
    # Both held-out sets are spread evenly over the sentences.
    for_valid, for_test = hold_out(held_out, valid)
    return CorpusPlan(
        train=tuple(assign_styles(for_training, TRAIN_VOICES)),
        valid=tuple(assign_styles(for_valid, VALID_VOICES)),
        test=tuple(assign_styles(for_test, TEST_VOICES)),
    )


def write_sentence_corpus(recipe: CorpusRecipe, sentences: Sentences, directory: Path) -> None:
    """Write the corpus and left_out.jsonl to `directory`; a DataError if a split has no sentence that can be spoken."""
    reasons = {error.text: error.reason for error in write_corpus(recipe, directory)}
    for name in ("train", "valid", "test"):
        if all(sentence.text in reasons for sentence in getattr(recipe.plan, name)):
            raise DataError(
                f"None of the sentences for {name} can be synthesised; the first: "
                f"{reasons[getattr(recipe.plan, name)[0].text]}. Use more --sentences."
            )
    unspoken = [replace(line, reason=reasons[line.text]) for line in sentences.used if line.text in reasons]
    left_out = sorted([*sentences.left_out, *unspoken], key=lambda line: (line.file, line.row))
    # The first 80 characters identify a long line.
    write_json_lines(directory / LEFT_OUT, (asdict(replace(line, text=line.text[:80])) for line in left_out))


def read_left_out(directory: Path) -> tuple[SourceLine, ...]:
    """Return the lines listed by left_out.jsonl in `directory`; a DataError if the file has been damaged."""
    path = directory / LEFT_OUT
    advice = f"Delete {directory} and generate it again."
    with explained(DataError, f"{path} cannot be read", advice, ValueError, TypeError):
        lines = path.read_text(encoding="utf-8").split("\n")
        return tuple(SourceLine(**json.loads(line)) for line in lines if line)
