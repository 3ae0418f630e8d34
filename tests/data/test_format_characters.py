"""Format characters in transcripts are kept, mapped or removed, and equal words give equal labels."""

import csv
import json
import sys
import unicodedata
from pathlib import Path

import pytest
import soundfile

from konkanivani.corpora.statistics import CharacterCount
from konkanivani.data.index import BadRow, open_index, parse_row
from konkanivani.data.text import (
    JOINERS,
    FormatCharacterCount,
    count_mapped_joiners,
    find_removed,
    find_unwritten,
    normalize_text,
    written_text,
)
from tests.conftest import TINY_MODEL, WORDS, checked, run_folders, run_script, run_trainer, speak

FORMAT = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"]
VISIBLE = {0x600, 0x601, 0x602, 0x603, 0x604, 0x605, 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}


def row(text: str, audio: str = "a.wav") -> bytes:
    return json.dumps({"audio_filepath": audio, "duration": 1.0, "text": text}).encode()


def test_format_characters_are_accepted_in_rows_and_removed_for_scoring() -> None:
    for character in FORMAT:
        text = f"ka{character}b"
        assert normalize_text(text) == "kab"
        assert parse_row(row(text), "/data", 1).text == text
        is_kept = ord(character) in VISIBLE or ord(character) in (0x200C, 0x200D)
        assert written_text(text) == (text if is_kept else "kab"), hex(ord(character))


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x85", "\ud800"])
def test_control_characters_and_surrogates_are_rejected(character: str) -> None:
    with pytest.raises(BadRow):
        parse_row(row(f"ka{character}b"), "/data", 1)


@pytest.mark.parametrize("character", ["\u200e", "\u202e", "\u2066"])
def test_direction_marks_in_audio_path_are_rejected(character: str) -> None:
    with pytest.raises(BadRow):
        parse_row(row("kab", f"a{character}.wav"), "/data", 1)


def test_both_spellings_of_eyelash_ra_normalize_to_one_word() -> None:
    joined, letter, other = "दर\u094d\u200dयाचे", "द\u0931\u094dयाचे", "दर\u094dयाचे"
    assert normalize_text(joined) == normalize_text(letter) == letter
    assert written_text(joined) == written_text(letter) == letter
    assert normalize_text(other) == other != letter


@pytest.mark.parametrize(("consonant", "chillu"), list(zip("ണനരലളക", "ൺൻർൽൾൿ", strict=True)))
def test_both_encodings_of_chillu_normalize_to_one_letter(consonant: str, chillu: str) -> None:
    assert normalize_text(f"അ{consonant}\u0d4d\u200d") == normalize_text(f"അ{chillu}") == f"അ{chillu}"
    assert normalize_text(f"അ{consonant}\u0d4d") != f"അ{chillu}"


# Counts of removed characters

EYELASH, LETTER, OTHER = "दर\u094d\u200dयाचे", "द\u0931\u094dयाचे", "दर\u094dयाचे"


def test_find_removed_finds_exactly_the_removed_characters() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        is_invisible = unicodedata.category(character) == "Cf" and code not in VISIBLE
        assert find_removed(f"क{character}") == ([character] if is_invisible else []), hex(code)
        is_unwritten = is_invisible and character not in JOINERS
        assert find_unwritten(f"क{character}") == ([character] if is_unwritten else []), hex(code)


def test_mapped_joiner_is_not_counted_as_removed() -> None:
    assert find_removed(EYELASH) == find_removed(OTHER) == [] and count_mapped_joiners(EYELASH) == 1
    assert find_removed(f"{EYELASH} क\u200dक") == ["\u200d"] and count_mapped_joiners(f"{EYELASH} क\u200dक") == 1


def count_removed(*texts: str) -> FormatCharacterCount:
    counts = FormatCharacterCount()
    for text in texts:
        counts.add(find_removed(text))
    return counts


def test_removal_message_counts_characters_and_transcripts() -> None:
    counts = count_removed("\ufeffघर\u200e\u200e", "क\u200dक", EYELASH, "घर")
    expected = "Removed 4 invisible format characters from 2 transcripts (U+200D, U+200E, U+FEFF)."
    assert counts.sentence() == expected
    assert counts.sentence(keeps_joiners=True) == (
        "Removed 3 invisible format characters from 1 transcript (U+200E, U+FEFF)."
    )
    assert count_removed("घर", EYELASH, "").sentence() == "" == count_removed("क\u200dक").sentence(keeps_joiners=True)


