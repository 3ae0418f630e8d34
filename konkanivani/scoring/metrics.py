"""Word and character error rates, with confidence intervals."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import jiwer
import numpy as np

# --------------------
# Word and character error rates: the edits of each utterance, their sums, and the confused words.
#
# The alignments are jiwer's, with the fewest edits (Levenshtein 1966). If several alignments have the fewest, their
# division into substitutions, deletions and insertions depends on the program; their sum does not. NIST's sclite
# weights a substitution with 4 and the others with 3 each, so it may find one edit more, with fewer substitutions.


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
        counts = Counter(edit for edits in self.wrong for edit in edits if edit.kind == kind)
        ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0].reference, pair[0].hypothesis))
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
        reference_rows, hypothesis_rows = (
            [" ".join(text.split()) for text in texts[rows]] for texts in (references, hypotheses)
        )
        output = process(reference_rows, hypothesis_rows)
        yield from zip(output.references, output.hypotheses, output.alignments, strict=True)


def _edits(reference: list[str], hypothesis: list[str], chunks: Iterable[jiwer.AlignmentChunk]) -> Iterator[Edit]:
    for chunk in chunks:
        # An insertion has no reference words, a deletion no hypothesis words.
        reference_words = reference[chunk.ref_start_idx : chunk.ref_end_idx]
        hypothesis_words = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
        yield from (
            Edit(*words)
            for words in zip(
                reference_words or [""] * len(hypothesis_words),
                hypothesis_words or [""] * len(reference_words),
                strict=True,
            )
        )


def align_words(references: Sequence[str], hypotheses: Sequence[str]) -> Iterator[tuple[Edit, ...]]:
    """Yield the aligned words of each pair, in order, with the same minimal edits that `count_edits` counts."""
    return (tuple(_edits(*aligned)) for aligned in _align(jiwer.process_words, references, hypotheses))


def count_edits(references: Sequence[str], hypotheses: Sequence[str]) -> UtteranceEdits:
    """Return the edits of each utterance; with an empty reference, each word of the hypothesis is an insertion."""
    words, characters = (np.zeros((len(references), len(KINDS)), np.int64) for _ in range(2))
    wrong = []
    for row, (reference, hypothesis, chunks) in enumerate(_align(jiwer.process_words, references, hypotheses)):
        _add_up(words[row], chunks)
        wrong.append(tuple(_edits(reference, hypothesis, (chunk for chunk in chunks if chunk.type != "equal"))))
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


# --------------------
# Confidence of error rates: 95 % percentile intervals of the bootstrap, for one system and for two compared.
#
# Bisani and Ney (2004), Bootstrap estimates for confidence intervals in ASR performance evaluation: draw utterances
# with replacement, the same number as in the test set, and sum errors and words of each resample. Liu et al. (2020),
# Statistical testing on ASR performance via blockwise bootstrap: the utterances of one speaker are not independent, so
# draw whole speakers. With few speakers that interval is far too short (docs/evaluation.md has the figures), so `auto`
# draws speakers from MIN_SPEAKERS on, and utterances below.


RESAMPLES = 2_000
SEED = 1234
MIN_SPEAKERS = 10
DRAWS_PER_CHUNK = 4_000_000  # bounds the memory of the drawn block numbers and their counts

Unit = Literal["utterances", "speakers"]
Wish = Literal["auto", "utterances", "speakers"]


@dataclass(frozen=True)
class Interval:
    """The central 95 % of the resamples; NaN if they are not informative."""

    low: float
    high: float


def choose_unit(speakers: Sequence[str], requested_unit: Wish) -> Unit:
    """Return the unit to resample for utterances of these speakers ("": unknown).

    Resampling speakers needs at least two of them, with `auto` at least MIN_SPEAKERS.
    """
    speaker_count = len(set(speakers) - {""})
    is_enough = speaker_count >= (MIN_SPEAKERS if requested_unit == "auto" else 2)
    return "speakers" if requested_unit != "utterances" and is_enough else "utterances"


def block_numbers(speakers: Sequence[str], unit: Unit) -> np.ndarray:
    """Return the block number of each utterance (N,); an utterance of an unknown speaker is a block of its own."""
    if unit == "utterances":
        return np.arange(len(speakers))
    keys = [("speaker", speaker) if speaker else ("row", row) for row, speaker in enumerate(speakers)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def resample_sums(amounts: np.ndarray, blocks: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Return sums of `amounts` over blocks drawn with replacement, (resamples, K) float64.

    The same blocks and seed give the same draws; two systems are compared on the same resamples by concatenating their
    amounts as columns.

    Args:
        amounts: (N, K), such as errors and words of each utterance.
        blocks: (N,) block number of each utterance, from 0; a resample has the original number of blocks.
    """
    count = int(blocks.max()) + 1 if len(blocks) else 0
    if not count:
        return np.zeros((resamples, amounts.shape[1]))
    sums = np.stack([np.bincount(blocks, column, count) for column in amounts.T], axis=1)
    generator = np.random.default_rng(seed)
    rows_per_chunk = max(1, DRAWS_PER_CHUNK // count)
    resampled = []
    for done in range(0, resamples, rows_per_chunk):
        rows = min(rows_per_chunk, resamples - done)
        # Offset each row by `count`, so that one bincount() counts the draws of all rows.
        drawn = generator.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        # How often each block is drawn times its sums: a matrix product instead of gathering all draws.
        resampled.append(times.astype(np.float64) @ sums)
    return np.concatenate(resampled)


def ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return the quotients; NaN if the denominator is 0."""
    return np.divide(numerators, denominators, out=np.full(len(numerators), np.nan), where=denominators > 0)


def percentiles(values: np.ndarray) -> Interval:
    """Return the central 95 % of the values that are not NaN; NaN if they do not vary."""
    numbers = values[~np.isnan(values)]
    # Resamples without errors, or of a single block, are all equal: no sign of certainty.
    if not len(numbers) or np.ptp(numbers) == 0:
        return Interval(np.nan, np.nan)
    return Interval(*map(float, np.quantile(numbers, (0.025, 0.975))))
