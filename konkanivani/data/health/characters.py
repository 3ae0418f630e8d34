"""What transcripts are written with: every character of the raw text, counted, named and judged.

A script is what Unicode's name of a letter begins with (`DEVANAGARI LETTER KA`), so no table of scripts is needed.
"""

import re
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from konkanivani.base.console import JOINERS, is_invisible, show_text
from konkanivani.data.format_characters import ZWJ, count_mapped_joiners
from konkanivani.data.text import normalize_text

RARE = 3  # seen fewer times than this
MAX_MIXED_WORDS = 10_000  # different ones kept while counting; a corpus with more is broken throughout
MAX_LISTED = 1_000
# Names of marks and modifiers that go with letters of any script begin with these.
COMMON = {"COMBINING", "MODIFIER", "VEDIC", "VARIATION", "SUPERSCRIPT", "SUBSCRIPT", "FEMININE", "MASCULINE", "MICRO"}


@dataclass(frozen=True)
class Character:
    """One character of the raw transcripts; `marks` says what is noteworthy about it."""

    code: int
    name: str
    count: int
    script: str
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """One way, as code points, in which something that Unicode holds to be one is written, and how often."""

    codes: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class SpellingVariants:
    """Different code points for the same character: one NFC form with all its spellings in the raw text."""

    shape: str
    spellings: tuple[Spelling, ...]


@dataclass(frozen=True)
class MixedWord:
    """A word with letters of two or more scripts, and where it was first seen."""

    word: str
    scripts: tuple[str, ...]
    count: int
    row: int


@dataclass(frozen=True)
class Changes:
    """What `normalize_text` does to the raw transcripts; texts in the first two, else characters.

    A joiner is mapped if it is part of a sequence with an equivalent encoding (format_characters.py), else removed.
    """

    texts: int
    not_composed: int
    joiners_removed: int
    joiners_mapped: int
    format_removed: int
    to_space: int
    lowered: int
    digits: int


@dataclass(frozen=True)
class CharacterHealth:
    """The inventory, most frequent first; `different` and `letters` count all, `inventory` lists at most 1,000."""

    script: str
    different: int
    letters: int
    inventory: tuple[Character, ...]
    twins: tuple[SpellingVariants, ...]
    mixed_words: tuple[MixedWord, ...]
    mixed_word_count: int
    changes: Changes


