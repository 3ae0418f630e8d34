"""Pairs of texts with artificial errors and without, to train a model that corrects transcripts."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from konkanivani.data.text import normalize_text
from konkanivani.errors import DataError, explained
from konkanivani.files import write_json_lines
from konkanivani.randomness import derive_seed
from konkanivani.scoring.metrics import align_words

ADVICE = "Give the path of a file that konkanivani evaluate has written, or of a text file."


@dataclass(frozen=True)
class Confusions:
    """Characters that a recogniser writes in place of another one, with their counts."""

    characters: Mapping[str, Counter[str]] = field(default_factory=dict)

    def draw(self, character: str, generator: random.Random) -> str:
        """Return a character to write in place of another one, in proportion to its count; "" if none is known."""
        counts = self.characters.get(character)
        if not counts:
            return ""
        names = sorted(counts)
        return generator.choices(names, [counts[name] for name in names])[0]


def read_confusions(path: Path) -> Confusions:
    """Return the confused characters of a hypotheses file; raise a DataError if it has another format."""
    references, hypotheses = [], []
    for number, row in enumerate(read_lines(path), start=1):
        try:
            match json.loads(row):
                case {"reference": str(reference), "hypothesis": str(hypothesis)}:
                    references.append(normalize_text(reference))
                    hypotheses.append(normalize_text(hypothesis))
                    continue
        except (ValueError, RecursionError):
            pass
        raise DataError(f"{path}, line {number}: it has no reference and hypothesis. {ADVICE}")
    confusions: dict[str, Counter[str]] = {}
    for edits in align_words(references, hypotheses):
        for edit in (edit for edit in edits if edit.kind == "substitution"):
            matcher = SequenceMatcher(None, edit.reference, edit.hypothesis, autojunk=False)
            for kind, first, last, start, end in matcher.get_opcodes():
                if kind == "replace" and last - first == end - start:
                    for character, replacement in zip(
                        edit.reference[first:last], edit.hypothesis[start:end], strict=True
                    ):
                        confusions.setdefault(character, Counter())[replacement] += 1
    return Confusions(confusions)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty; raise a DataError if it cannot be read or has none."""
    with explained(DataError, f"{path} cannot be read", ADVICE, UnicodeDecodeError):
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path} has no text. {ADVICE}")
    return lines


def corrupt(text: str, share: float, confusions: Confusions, generator: random.Random) -> str:
    """Return the text in lower case without punctuation, with an error in a `share` of its words.

    An error drops, doubles or, if the table has the character, confuses one character.
    """
    words = []
    for word in normalize_text(text).split():
        if generator.random() < share:
            place = generator.randrange(len(word))
            character = word[place]
            drawn = confusions.draw(character, generator)
            kinds = ["", 2 * character] if len(word) > 1 else [2 * character]
            # A known confusion is as likely as both others together.
            replacement = drawn if drawn and generator.random() < 0.5 else generator.choice(kinds)
            word = word[:place] + replacement + word[place + 1 :]
        words.append(word)
    return " ".join(words)


def pairs_of(
    texts: Sequence[str], share: float, confusions: Confusions, seed: int, copies: int = 1
) -> Iterator[dict[str, str]]:
    """Yield rows of a text-to-text manifest, `copies` of each text, each with other errors.

    The errors of a row depend on the seed and the row's number only.
    """
    for number in range(copies * len(texts)):
        text = texts[number % len(texts)]
        generator = random.Random(derive_seed(seed, "corrupt", number))
        wrong = corrupt(text, share, confusions, generator)
        if wrong:
            yield {"input": wrong, "text": text.strip()}


def write_corrupted(
    texts: Sequence[str], share: float, confusions: Confusions, seed: int, output: Path, copies: int = 1
) -> int:
    """Write a text-to-text manifest and return its number of rows."""
    return write_json_lines(output, pairs_of(texts, share, confusions, seed, copies))
