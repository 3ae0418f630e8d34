"""Error rates of words and characters: what was changed in each utterance, its sums, and which words are confused.

The alignments are jiwer's, of fewest edits (Levenshtein 1966). Where several have as few, how the edits divide into
substitutions, deletions and insertions depends on the program; their sum does not. NIST's sclite counts a substitution
as 4 and the others as 3 each, and so may find an edit more where it finds fewer substitutions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import jiwer
import numpy as np

EditKind = Literal["hit", "substitution", "deletion", "insertion"]
KINDS = {"equal": 0, "substitute": 1, "delete": 2, "insert": 3}  # jiwer's name, our column
UTTERANCES_AT_ONCE = 1_000  # an alignment takes far more memory than its counts


@dataclass(frozen=True)
class EditCounts:
    """Words or characters of the reference that were kept, replaced and left out, and those that were added."""

    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def length(self) -> int:
        """Words or characters in the reference."""
        return self.hits + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """Errors per word or character of the reference, above one where much is inserted; NaN over none."""
        return self.errors / self.length if self.length else float("nan")


@dataclass(frozen=True)
class ErrorRates:
    """What was changed in the words and, apart from that, in the characters of a set of utterances."""

    words: EditCounts
    characters: EditCounts

    @property
    def wer(self) -> float:
        return self.words.rate

    @property
    def cer(self) -> float:
        """As the WER, of characters; spaces are counted."""
        return self.characters.rate


@dataclass(frozen=True, slots=True)
class Edit:
    """A word of the reference and the one heard for it: the same, another, or none; or one heard for none ("")."""

    reference: str
    hypothesis: str

    @property
    def kind(self) -> EditKind:
        if self.reference == self.hypothesis:
            return "hit"
        if not self.hypothesis:
            return "deletion"
        return "substitution" if self.reference else "insertion"


@dataclass(frozen=True)
class UtteranceEdits:
    """(utterances, 4) int64 for words and for characters: hits, substitutions, deletions, insertions.

    `wrong` are each utterance's word edits without the hits.
    """

    words: np.ndarray
    characters: np.ndarray
    wrong: tuple[tuple[Edit, ...], ...]

    @cached_property
    def sums(self) -> np.ndarray:
        """(utterances, 4) int64: word errors, words, character errors, characters; what rates are made of."""
        both = (self.words, self.characters)
        return np.stack([part for edits in both for part in (edits[:, 1:].sum(1), edits[:, :3].sum(1))], axis=1)

    def of(self, rows: np.ndarray) -> "UtteranceEdits":
        """The edits of the utterances of these numbers."""
        return UtteranceEdits(self.words[rows], self.characters[rows], tuple(self.wrong[row] for row in rows))

    def rates(self) -> ErrorRates:
        return ErrorRates(*(EditCounts(*map(int, edits.sum(axis=0))) for edits in (self.words, self.characters)))

    def confusions(self, kind: EditKind, most: int) -> tuple[tuple[Edit, int], ...]:
        """The most frequent word edits of a kind with their counts; of equals those whose words come first."""
        found = Counter(edit for edits in self.wrong for edit in edits if edit.kind == kind)
        ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0].reference, pair[0].hypothesis))
        return tuple(ordered[:most])


def _align(
    process: Callable[..., jiwer.WordOutput], references: Sequence[str], hypotheses: Sequence[str]
) -> Iterator[tuple[list[str], list[str], list[jiwer.AlignmentChunk]]]:
    """Both sides of each pair and their alignment; words are what white space parts, a run of it is one character."""
    for first in range(0, len(references), UTTERANCES_AT_ONCE):
        rows = slice(first, first + UTTERANCES_AT_ONCE)
        output = process(*([" ".join(text.split()) for text in texts[rows]] for texts in (references, hypotheses)))
        yield from zip(output.references, output.hypotheses, output.alignments, strict=True)


def _edits(said: list[str], heard: list[str], chunks: Iterable[jiwer.AlignmentChunk]) -> Iterator[Edit]:
    for chunk in chunks:
        one, other = said[chunk.ref_start_idx : chunk.ref_end_idx], heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        yield from (Edit(*words) for words in zip(one or [""] * len(other), other or [""] * len(one), strict=True))


def align_words(references: Sequence[str], hypotheses: Sequence[str]) -> Iterator[tuple[Edit, ...]]:
    """The words of each reference beside its hypothesis's, in order, with as few edits as can be: those counted."""
    return (tuple(_edits(*aligned)) for aligned in _align(jiwer.process_words, references, hypotheses))


def count_edits(references: Sequence[str], hypotheses: Sequence[str]) -> UtteranceEdits:
    """What was changed in each utterance. Of an empty reference each word of the hypothesis is an insertion."""
    words, characters = (np.zeros((len(references), len(KINDS)), np.int64) for _ in range(2))
    wrong = []
    for row, (said, heard, chunks) in enumerate(_align(jiwer.process_words, references, hypotheses)):
        _add_up(words[row], chunks)
        wrong.append(tuple(_edits(said, heard, (chunk for chunk in chunks if chunk.type != "equal"))))
    for row, (_, _, chunks) in enumerate(_align(jiwer.process_characters, references, hypotheses)):
        _add_up(characters[row], chunks)
    return UtteranceEdits(words, characters, tuple(wrong))


def _add_up(counts: np.ndarray, chunks: list[jiwer.AlignmentChunk]) -> None:
    for chunk in chunks:
        length = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        counts[KINDS[chunk.type]] += length


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRates:
    """The rates of `hypotheses` against `references`, each normalised the same way."""
    return count_edits(references, hypotheses).rates()
