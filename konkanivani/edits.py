"""The words of a reference beside those of a hypothesis, for a person to read, and which are often confused."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jiwer

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


def align_words(reference: str, hypothesis: str) -> tuple[Edit, ...]:
    """The words of both side by side, in order, with as few edits as can be; those that are counted."""
    return tuple(_edits(jiwer.process_words(" ".join(reference.split()), " ".join(hypothesis.split()))))


def _edits(aligned: jiwer.WordOutput) -> Iterator[Edit]:
    [reference], [hypothesis], [chunks] = aligned.references, aligned.hypotheses, aligned.alignments
    for chunk in chunks:
        said = reference[chunk.ref_start_idx : chunk.ref_end_idx]
        heard = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
        yield from (Edit(*words) for words in zip(said or [""] * len(heard), heard or [""] * len(said), strict=True))


def count_confusions(alignments: Iterator[tuple[Edit, ...]]) -> Counter[Edit]:
    """How often each edit was made, hits aside."""
    return Counter(edit for edits in alignments for edit in edits if edit.kind != "hit")


def most_frequent(confusions: Counter[Edit], kind: EditKind, most: int) -> tuple[Confusion, ...]:
    """The most frequent edits of a kind, first; of equals those whose words come first."""
    found = ((edit, count) for edit, count in confusions.items() if edit.kind == kind)
    ordered = sorted(found, key=lambda pair: (-pair[1], pair[0].reference, pair[0].hypothesis))
    return tuple(Confusion(edit, count) for edit, count in ordered[:most])
