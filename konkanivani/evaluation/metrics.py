"""Word and character error rates: the edits of each utterance, their sums, and the confused words.

The alignments are jiwer's, with the fewest edits (Levenshtein 1966). If several alignments have the fewest, their
division into substitutions, deletions and insertions depends on the program; their sum does not. NIST's sclite weights
a substitution with 4 and the others with 3 each, so it may find one edit more, with fewer substitutions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import jiwer
import numpy as np

EditKind = Literal["hit", "substitution", "deletion", "insertion"]
KINDS = {"equal": 0, "substitute": 1, "delete": 2, "insert": 3}  # jiwer's name: column of the counts
UTTERANCES_AT_ONCE = 1_000  # an alignment needs far more memory than its counts


@dataclass(frozen=True)
class EditCounts:
    """Numbers of correct, substituted and deleted words or characters of the reference, and of inserted ones."""

    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def length(self) -> int:
        """Return the number of words or characters in the reference."""
        return self.hits + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """Return the errors per word or character of the reference.

        Many insertions make it exceed one; it is NaN for an empty reference.
        """
        return self.errors / self.length if self.length else float("nan")


@dataclass(frozen=True)
class ErrorRates:
    """Edits of the words and, aligned separately, of the characters of a set of utterances."""

    words: EditCounts
    characters: EditCounts

    @property
    def wer(self) -> float:
        return self.words.rate

    @property
    def cer(self) -> float:
        """Return the character error rate; spaces count as characters."""
        return self.characters.rate


@dataclass(frozen=True, slots=True)
class Edit:
    """A reference word with its aligned hypothesis word; "" for the missing side of an insertion or deletion."""

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
    """Edit counts (N, 4) int64 of words and of characters: hits, substitutions, deletions, insertions.

    `wrong` has each utterance's word edits except the hits.
    """

    words: np.ndarray
    characters: np.ndarray
    wrong: tuple[tuple[Edit, ...], ...]

    @cached_property
    def sums(self) -> np.ndarray:
        """Return (N, 4) int64: word errors, words, character errors, characters, from which the rates are computed."""
        # Columns 1 to 3 are the errors; 0 to 2 (without insertions) add up to the length of the reference.
        both = (self.words, self.characters)
        return np.stack([part for edits in both for part in (edits[:, 1:].sum(1), edits[:, :3].sum(1))], axis=1)

    def of(self, rows: np.ndarray) -> "UtteranceEdits":
        """Return the edits of the utterances with these indices."""
        return UtteranceEdits(self.words[rows], self.characters[rows], tuple(self.wrong[row] for row in rows))

    def rates(self) -> ErrorRates:
        return ErrorRates(*(EditCounts(*map(int, edits.sum(axis=0))) for edits in (self.words, self.characters)))

    def confusions(self, kind: EditKind, most: int) -> tuple[tuple[Edit, int], ...]:
        """Return the most frequent word edits of a kind with their counts; ties in the order of their words."""
        found = Counter(edit for edits in self.wrong for edit in edits if edit.kind == kind)
        ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0].reference, pair[0].hypothesis))
        return tuple(ordered[:most])


def _align(
    process: Callable[[list[str], list[str]], jiwer.WordOutput | jiwer.CharacterOutput],
    references: Sequence[str],
    hypotheses: Sequence[str],
) -> Iterator[tuple[list[str], list[str], list[jiwer.AlignmentChunk]]]:
    """Yield the two sides of each pair and their alignment."""
    for first in range(0, len(references), UTTERANCES_AT_ONCE):
        rows = slice(first, first + UTTERANCES_AT_ONCE)
        # Words are separated by whitespace; for the characters, a run of whitespace is one space.
        said, heard = ([" ".join(text.split()) for text in texts[rows]] for texts in (references, hypotheses))
        output = process(said, heard)
        yield from zip(output.references, output.hypotheses, output.alignments, strict=True)


def _edits(said: list[str], heard: list[str], chunks: Iterable[jiwer.AlignmentChunk]) -> Iterator[Edit]:
    for chunk in chunks:
        # An insertion has no reference words, a deletion no hypothesis words.
        one = said[chunk.ref_start_idx : chunk.ref_end_idx]
        other = heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        yield from (Edit(*words) for words in zip(one or [""] * len(other), other or [""] * len(one), strict=True))


def align_words(references: Sequence[str], hypotheses: Sequence[str]) -> Iterator[tuple[Edit, ...]]:
    """Yield the aligned words of each pair, in order, with the same minimal edits that `count_edits` counts."""
    return (tuple(_edits(*aligned)) for aligned in _align(jiwer.process_words, references, hypotheses))


def count_edits(references: Sequence[str], hypotheses: Sequence[str]) -> UtteranceEdits:
    """Return the edits of each utterance; with an empty reference, each word of the hypothesis is an insertion."""
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
        # Both sides have equal lengths, except that one side of a deletion or insertion is empty.
        length = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
        counts[KINDS[chunk.type]] += length


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRates:
    """Return the error rates of `hypotheses` against `references`, both normalised the same way."""
    return count_edits(references, hypotheses).rates()
