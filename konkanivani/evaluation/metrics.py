"""Word and character error rates: what was changed in each utterance, and its sums over any set of them.

The alignments are jiwer's, of fewest edits (Levenshtein 1966). Where several have as few, how the edits divide into
substitutions, deletions and insertions depends on the program; their sum does not. NIST's sclite counts a substitution
as 4 and the others as 3 each, and so may find an edit more where it finds fewer substitutions.
"""

from dataclasses import dataclass
from functools import cached_property

import jiwer
import numpy as np

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
        """Substitutions, deletions and insertions."""
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
        """Word errors per reference word; NaN over no words."""
        return self.words.rate

    @property
    def cer(self) -> float:
        """Character errors per reference character, spaces counted; NaN over no characters."""
        return self.characters.rate


@dataclass(frozen=True)
class UtteranceEdits:
    """(utterances, 4) int64 for words and for characters: hits, substitutions, deletions, insertions."""

    words: np.ndarray
    characters: np.ndarray

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def sums(self) -> np.ndarray:
        """(utterances, 4) int64: word errors, words, character errors, characters; what rates are made of."""
        both = (self.words, self.characters)
        return np.stack([part for edits in both for part in (edits[:, 1:].sum(1), edits[:, :3].sum(1))], axis=1)

    def of(self, rows: np.ndarray) -> "UtteranceEdits":
        """The edits of these utterances: their numbers, or a mask."""
        return UtteranceEdits(self.words[rows], self.characters[rows])

    def rates(self) -> ErrorRates:
        """The rates over all of them."""
        return ErrorRates(*(EditCounts(*map(int, edits.sum(axis=0))) for edits in (self.words, self.characters)))


def count_edits(references: list[str], hypotheses: list[str]) -> UtteranceEdits:
    """What was changed in each utterance; words are what white space parts, and a run of it is one character.

    A reference may be empty: then all that was heard is inserted.
    """
    words, characters = (np.zeros((len(references), len(KINDS)), np.int64) for _ in range(2))
    for first in range(0, len(references), UTTERANCES_AT_ONCE):
        rows = slice(first, first + UTTERANCES_AT_ONCE)
        both = [[" ".join(text.split()) for text in texts[rows]] for texts in (references, hypotheses)]
        _add_alignments(words[rows], jiwer.process_words(*both).alignments)
        _add_alignments(characters[rows], jiwer.process_characters(*both).alignments)
    return UtteranceEdits(words, characters)


def _add_alignments(counts: np.ndarray, alignments: list[list[jiwer.AlignmentChunk]]) -> None:
    """Adds the lengths of the alignments' chunks to counts (utterances, 4)."""
    for row, chunks in enumerate(alignments):
        for chunk in chunks:
            length = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
            counts[row, KINDS[chunk.type]] += length


def error_rates(references: list[str], hypotheses: list[str]) -> ErrorRates:
    """The rates of `hypotheses` against `references`, each normalised the same way."""
    return count_edits(references, hypotheses).rates()
