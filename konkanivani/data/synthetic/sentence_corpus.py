"""A corpus of any sentences, spoken like the built-in ones: synthetic, Marathi voice.

It is made of text files, one sentence a line. No sentence is in two splits (sentences that normalise to the same text
are one), no voice is in two splits. A line that cannot be used is left out, with its reason.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from konkanivani.base.errors import DataError, UsageError, explained
from konkanivani.base.files import write_json_lines
from konkanivani.data.synthetic.builtin_corpus import (
    CorpusPlan,
    CorpusRecipe,
    SplitSizes,
    publish_corpus,
    read_description,
    write_corpus,
)
from konkanivani.data.synthetic.builtin_patterns import hold_out
from konkanivani.data.synthetic.spoken_sentences import TEST_VOICES, TRAIN_VOICES, VALID_VOICES, assign_styles
from konkanivani.data.text import normalize_text

SENTENCE_CORPUS = "corpus of sentences"
LEFT_OUT = "left_out.jsonl"
VALID_SHARE, TEST_SHARE = 0.05, 0.1  # of the sentences, where nothing else is asked for


@dataclass(frozen=True)
class SourceLine:
    """A line of a text file, from 1, its runs of spaces made one; with the reason where it is not spoken."""

    file: str
    row: int
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Sentences:
    """The different sentences of some files, the lines left out, and how many were blank or said again."""

    kept: tuple[SourceLine, ...]
    left_out: tuple[SourceLine, ...]
    blank: int
    repeated: int


@dataclass(frozen=True)
class SentenceReport:
    """What has become of the sentences; `is_new` False where the corpus was there already."""

    is_new: bool
    size: SplitSizes
    blank: int
    repeated: int
    left_out: tuple[SourceLine, ...]


def build_sentence_corpus(
    files: Sequence[str], directory: str | Path, valid: int | None = None, test: int | None = None
) -> SentenceReport:
    """Puts a corpus of the files' sentences at `directory`, as publish_corpus does, with left_out.jsonl.

    `valid` and `test` sentences (None: 5 % and 10 %) are taken evenly from all places; the others are for training.
    Raises a DataError for a file that cannot be read as UTF-8 or holds too few sentences, a UsageError for a size that
    cannot be had.
    """
    directory, sentences = Path(directory), read_sentences(files)
    plan = plan_splits([line.text for line in sentences.kept], valid, test)
    files_made = (*CorpusRecipe.files, LEFT_OUT)
    # Of everything that the corpus follows from, the rows in left_out.jsonl included.
    rows = [(line.row, line.text) for line in sentences.kept + sentences.left_out]
    digest = hashlib.sha256(json.dumps([plan.digest(), rows], ensure_ascii=False).encode()).hexdigest()
    recipe = CorpusRecipe(SENTENCE_CORPUS, plan, digest, files_made)
    is_new = publish_corpus(directory, recipe, lambda partial: write_sentence_corpus(recipe, sentences, partial))
    size = SplitSizes(**read_description(directory)["utterances"])
    return SentenceReport(is_new, size, sentences.blank, sentences.repeated, read_left_out(directory))


def read_sentences(files: Sequence[str]) -> Sentences:
    """The sentences of UTF-8 text files, in order; a DataError names the file, and the line that is not UTF-8."""
    kept: dict[str, SourceLine] = {}
    left_out, blank, repeated = [], 0, 0
    for line in (line for file in files for line in read_source_lines(file)):
        normalised = normalize_text(line.text)
        if not line.text:
            blank += 1
        elif any(unicodedata.category(character) == "Cc" for character in line.text):
            left_out.append(replace(line, reason="it contains a control character"))
        elif not normalised:
            left_out.append(replace(line, reason="it is empty after normalisation"))
        elif normalised in kept:
            repeated += 1
        else:
            kept[normalised] = line
    if not kept:
        raise DataError(f"No sentence found in {', '.join(files)}. Write one sentence per line, in UTF-8.")
    return Sentences(tuple(kept.values()), tuple(left_out), blank, repeated)


def read_source_lines(file: str) -> Iterator[SourceLine]:
    """The lines of a text file, whichever line ends it has; a DataError names the one that is not UTF-8."""
    with explained(DataError, f"The sentences in {file} cannot be read", "Give the path of a text file.", ValueError):
        content = Path(file).read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    for row, line in enumerate(content.splitlines(), start=1):
        try:
            yield SourceLine(file, row, " ".join(line.decode("utf-8").split()))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}, line {row}: not UTF-8 at byte {error.start + 1} of the line ({error.reason}). Save "
                "the file as UTF-8."
            ) from None


def plan_splits(sentences: Sequence[str], valid: int | None, test: int | None) -> CorpusPlan:
    """What is said in which split and voice; the same for the same sentences. A UsageError where training gets none."""
    valid = max(1, round(VALID_SHARE * len(sentences))) if valid is None else valid
    test = max(1, round(TEST_SHARE * len(sentences))) if test is None else test
    if min(valid, test) < 1 or valid + test >= len(sentences):
        raise UsageError(
            f"{len(sentences)} different sentences cannot be split into {valid} valid, {test} test and the "
            "rest for training: each split needs at least 1. Use more --sentences, or other "
            "--valid_utterances and --test_utterances."
        )
    held_out, for_training = hold_out(sentences, valid + test)
    for_valid, for_test = hold_out(held_out, valid)
    return CorpusPlan(
        train=tuple(assign_styles(for_training, TRAIN_VOICES)),
        valid=tuple(assign_styles(for_valid, VALID_VOICES)),
        test=tuple(assign_styles(for_test, TEST_VOICES)),
    )


def write_sentence_corpus(recipe: CorpusRecipe, sentences: Sentences, directory: Path) -> None:
    """Writes the corpus and left_out.jsonl to `directory`; a DataError where a split has no sentence that is spoken."""
    reasons = {error.text: error.reason for error in write_corpus(recipe, directory)}
    for name in ("train", "valid", "test"):
        if all(sentence.text in reasons for sentence in getattr(recipe.plan, name)):
            raise DataError(
                f"None of the sentences for {name} can be synthesised; the first: "
                f"{reasons[getattr(recipe.plan, name)[0].text]}. Use more --sentences."
            )
    unspoken = [replace(line, reason=reasons[line.text]) for line in sentences.kept if line.text in reasons]
    left_out = sorted([*sentences.left_out, *unspoken], key=lambda line: (line.file, line.row))
    # Of a long text the beginning will do.
    write_json_lines(directory / LEFT_OUT, (asdict(replace(line, text=line.text[:80])) for line in left_out))


def read_left_out(directory: Path) -> tuple[SourceLine, ...]:
    """What left_out.jsonl in `directory` lists; a DataError where it is no longer what was written."""
    path, advice = directory / LEFT_OUT, f"Delete {directory} and generate it again."
    with explained(DataError, f"{path} cannot be read", advice, ValueError, TypeError):
        lines = path.read_text(encoding="utf-8").split("\n")
        return tuple(SourceLine(**json.loads(line)) for line in lines if line)
