#!/usr/bin/env python3
"""Add the outlines of Devanagari words to outlines.json.

    python3 benchmarks/measuring/drawing/shape_words.py --font NotoSansDevanagari-Regular.ttf WORD ...

Needs `pip install fonttools uharfbuzz`, which nothing else here uses, and a font under a free licence: the file names
the font, its copyright and its licence. A different font replaces all outlines, so give all words then.
"""

import argparse
import json
from pathlib import Path

import uharfbuzz
from fontTools.pens.svgPathPen import SVGPathPen
from fontTools.pens.transformPen import TransformPen
from fontTools.ttLib import TTFont

OUTLINES = Path(__file__).with_name("outlines.json")
FULL_NAME, VERSION, COPYRIGHT, LICENSE, LICENSE_URL = 4, 5, 0, 13, 14  # name identifiers of the OpenType `name` table


class Shaper:
    """Shaper of words with HarfBuzz, which also draws their glyphs."""

    def __init__(self, path: Path) -> None:
        self.tables = TTFont(path)
        self.glyphs = self.tables.getGlyphSet()
        self.font = uharfbuzz.Font(uharfbuzz.Face(path.read_bytes()))

    def shape(self, text: str) -> dict[str, str | int]:
        """Return the outline of `text` as an SVG path in font units, the y axis pointing down, and its advance."""
        buffer = uharfbuzz.Buffer()
        buffer.add_str(text)
        buffer.guess_segment_properties()
        uharfbuzz.shape(self.font, buffer)
        pen = SVGPathPen(self.glyphs, ntos=lambda number: str(round(number)))
        advance = 0
        for glyph, position in zip(buffer.glyph_infos, buffer.glyph_positions, strict=True):
            if glyph.codepoint == 0:
                raise SystemExit(f"The font has no glyph for {text}. Give a font that covers Devanagari.")
            move = (1, 0, 0, -1, advance + position.x_offset, -position.y_offset)
            self.glyphs[self.tables.getGlyphName(glyph.codepoint)].draw(TransformPen(pen, move))
            advance += position.x_advance
        return {"path": pen.getCommands(), "advance": advance}

    def description(self) -> dict[str, str | int]:
        """Return the font's name, copyright, licence and metrics."""
        name = self.tables["name"].getDebugName
        return {
            "font": f"{name(FULL_NAME)}, {name(VERSION).split(';')[0]}",
            "copyright": name(COPYRIGHT),
            "license": f"{name(LICENSE)} {name(LICENSE_URL)}",
            "units_per_em": self.tables["head"].unitsPerEm,
            "space": self.shape(" ")["advance"],
        }


def main() -> None:
    """Read the command line and write outlines.json."""
    parser = argparse.ArgumentParser(description="Add the outlines of Devanagari words to outlines.json.")
    parser.add_argument("--font", type=Path, required=True, help="TrueType or OpenType font file")
    parser.add_argument("words", nargs="+", help="words to add")
    flags = parser.parse_args()
    shaper = Shaper(flags.font)
    described = shaper.description()
    stored = json.loads(OUTLINES.read_text(encoding="utf-8")) if OUTLINES.exists() else {}
    words = stored["words"] if stored.get("font") == described["font"] else {}
    words |= {word: shaper.shape(word) for text in flags.words for word in text.split()}
    outlines = {**described, "words": dict(sorted(words.items()))}
    OUTLINES.write_text(json.dumps(outlines, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
