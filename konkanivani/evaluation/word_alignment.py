"""The words of a reference beside those of a hypothesis, for a person to read, and which are often confused."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import jiwer

UTTERANCES_AT_ONCE = 1_000  # an alignment takes far more memory than the words

EditKind = Literal["hit", "substitution", "deletion", "insertion"]


@dataclass(frozen=True)
class Edit:
    """A word of the reference and the one heard for it: the same, another, or none; or one heard for none ("")."""

    reference: str
    hypothesis: str

    @property
    def kind(self) -> EditKind:
        """What happened to the word."""
        if self.reference == self.hypothesis:
            return "hit"
        if not self.hypothesis:
            return "deletion"
        return "substitution" if self.reference else "insertion"


@dataclass(frozen=True)
class Confusion:
    """An edit, and how often it was made."""

    edit: Edit
    count: int


def align_words(references: Sequence[str], hypotheses: Sequence[str]) -> Iterator[tuple[Edit, ...]]:
    """The words of each reference beside its hypothesis's, in order, with as few edits as can be: those counted."""
    for first in range(0, len(references), UTTERANCES_AT_ONCE):
        rows = slice(first, first + UTTERANCES_AT_ONCE)
        both = [[" ".join(text.split()) for text in texts[rows]] for texts in (references, hypotheses)]
        aligned = jiwer.process_words(*both)
        for said, heard, chunks in zip(aligned.references, aligned.hypotheses, aligned.alignments, strict=True):
            yield tuple(_edits(said, heard, chunks))


def _edits(reference: list[str], hypothesis: list[str], chunks: list[jiwer.AlignmentChunk]) -> Iterator[Edit]:
    for chunk in chunks:
        said = reference[chunk.ref_start_idx : chunk.ref_end_idx]
        heard = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
        yield from (Edit(*words) for words in zip(said or [""] * len(heard), heard or [""] * len(said), strict=True))


def count_confusions(alignments: Iterable[tuple[Edit, ...]]) -> Counter[Edit]:
    """How often each edit was made, hits aside."""
    return Counter(edit for edits in alignments for edit in edits if edit.kind != "hit")


def most_frequent(confusions: Counter[Edit], kind: EditKind, most: int) -> tuple[Confusion, ...]:
    """The most frequent edits of a kind, first; of equals those whose words come first."""
    found = ((edit, count) for edit, count in confusions.items() if edit.kind == kind)
    ordered = sorted(found, key=lambda pair: (-pair[1], pair[0].reference, pair[0].hypothesis))
    return tuple(Confusion(edit, count) for edit, count in ordered[:most])
