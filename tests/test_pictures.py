"""Pictures draw Devanagari as outlines, so that no Devanagari font is needed."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.measuring.svg import has_devanagari, outlined_text, page, read_outlines, text
from konkanivani.errors import DataError
from tests.conftest import ROOT

PICTURES = sorted((ROOT / "docs").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
SENTENCE = "हांव बाजारांत वता"


def font_drawn_texts(picture: str) -> list[str]:
    """Return the Devanagari strings of an SVG file that are drawn with a font."""
    elements = ElementTree.fromstring(picture).iter(f"{SVG}text")
    drawn = ["".join(element.itertext()) for element in elements]
    return [text for text in drawn if has_devanagari(text)]


def outlined(picture: str) -> dict[str, list[str]]:
    """Return the paths drawn for each Devanagari string of an SVG file."""
    groups = ElementTree.fromstring(picture).iter(f"{SVG}g")
    return {group.attrib["aria-label"]: [path.attrib["d"] for path in group.iter(f"{SVG}path")] for group in groups}


def left_edge(drawn: str) -> float:
    match = re.search(r"translate\(([-\d.]+) ", drawn)
    assert match
    return float(match[1])


def test_pictures_with_devanagari_exist():
    assert {path.name for path in PICTURES} >= {"flow.svg", "subtitles.svg", "step_comparison.svg"}
    assert SENTENCE in outlined((ROOT / "docs" / "flow.svg").read_text(encoding="utf-8"))
    assert len(outlined((ROOT / "docs" / "subtitles.svg").read_text(encoding="utf-8"))) >= 10


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_devanagari_needs_no_font(path: Path):
    picture = path.read_text(encoding="utf-8")
    assert font_drawn_texts(picture) == []
    for label, paths in outlined(picture).items():
        assert paths == [word.path for word in read_outlines().find(label)]


def test_outlines_are_closed_paths():
    for name, word in read_outlines().words.items():
        assert has_devanagari(name) and word.advance > 0
        assert word.path.startswith("M") and word.path.endswith("Z")


def test_negative_control_text_drawn_with_a_font_is_found():
    drawn = f'<text class="text" x="0" y="0"><tspan>{SENTENCE}</tspan></text>'
    assert font_drawn_texts(page(10, 10, "picture", [drawn])) == [SENTENCE]


def test_word_without_outline_is_rejected():
    with pytest.raises(DataError, match="no outline of अआइ. Run .*drawings.py --font"):
        text("text", 0, 0, "हांव अआइ")


def test_anchors_place_the_text():
    start, middle, end = (
        left_edge(outlined_text("text", 100, 0, SENTENCE, 20, anchor)) for anchor in ("start", "middle", "end")
    )
    words = read_outlines().find(SENTENCE)
    width = (sum(word.advance for word in words) + 2 * read_outlines().space) * 20 / read_outlines().units_per_em
    assert (start, start - middle, start - end) == pytest.approx((100, width / 2, width), abs=1e-3)


def test_wrong_word_is_underlined():
    drawn = outlined_text("text", 0, 0, SENTENCE, 20, underlined=frozenset({"वता"}))
    assert drawn.count('class="red"') == 2 and "<rect" in drawn
    assert "red" not in outlined_text("text", 0, 0, SENTENCE, 20)
