"""Inventory of the characters in raw transcripts, with their counts, Unicode names and noteworthy properties.

The script of a letter is the first word of its Unicode name (`DEVANAGARI LETTER KA`), so no table of scripts is needed.
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

RARE = 3  # a character with a lower count is rare
MAX_MIXED_WORDS = 10_000  # distinct words kept while counting; a corpus with more is broken throughout
MAX_LISTED = 1_000
# First words of the names of marks and modifiers that are used with letters of any script.
COMMON = {"COMBINING", "MODIFIER", "VEDIC", "VARIATION", "SUPERSCRIPT", "SUBSCRIPT", "FEMININE", "MASCULINE", "MICRO"}


@dataclass(frozen=True)
class Character:
    """A character of the raw transcripts; `marks` lists its noteworthy properties."""

    code: int
    name: str
    count: int
    script: str
    marks: tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """One of several canonically equivalent code point sequences, and its count."""

    codes: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class SpellingVariants:
    """A character that the raw text encodes in several ways: its NFC form and all its encodings."""

    shape: str
    spellings: tuple[Spelling, ...]


@dataclass(frozen=True)
class MixedWord:
    """A word with letters of two or more scripts, and the row in which it was first seen."""

    word: str
    scripts: tuple[str, ...]
    count: int
    row: int


@dataclass(frozen=True)
class Changes:
    """Effect of `normalize_text` on the raw transcripts: the first two fields count texts, the others characters.

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
    """Character inventory, most frequent first; `different` and `letters` are totals, `inventory` has at most 1,000."""

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
    """Running counts over transcripts; memory grows with the number of distinct characters, not of texts."""

    raw: Counter[str] = field(default_factory=Counter)
    normalized: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    first_row: dict[str, int] = field(default_factory=dict)
    texts: int = 0
    changed: int = 0
    not_composed: int = 0
    joiners_mapped: int = 0

    def add(self, raw: str, normalized: str, row: int) -> None:
        """Count a transcript, both as its manifest contains it and as it is trained on."""
        self.raw.update(raw)
        self.normalized.update(normalized)
        self.texts += 1
        self.changed += raw != normalized
        self.joiners_mapped += count_mapped_joiners(raw)
        self.not_composed += not unicodedata.is_normalized("NFC", raw)
        # Decomposed characters, such as a letter followed by a combining mark.
        self.pairs.update(_composition()[1].findall(raw))
        # Almost all texts have one script; only the others are examined word by word.
        if len({script_of(character) for character in set(raw)} - {""}) > 1:
            for word in raw.split():
                is_kept = word in self.mixed or len(self.mixed) < MAX_MIXED_WORDS
                if is_kept and len(scripts_of(word)) > 1:
                    self.mixed[word] += 1
                    self.first_row.setdefault(word, row)

    def health(self) -> CharacterHealth:
        """Return the inventory of all counted transcripts."""
        scripts: Counter[str] = Counter()
        for character, count in self.raw.items():
            scripts[script_of(character)] += count
        del scripts[""]
        majority = scripts.most_common(1)[0][0] if scripts else ""
        # Ties in code point order, so that the report is reproducible.
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
        """Return the number of occurrences of a character that are mapped; only a ZWJ can be."""
        return self.joiners_mapped if character == ZWJ else 0

    def _twins(self) -> tuple[SpellingVariants, ...]:
        """Return every character that the raw text encodes in more than one way, most frequent first."""
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
        sums: Counter[str] = Counter()
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
    """Return the script of a letter or mark, such as `DEVANAGARI`; "" for other characters and marks of any script."""
    if unicodedata.category(character)[0] not in "LM":
        return ""
    # A name may start with two scripts: KATAKANA-HIRAGANA PROLONGED SOUND MARK.
    name = unicodedata.name(character, "").split(" ")[0].split("-")[0]
    return "" if name in COMMON else name


def scripts_of(word: str) -> set[str]:
    return {script_of(character) for character in word} - {""}


def _describe(character: str, count: int, mapped: int, majority: str) -> Character:
    """Return the character with its marks; `mapped` of its `count` become part of an equivalent encoding."""
    script = script_of(character)
    fate = _treatment(character)
    category = unicodedata.category(character)
    kind = {"Cc": "CONTROL", "Co": "PRIVATE USE", "Cn": "UNASSIGNED"}.get(category, "UNNAMED")
    marks = {
        "foreign script": script not in ("", majority),
        "joiner": character in JOINERS,
        "invisible": is_invisible(character),
        "digit": category == "Nd",
        "mapped": mapped > 0,
        "removed": fate in ("joiner", "format") and count > mapped,
        "becomes a space": fate == "space",
        # Only characters that remain in the training text can be too rare to be learnt.
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
    # normalize_text strips a blank, so a space is handled before.
    normal = normalize_text(character)
    if not normal:
        return "format" if unicodedata.category(character) == "Cf" else "space"
    # Composition by NFC alone is not a change of case.
    return "lowered" if normal != unicodedata.normalize("NFC", character) else "kept"


@cache
def _composition() -> tuple[frozenset[str], re.Pattern[str]]:
    """Return the NFC forms with more than one encoding, and a pattern for the encodings of two characters in a text.

    The tables come from Python's own Unicode database, which takes a third of a second; therefore not at import.
    """
    shapes: set[str] = set()
    seconds: set[str] = set()
    for character in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.decomposition(character).split(" ")
        # "<compat>" and the like are compatibility decompositions, which NFC leaves unchanged.
        if parts[0] and not parts[0].startswith("<"):
            shapes.add(unicodedata.normalize("NFC", character))
            seconds.update(chr(int(part, 16)) for part in parts[1:])
    return frozenset(shapes), re.compile(f".[{re.escape(''.join(sorted(seconds)))}]", re.DOTALL)
