"""Format characters (Unicode general category Cf) in transcripts: kept, mapped or dropped.

| characters | scored and trained text | written text (Whisper) |
|---|---|---|
| ZWJ in a sequence of `EQUIVALENT` | mapped | mapped |
| other ZWJ and ZWNJ (Bengali ya-phalaa, Kannada, Sinhala, Persian) | dropped | kept |
| visible signs of `VISIBLE` (Arabic, Syriac, Kaithi) | dropped | kept |
| all others (direction marks, BOM, soft hyphen, tags) | dropped | dropped |

Unicode names no equivalent encoding without the joiner for the second row, so the joiner cannot be mapped.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from konkanivani.base.console import count

MAX_NAMED = 8  # kinds of characters listed in a message
ZWNJ = "\u200c"
ZWJ = "\u200d"
JOINERS = frozenset((ZWNJ, ZWJ))
VISIBLE = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")

# Unicode Standard, chapter 12: rule R5 of Devanagari (eyelash ra) and the table of Malayalam chillus.
EQUIVALENT = {
    "\u0930\u094d\u200d": "\u0931\u094d",
    "\u0d23\u0d4d\u200d": "\u0d7a",
    "\u0d28\u0d4d\u200d": "\u0d7b",
    "\u0d30\u0d4d\u200d": "\u0d7c",
    "\u0d32\u0d4d\u200d": "\u0d7d",
    "\u0d33\u0d4d\u200d": "\u0d7e",
    "\u0d15\u0d4d\u200d": "\u0d7f",
}
_SEQUENCE = re.compile("|".join(EQUIVALENT))


def map_equivalent(text: str) -> str:
    """Replace each joiner sequence with the encoding that Unicode names as equivalent."""
    if ZWJ not in text:
        return text
    return _SEQUENCE.sub(lambda found: EQUIVALENT[found.group()], text)


def is_dropped_from_written(character: str) -> bool:
    """Return whether `character` is a format character that written text does not keep."""
    return unicodedata.category(character) == "Cf" and character not in JOINERS and character not in VISIBLE


def drop_unwritten(text: str) -> str:
    """Return `text` without format characters that have no effect on its letters."""
    if text.isascii():
        return text
    return "".join(character for character in text if not is_dropped_from_written(character))


# Category Cf without `VISIBLE`. Written out, because computing the ranges takes a sixth of a second at each start.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)


def find_removed(text: str) -> list[str]:
    """Return the invisible format characters that scored text drops, in their order; a mapped joiner is not dropped."""
    if text.isascii():
        return []
    return _find_invisible(map_equivalent(unicodedata.normalize("NFC", text)) if ZWJ in text else text)


def find_unwritten(text: str) -> list[str]:
    """Return the invisible format characters that even written text drops, in their order; joiners are kept."""
    return [] if text.isascii() else [character for character in _find_invisible(text) if character not in JOINERS]


def _find_invisible(text: str) -> list[str]:
    # Python's Unicode version may be older than the ranges, with fewer characters in Cf.
    return [character for character in _INVISIBLE.findall(text) if unicodedata.category(character) == "Cf"]


def count_mapped_joiners(text: str) -> int:
    """Return how many joiners of `text` are part of a sequence that is mapped to its equivalent encoding."""
    return text.count(ZWJ) - find_removed(text).count(ZWJ) if ZWJ in text else 0


@dataclass
class FormatCharacterCount:
    """Counts of invisible format characters removed from transcripts, and of the transcripts that contain any.

    `unwritten_texts` counts the transcripts with a character that even written text drops, that is, not a joiner.
    """

    characters: Counter[str] = field(default_factory=Counter)
    texts: int = 0
    unwritten_texts: int = 0

    def add(self, removed: Iterable[str]) -> None:
        """Count the characters that `find_removed` finds in one transcript."""
        found = Counter(removed)
        if found:
            self.characters += found
            self.texts += 1
            self.unwritten_texts += not JOINERS.issuperset(found)

    def add_all(self, other: "FormatCharacterCount") -> None:
        """Add the counts of other transcripts."""
        self.characters += other.characters
        self.texts += other.texts
        self.unwritten_texts += other.unwritten_texts

    def sentence(self, keeps_joiners: bool = False) -> str:
        """Return one sentence with the counts; empty if nothing is removed. Written text keeps its joiners."""
        left = {c: n for c, n in self.characters.items() if not (keeps_joiners and c in JOINERS)}
        if not left:
            return ""
        texts = self.unwritten_texts if keeps_joiners else self.texts
        codes = [f"U+{ord(character):04X}" for character in sorted(left)]
        named = ", ".join(codes[:MAX_NAMED]) + (f" and {len(codes) - MAX_NAMED} more" if codes[MAX_NAMED:] else "")
        removed = count(sum(left.values()), "invisible format character")
        return f"Removed {removed} from {count(texts, 'transcript')} ({named})."