@dataclass
class CharacterCount:
    """Counts that grow text by text; what they take depends on how many different characters there are."""

    raw: Counter = field(default_factory=Counter)
    normalized: Counter = field(default_factory=Counter)
    pairs: Counter = field(default_factory=Counter)
    mixed: Counter = field(default_factory=Counter)
    first_row: dict[str, int] = field(default_factory=dict)
    texts: int = 0
    changed: int = 0
    not_composed: int = 0
    joiners_mapped: int = 0

    def add(self, raw: str, normalized: str, row: int) -> None:
        """Takes in one transcript, as its manifest writes it and as it is trained on."""
        self.raw.update(raw)
        self.normalized.update(normalized)
        self.texts += 1
        self.changed += raw != normalized
        self.joiners_mapped += count_mapped_joiners(raw)
        self.not_composed += not unicodedata.is_normalized("NFC", raw)
        self.pairs.update(_composition()[1].findall(raw))
        if len({script_of(character) for character in set(raw)} - {""}) > 1:
            for word in raw.split():
                is_kept = word in self.mixed or len(self.mixed) < MAX_MIXED_WORDS
                if is_kept and len(scripts_of(word)) > 1:
                    self.mixed[word] += 1
                    self.first_row.setdefault(word, row)

    def health(self) -> CharacterHealth:
        scripts = Counter()
        for character, count in self.raw.items():
            scripts[script_of(character)] += count
        del scripts[""]
        majority = scripts.most_common(1)[0][0] if scripts else ""
        listed = sorted(self.raw.items(), key=lambda pair: (-pair[1], pair[0]))
        words = self.mixed.most_common(20)
        return CharacterHealth(
            script=majority,
            different=len(listed),
            letters=len(set(self.normalized) - {" "}),
            inventory=tuple(
                _describe(character, count, self._mapped(character), majority)
                for character, count in listed[:MAX_LISTED]
            ),
            twins=self._twins(),
            mixed_words=tuple(
                MixedWord(show_text(w, 60), tuple(sorted(scripts_of(w))), n, self.first_row[w]) for w, n in words
            ),
            mixed_word_count=self.mixed.total(),
            changes=self._changes(),
        )

    def _mapped(self, character: str) -> int:
        """Return how many of a character are mapped; only a ZWJ can be."""
        return self.joiners_mapped if character == ZWJ else 0

    def _twins(self) -> tuple[SpellingVariants, ...]:
        """Every NFC form that the raw text writes in more than one way, by how often."""
        found: dict[str, list[Spelling]] = {}
        composable, _ = _composition()
        for form, count in [*self.raw.items(), *self.pairs.items()]:
            shape = unicodedata.normalize("NFC", form)
            if shape in composable:
                found.setdefault(shape, []).append(Spelling(tuple(map(ord, form)), count))
        twins = [
            SpellingVariants(shape, tuple(sorted(spellings, key=lambda spelling: (-spelling.count, spelling.codes))))
            for shape, spellings in found.items()
            if len(spellings) > 1
        ]
        return tuple(sorted(twins, key=lambda pair: -sum(spelling.count for spelling in pair.spellings)))

    def _changes(self) -> Changes:
        sums = Counter()
        for character, count in self.raw.items():
            sums[_treatment(character)] += count
        return Changes(
            texts=self.changed,
            not_composed=self.not_composed,
            joiners_removed=sums["joiner"] - self.joiners_mapped,
            joiners_mapped=self.joiners_mapped,
            format_removed=sums["format"],
            to_space=sums["space"],
            lowered=sums["lowered"],
            digits=sum(n for c, n in self.raw.items() if unicodedata.category(c) == "Nd"),
        )


@cache
def script_of(character: str) -> str:
    """The script of a letter or of its mark, such as `DEVANAGARI`; empty for all else and for what any script uses."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return "" if name in COMMON else name


def scripts_of(word: str) -> set[str]:
    return {script_of(character) for character in word} - {""}


def _describe(character: str, count: int, mapped: int, majority: str) -> Character:
    """Return the character with its marks; `mapped` of its `count` become part of an equivalent encoding."""
    script, fate, category = script_of(character), _treatment(character), unicodedata.category(character)
    kind = {"Cc": "CONTROL", "Co": "PRIVATE USE", "Cn": "UNASSIGNED"}.get(category, "UNNAMED")
    marks = {
        "foreign script": script not in ("", majority),
        "joiner": character in JOINERS,
        "invisible": is_invisible(character),
        "digit": category == "Nd",
        "mapped": mapped > 0,
        "removed": fate in ("joiner", "format") and count > mapped,
        "becomes a space": fate == "space",
        "rare": count < RARE and fate in ("kept", "lowered") and character != " ",
    }
    noted = tuple(mark for mark, holds in marks.items() if holds)
    return Character(ord(character), unicodedata.name(character, kind), count, script, noted)


@cache
def _treatment(character: str) -> Literal["kept", "joiner", "format", "space", "lowered"]:
    if character in JOINERS:
        return "joiner"
    if character == " ":
        return "kept"
    normal = normalize_text(character)
    if not normal:
        return "format" if unicodedata.category(character) == "Cf" else "space"
    return "lowered" if normal != unicodedata.normalize("NFC", character) else "kept"


@cache
def _composition() -> tuple[frozenset[str], re.Pattern]:
    """The NFC forms with more than one spelling, and what finds the spellings of two characters in a text.

    From this Python's Unicode; a third of a second, so not at import.
    """
    shapes, seconds = set(), set()
    for character in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.decomposition(character).split(" ")
        if parts[0] and not parts[0].startswith("<"):
            shapes.add(unicodedata.normalize("NFC", character))
            seconds.update(chr(int(part, 16)) for part in parts[1:])
    return frozenset(shapes), re.compile(f".[{re.escape(''.join(sorted(seconds)))}]", re.DOTALL)
