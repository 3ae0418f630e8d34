"""Format characters in transcripts: each is kept, mapped or dropped, and equal words give equal labels."""

import json
import sys
import unicodedata

import pytest

from konkanivani.data.text import normalize_text, written_text
from konkanivani.data.utterance import BadRow, parse_row

FORMAT = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"]
VISIBLE = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


def row(text: str, audio: str = "a.wav") -> bytes:
    return json.dumps({"audio_filepath": audio, "duration": 1.0, "text": text}).encode()


def test_every_format_character_leaves_the_scored_text_and_is_accepted_in_a_row() -> None:
    for character in FORMAT:
        text = f"ka{character}b"
        assert normalize_text(text) == "kab"
        assert parse_row(row(text), "/data", 1).text == text
        is_kept = ord(character) in VISIBLE or ord(character) in (0x200C, 0x200D)
        assert written_text(text) == (text if is_kept else "kab"), hex(ord(character))


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x85", "\ud800"])
def test_control_characters_and_surrogates_stay_refused(character: str) -> None:
    with pytest.raises(BadRow):
        parse_row(row(f"ka{character}b"), "/data", 1)


@pytest.mark.parametrize("character", ["\u200e", "\u202e", "\u2066"])
def test_direction_marks_stay_refused_in_a_path(character: str) -> None:
    with pytest.raises(BadRow):
        parse_row(row("kab", f"a{character}.wav"), "/data", 1)


def test_both_spellings_of_the_eyelash_ra_are_one_word() -> None:
    joined, letter, other = "दर\u094d\u200dयाचे", "द\u0931\u094dयाचे", "दर\u094dयाचे"
    assert normalize_text(joined) == normalize_text(letter) == letter
    assert written_text(joined) == written_text(letter) == letter
    assert normalize_text(other) == other != letter


@pytest.mark.parametrize(("consonant", "chillu"), list(zip("ണനരലളക", "ൺൻർൽൾൿ", strict=True)))
def test_both_encodings_of_a_chillu_are_one_letter(consonant: str, chillu: str) -> None:
    assert normalize_text(f"അ{consonant}\u0d4d\u200d") == normalize_text(f"അ{chillu}") == f"അ{chillu}"
    assert normalize_text(f"അ{consonant}\u0d4d") != f"അ{chillu}"
