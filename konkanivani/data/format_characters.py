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
