"""SVG pictures: a page in light and dark colours, shapes, and Devanagari text as outlines.

Outlines are drawn correctly on a machine without a Devanagari font. outlines.json holds the shaped outline of each word
that the pictures show; `benchmarks/drawings.py --font` adds words to it.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from konkanivani.errors import DataError

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
            command = f"benchmarks/drawings.py --font FONT.ttf --words {' '.join(missing)}"
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


# CSS class: fill and stroke in light mode, and in dark mode.
COLOURS = {
    "ground": ("fill:#ffffff;stroke:#d5dae1", "fill:#0f1420;stroke:#2b3446"),
    "card": ("fill:#f5f7fa;stroke:#dfe4ea", "fill:#182032;stroke:#2b3650"),
    "text": ("fill:#1b2430", "fill:#e8edf5"),
    "quiet": ("fill:#5b6675", "fill:#9aa7ba"),
    "line": ("fill:none;stroke:#8a95a5", "fill:none;stroke:#66738a"),
    "tip": ("fill:#8a95a5", "fill:#66738a"),
    "pale": ("fill:#d3dae4", "fill:#34415a"),
    "blue": ("fill:#2f6fde", "fill:#6aa3ff"),
    "blue_line": ("fill:none;stroke:#2f6fde", "fill:none;stroke:#6aa3ff"),
    "orange": ("fill:#e07b1a", "fill:#f5a14e"),
    "orange_line": ("fill:none;stroke:#e07b1a", "fill:none;stroke:#f5a14e"),
    "green": ("fill:#23906b", "fill:#4cc79d"),
    "red": ("fill:#c93434", "fill:#ff8585"),
}
FONT = "font-family:system-ui,-apple-system,'Segoe UI','Noto Sans',sans-serif"
MONOSPACED = "font-family:ui-monospace,'SF Mono',Consolas,'Liberation Mono',monospace"


def page(width: int, height: int, title: str, shapes: list[str]) -> str:
    """Return the text of an SVG file; screen readers read `title`."""
    light, dark = (
        "".join(f".{name}{{{colours[kind]}}}" for name, colours in COLOURS.items() if uses(shapes, name))
        for kind in (0, 1)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>text{{{FONT}}}.code{{{MONOSPACED}}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
            rectangle("ground", 0.5, 0.5, width - 1, height - 1, corner=12),
            *shapes,
            "</svg>\n",
        ]
    )


def uses(shapes: list[str], name: str) -> bool:
    """Return whether one of the shapes, or the page itself, has the CSS class `name`."""
    return name == "ground" or any(f'"{name}"' in shape or f'"{name} ' in shape for shape in shapes)


def rectangle(kind: str, x: float, y: float, width: float, height: float, corner: float = 2) -> str:
    """Return a rectangle with rounded corners."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:.4g}" rx="{corner:g}"/>'


def text(kind: str, x: float, y: float, said: str, size: int = 13, weight: int = 400, anchor: str = "start") -> str:
    """Return a line of text with its baseline at (x, y); Devanagari as outlines, in one weight."""
    if has_devanagari(said):
        return outlined_text(kind, x, y, said, size, anchor)
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(said)}</text>'
    )


def path(kind: str, drawn: str, width: float = 1.5) -> str:
    """Return a path with round ends and joins."""
    return f'<path class="{kind}" d="{drawn}" stroke-width="{width:g}" stroke-linecap="round" stroke-linejoin="round"/>'


def circle(kind: str, x: float, y: float, radius: float) -> str:
    """Return a circle."""
    return f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>'


def arrow(points: list[tuple[float, float]], kind: str = "line", tip_kind: str = "tip") -> str:
    """Return a line through the points with an arrowhead at the last one; its last part points right, down or up."""
    (before_x, before_y), (x, y) = points[-2:]
    right, down = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
    drawn = "M" + "L".join(f"{each_x:g} {each_y:g}" for each_x, each_y in [*points[:-1], (x - 4 * right, y - 4 * down)])
    back_x, back_y = x - 7 * right, y - 7 * down
    tip = f"M{x:g} {y:g}L{back_x - 4 * down:g} {back_y - 4 * right:g}L{back_x + 4 * down:g} {back_y + 4 * right:g}Z"
    return path(kind, drawn) + path(tip_kind, tip, 0)
