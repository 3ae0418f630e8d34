"""Word and character error rates over a set of utterances."""

from dataclasses import dataclass

import jiwer


@dataclass(frozen=True)
class ErrorRates:
    """Edits (substitutions, deletions, insertions) and reference lengths, summed over a set of utterances."""

    word_errors: int
    words: int
    character_errors: int
    characters: int

    @property
    def wer(self) -> float:
        """Word errors per reference word; NaN over no words."""
        return self.word_errors / self.words if self.words else float("nan")

    @property
    def cer(self) -> float:
        """Character errors per reference character, spaces counted; NaN over no characters."""
        return self.character_errors / self.characters if self.characters else float("nan")


def error_rates(references: list[str], hypotheses: list[str]) -> ErrorRates:
    """The rates of `hypotheses` against `references`, both normalised; no reference may be empty."""
    if not references:
        return ErrorRates(0, 0, 0, 0)
    words = jiwer.process_words(references, hypotheses)
    characters = jiwer.process_characters(references, hypotheses)
    return ErrorRates(
        words.substitutions + words.deletions + words.insertions,
        words.substitutions + words.deletions + words.hits,
        characters.substitutions + characters.deletions + characters.insertions,
        characters.substitutions + characters.deletions + characters.hits,
    )
