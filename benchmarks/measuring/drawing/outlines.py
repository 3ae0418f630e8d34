"""Devanagari text as SVG paths, which are drawn correctly on a machine without a Devanagari font.

outlines.json holds the shaped outline of each word that the pictures show; shape_words.py adds words to it.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from konkanivani.base.errors import DataError

OUTLINES = Path(__file__).with_name("outlines.json")
DEVANAGARI = re.compile("[\u0900-\u097f\ua8e0-\ua8ff]")
ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}  # share of the width that is left of x


@dataclass(frozen=True)
class Word:
    """Outline of a shaped word in font units, the y axis pointing down, and its advance width."""

    path: str
    advance: int


@dataclass(frozen=True)
class Outlines:
    """Outlines of words from one font."""

    units_per_em: int
    space: int
    words: dict[str, Word]

    def find(self, text: str) -> list[Word]:
        """Return the outlines of the words of `text`; raise DataError if one is missing."""
        missing = [word for word in text.split() if word not in self.words]
        if missing:
            command = f"benchmarks/measuring/drawing/shape_words.py --font FONT.ttf {' '.join(missing)}"
            raise DataError(f"{OUTLINES} has no outline of {', '.join(missing)}. Run {command}.")
        return [self.words[word] for word in text.split()]


@cache
def read_outlines() -> Outlines:
    """Return the outlines in outlines.json."""
    stored = json.loads(OUTLINES.read_text(encoding="utf-8"))
    words = {name: Word(**word) for name, word in stored["words"].items()}
    return Outlines(stored["units_per_em"], stored["space"], words)


def has_devanagari(text: str) -> bool:
    """Return whether `text` contains a Devanagari character."""
    return DEVANAGARI.search(text) is not None


def outlined_text(
    kind: str,
    x: float,
    y: float,
    text: str,
    size: float,
    anchor: str = "start",
    underlined: frozenset[str] = frozenset(),
) -> str:
    """Return an SVG group that draws `text` with its baseline at (x, y); `underlined` words are red with a line below.

    Args:
        size: Font size in pixels.
        anchor: The part of the text that is placed at x: "start", "middle" or "end".
    """
    outlines = read_outlines()
    words = outlines.find(text)
    scale = size / outlines.units_per_em
    width = sum(word.advance for word in words) + outlines.space * (len(words) - 1)
    left = x - ANCHORS[anchor] * width * scale
    shapes = []
    offset = 0
    for name, word in zip(text.split(), words, strict=True):
        is_underlined = name in underlined
        colour = ' class="red"' if is_underlined else ""
        shapes.append(f'<path{colour} transform="translate({offset})" d="{word.path}"/>')
        if is_underlined:
            shapes.append(f'<rect class="red" x="{offset}" y="130" width="{word.advance}" height="60"/>')
        offset += word.advance + outlines.space
    place = f"translate({left:.6g} {y:.6g}) scale({scale:.6g})"
    return f'<g class="{kind}" role="img" aria-label="{escape(text)}" transform="{place}">{"".join(shapes)}</g>'