def write_recordings(folder: Path, texts: list[str]) -> list[dict[str, object]]:
    """Write a recording for each text and return the rows of the manifest."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number, text in enumerate(texts):
        samples = speak([WORDS[number % 10], WORDS[number // 10]])
        soundfile.write(folder / f"{number}.wav", samples, 16_000)
        rows.append({"audio_filepath": f"{number}.wav", "duration": len(samples) / 16_000, "text": text})
    return rows


def write_manifest_with_texts(folder: Path, texts: list[str], name: str = "train.jsonl") -> Path:
    rows = write_recordings(folder, texts)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / name


TEXTS = ["\ufeffघर\u200e", "उदक\u200e\u200e", EYELASH, "क\u200dक", *WORDS]
LINE = "Removed 5 invisible format characters from 3 transcripts (U+200D, U+200E, U+FEFF)."
UNWRITTEN_LINE = "Removed 4 invisible format characters from 2 transcripts (U+200E, U+FEFF)."


@pytest.mark.parametrize("small_bytes", [0, 2**20])
def test_index_stores_format_character_counts(
    small_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("konkanivani.data.index.SMALL_BYTES", small_bytes)
    monkeypatch.setattr("konkanivani.data.index.BLOCK_BYTES", 200)  # several blocks
    manifest = write_manifest_with_texts(tmp_path / "corpus", TEXTS)
    for _ in range(2):  # created, then read if it is stored
        assert open_index(manifest).format_characters.sentence() == LINE
    assert (tmp_path / "corpus" / "train.jsonl.index").exists() == (small_bytes == 0)


def removal_lines(stdout: str) -> list[str]:
    return [line.strip() for line in stdout.splitlines() if "format character" in line]


@pytest.mark.parametrize(("texts", "lines"), [(TEXTS, [LINE]), ([EYELASH, *WORDS], [])])
def test_training_reports_removed_characters_once(texts: list[str], lines: list[str], tmp_path: Path) -> None:
    train = str(write_manifest_with_texts(tmp_path / "corpus", texts))
    valid = str(write_manifest_with_texts(tmp_path / "corpus", list(WORDS), "valid.jsonl"))
    flags = ("--train_manifest", train, "--valid_manifest", valid, "--max_steps", "1", "--num_workers", "0")
    done = checked(run_trainer(*TINY_MODEL, *flags, *run_folders(tmp_path)))
    assert removal_lines(done.stdout) == lines


@pytest.mark.parametrize(("texts", "line"), [(TEXTS, UNWRITTEN_LINE), ([EYELASH, *WORDS, "क\u200dक"], "")])
def test_prepare_data_removes_unwritten_characters_and_reports_once(
    texts: list[str], line: str, tmp_path: Path
) -> None:
    rows = write_recordings(tmp_path / "corpus", texts)
    with open(tmp_path / "corpus" / "all.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("audio", "text"), *((row["audio_filepath"], row["text"]) for row in rows)])
    flags = ("--format", "csv", "--source", str(tmp_path / "corpus"), "--table", "all.csv", "--valid_share", "0")
    output = tmp_path / "out"
    done = checked(run_script("training_scripts/prepare_data.py", *flags, "--test_share", "0", "--output", str(output)))
    assert removal_lines(done.stdout) == ([line] if line else [])
    assert json.loads((output / "report.json").read_text(encoding="utf-8"))["removed_characters"] == line
    written = (output / "train.jsonl").read_text(encoding="utf-8").splitlines()
    expected = ["".join(c for c in text if c not in "\u200e\ufeff") for text in texts]
    assert [json.loads(row)["text"] for row in written] == expected  # joiners stay: Whisper emits them


def test_inspection_distinguishes_mapped_and_removed_joiners() -> None:
    for texts, removed, mapped, marks in (
        ([EYELASH, EYELASH], 0, 2, ("joiner", "mapped")),
        ([EYELASH, "क\u200dक"], 1, 1, ("joiner", "mapped", "removed")),
        (["क\u200dक"], 1, 0, ("joiner", "removed")),
    ):
        counts = CharacterCount()
        for row_number, text in enumerate(texts, start=1):
            counts.add(text, normalize_text(text), row_number)
        health = counts.health()
        assert (health.changes.joiners_removed, health.changes.joiners_mapped) == (removed, mapped)
        assert next(c.marks for c in health.inventory if c.code == 0x200D) == marks


# Scores

EVALUATE = "training_scripts/evaluate_konkanivani_asr.py"


def score(tmp_path: Path, reference: str, hypothesis: str) -> dict[str, float]:
    for name, text in (("references.txt", reference), ("hypotheses.txt", hypothesis)):
        (tmp_path / name).write_text(f"{text} घर\n", encoding="utf-8")
    files = ("--references", str(tmp_path / "references.txt"), "--hypotheses", str(tmp_path / "hypotheses.txt"))
    return json.loads(checked(run_script(EVALUATE, *files, "--json")).stdout.splitlines()[-1])


def test_both_spellings_of_eyelash_ra_score_as_the_same_word(tmp_path: Path) -> None:
    for reference, hypothesis in ((EYELASH, LETTER), (LETTER, EYELASH), (EYELASH, EYELASH)):
        scored = score(tmp_path, reference, hypothesis)
        assert (scored["wer"], scored["cer"]) == (0, 0)
    for spelling in (EYELASH, LETTER):
        assert score(tmp_path, spelling, OTHER)["wer"] == score(tmp_path, OTHER, spelling)["wer"] == 0.5
