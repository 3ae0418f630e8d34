"""Scoring: edit counts, confidence intervals, reports, and files that cannot be paired."""

import ctypes
import itertools
import json
import locale
import math
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import jiwer
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.cli import evaluate
from konkanivani.command_line import run_script as run_script_function
from konkanivani.console import display_width
from konkanivani.errors import DataError, KonkaniVaniError
from konkanivani.scoring.metrics import (
    Edit,
    align_words,
    block_numbers,
    choose_unit,
    count_edits,
    error_rates,
    percentiles,
    ratios,
    resample_sums,
)
from konkanivani.scoring.report import draw_score_page, score_json, score_lines
from konkanivani.scoring.score import (
    BUCKETS,
    NORMALIZERS,
    OtherSystem,
    ScoreReport,
    TextFiles,
    TextPairs,
    build_report,
    read_pairs,
    write_hypotheses,
)
from konkanivani.scoring.transcripts import MAX_CHARACTERS, ScoredText
from tests.conftest import ROOT, checked, run_script
from tests.html_parser import PageParts

SCRIPT = "training_scripts/evaluate_konkanivani_asr.py"
WORDS = ("एक", "दोन", "तीन", "घर", "आनी")
SENTENCES = st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join)

# Edits


def fewest_edits(reference: list[str], hypothesis: list[str]) -> int:
    """Return the Levenshtein distance by its recurrence."""
    row = list(range(len(hypothesis) + 1))
    for number, reference_item in enumerate(reference, start=1):
        above, row = row, [number]
        for place, hypothesis_item in enumerate(hypothesis, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (reference_item != hypothesis_item)))
    return row[-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=5))
def test_edit_counts_equal_levenshtein_distance_and_jiwer(pairs):
    references, hypotheses = map(list, zip(*pairs, strict=True))
    edits = count_edits(references, hypotheses)
    for (reference, hypothesis), words, characters in zip(pairs, edits.words, edits.characters, strict=True):
        for counts, one, other in (
            (words, reference.split(), hypothesis.split()),
            (characters, list(reference), list(hypothesis)),
        ):
            hits, substitutions, deletions, insertions = counts
            assert substitutions + deletions + insertions == fewest_edits(one, other)
            assert hits + substitutions + deletions == len(one)
            assert hits + substitutions + insertions == len(other)
    if any(references):
        assert edits.rates().wer == pytest.approx(jiwer.wer(references, hypotheses))
        assert edits.rates().cer == pytest.approx(jiwer.cer(references, hypotheses))
    changed = count_edits(references, [f"{text} उदक" for text in hypotheses])
    assert (changed.words[:, 2] < edits.words[:, 2]).any() or (changed.sums[:, 0] > edits.sums[:, 0]).any()


def test_edit_kinds_are_counted_over_many_blocks():
    references, hypotheses = ["एक दोन तीन", "घर", "", "आनी"], ["एक तीन", "घर घर", "एक", "दोन"]
    edits = count_edits(references * 600, hypotheses * 600)
    assert edits.words[-4:].tolist() == [[2, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 1], [0, 1, 0, 0]]
    rates = edits.rates()
    assert (rates.words.hits, rates.words.substitutions, rates.words.deletions) == (1800, 600, 600)
    assert (rates.words.insertions, rates.words.errors, rates.words.length) == (1200, 2400, 3000)
    assert rates.wer == 0.8
    assert edits.of(np.arange(2)).rates().words.errors == 2


def test_empty_reference_has_no_rate_and_only_insertions():
    rates = error_rates(["", " "], ["एक दोन", ""])
    assert math.isnan(rates.wer) and rates.words.insertions == 2 and rates.characters.insertions == 6
    assert math.isnan(error_rates([], []).wer)


def test_reference_words_are_aligned_with_hypothesis_words():
    [edits] = align_words(["हांव आतां घरा वता"], ["हांव घरा वता सांज"])
    assert [(edit.reference, edit.hypothesis, edit.kind) for edit in edits] == [
        ("हांव", "हांव", "hit"),
        ("आतां", "", "deletion"),
        ("घरा", "घरा", "hit"),
        ("वता", "वता", "hit"),
        ("", "सांज", "insertion"),
    ]
    counted = count_edits(["एक", "एक", "दोन", "घर"], ["दोन", "दोन", "एक", "घर"])
    assert counted.confusions("substitution", 5) == ((Edit("एक", "दोन"), 2), (Edit("दोन", "एक"), 1))
    assert counted.confusions("deletion", 5) == () and len(counted.of(np.arange(1)).confusions("substitution", 5)) == 1


# Confidence intervals


def binomial_quantile(count: int, share: float, quantile: float) -> int:
    """Return the smallest number of successes whose cumulative probability reaches the quantile."""
    cumulated = 0.0
    for successes in range(count + 1):
        cumulated += math.comb(count, successes) * share**successes * (1 - share) ** (count - successes)
        if cumulated >= quantile:
            return successes
    return count


def rate_interval(sums: np.ndarray, blocks: np.ndarray) -> tuple[float, float]:
    resampled = resample_sums(sums, blocks, resamples=40_000)
    interval = percentiles(ratios(resampled[:, 0], resampled[:, 1]))
    return interval.low, interval.high


def test_confidence_intervals_equal_binomial_quantiles():
    """With 50 of 200 one-word utterances wrong, a resample's sum is binomial; so with 40 speakers, 10 all wrong."""
    wrong = np.arange(200) % 4 == 0
    sums = np.stack([wrong, np.ones(200)], axis=1).astype(np.int64)
    low, high = rate_interval(sums, np.arange(200))
    expected = [binomial_quantile(200, 0.25, quantile) / 200 for quantile in (0.025, 0.975)]
    assert (low, high) == pytest.approx(expected, abs=0.0051)
    by_speaker = np.repeat(np.arange(40), 5)
    sums[:, 0] = by_speaker % 4 == 0
    expected_by_speaker = [binomial_quantile(40, 0.25, quantile) / 40 for quantile in (0.025, 0.975)]
    assert rate_interval(sums, by_speaker) == pytest.approx(expected_by_speaker, abs=0.0251)
    assert expected_by_speaker[1] - expected_by_speaker[0] > 1.8 * (expected[1] - expected[0])
    # Negative control: the same errors resampled by utterance give a much narrower interval.
    low, high = rate_interval(sums, np.arange(200))
    assert (low, high) != pytest.approx(expected_by_speaker, abs=0.0251)


def test_comparison_matches_enumeration_of_all_resamples():
    texts = [
        ScoredText(str(n), reference, "एक") for n, reference in enumerate(("एक", "एक दोन", "एक दोन तीन घर", "आनी"))
    ]
    other = ("दोन", "दोन घर", "एक दोन", None)
    ours, theirs, words = np.array([0, 1, 3]), np.array([1, 2, 2]), np.array([1, 2, 4])
    gains = np.array([(ours - theirs)[list(draw)].sum() for draw in itertools.product(range(3), repeat=3)])
    compared = report_on(texts, other=other).comparison
    assert (compared.utterances, compared.name) == (3, "other.txt")
    assert (compared.rates.wer, compared.other.wer) == (4 / 7, 5 / 7)
    assert compared.difference == pytest.approx((ours - theirs).sum() / words.sum())
    assert compared.fewer == pytest.approx(np.mean(gains < 0), abs=0.04)
    assert compared.more == pytest.approx(np.mean(gains > 0), abs=0.04)
    assert compared.fewer != pytest.approx(compared.more, abs=0.2)
    assert compared.interval.low < compared.difference < compared.interval.high
    swapped = [ScoredText(t.id, t.reference, h or "") for t, h in zip(texts, other, strict=True)]
    back = report_on(swapped, other=tuple(t.hypothesis for t in texts[:3]) + (None,)).comparison
    assert (back.fewer, back.more) == (compared.more, compared.fewer)
    assert back.interval.high == pytest.approx(-compared.interval.low)


def test_resampling_is_reproducible_and_keeps_the_number_of_blocks():
    amounts, blocks = np.array([[1, 2], [3, 4], [5, 6], [7, 8]]), np.array([0, 0, 1, 2])
    first = resample_sums(amounts, blocks, resamples=500)
    assert np.array_equal(first, resample_sums(amounts, blocks, resamples=500))
    assert not np.array_equal(first, resample_sums(amounts, blocks, resamples=500, seed=1))
    possible = {
        tuple(map(sum, zip(*draw, strict=True))) for draw in itertools.product([(4, 6), (5, 6), (7, 8)], repeat=3)
    }
    assert {tuple(map(int, row)) for row in first} == possible
    assert resample_sums(np.zeros((0, 2)), np.zeros(0, np.int64)).shape == (2000, 2)


def test_resampling_unit_is_speakers_if_there_are_enough():
    many, few = [f"s{n % 10}" for n in range(30)], ["a", "b", "a", ""]
    assert (choose_unit(many, "auto"), choose_unit(few, "auto")) == ("speakers", "utterances")
    assert (choose_unit(many, "utterances"), choose_unit(few, "speakers")) == ("utterances", "speakers")
    assert choose_unit(["a", "", "a"], "speakers") == "utterances"
    assert block_numbers(["a", "b", "a", "", ""], "speakers").tolist() == [0, 1, 0, 2, 3]
    assert block_numbers(few, "utterances").tolist() == [0, 1, 2, 3]


def test_results_without_variation_have_no_interval():
    right = report_on([ScoredText(str(n), "एक दोन", "एक दोन") for n in range(5)])
    assert math.isnan(right.wer_interval.low) and "WER  0.0 %: 0 errors in 10 words" in score_lines(right)
    one = report_on([ScoredText("a", "एक दोन", "एक")])
    assert math.isnan(one.wer_interval.high)


# Reports


def make_text_pairs(texts: list[ScoredText]) -> TextPairs:
    return TextPairs(tuple(texts), TextFiles("said.txt", "heard.txt"), "none")


def report_on(texts: list[ScoredText], worst: int = 10, other: tuple[str | None, ...] | None = None) -> ScoreReport:
    edits = count_edits([text.reference for text in texts], [text.hypothesis for text in texts])
    system = None if other is None else OtherSystem("other.txt", other)
    return build_report(make_text_pairs(texts), edits, "auto", worst, system)


def test_slices_sum_to_the_total_and_worst_utterances_are_first():
    texts = [
        ScoredText(f"u{n}", "एक दोन तीन", " ".join(WORDS[: n % 4]), f"s{n % 3}", seconds=n * 0.9, pattern="ab"[n % 2])
        for n in range(24)
    ]
    report = report_on(texts, worst=4)
    for slices in (report.speakers, report.durations, report.patterns):
        assert sum(part.rates.words.errors for part in slices) == report.rates.words.errors
        assert sum(part.utterances for part in slices) == 24
        assert sum(part.seconds for part in slices) == pytest.approx(report.seconds)
    assert [part.name for part in report.durations] == list(BUCKETS.values())
    rates = [part.rates.wer for part in report.speakers]
    assert rates == sorted(rates, reverse=True) and {part.name for part in report.speakers} == {"s0", "s1", "s2"}
    assert [item.rates.words.errors for item in report.worst] == [3, 3, 3, 3]
    assert [item.text.id for item in report.worst] == ["u0", "u4", "u8", "u12"]
    assert "too few (3) to be resampled" in score_lines(report)


def test_worst_utterances_are_sorted_by_word_then_character_errors():
    pairs = {
        "one far": ("शाळा", "उदकबाजार"),
        "two": ("एक घर", "एत घरा"),
        "one near": ("एक", "एत"),
        "none": ("एक", "एक"),
    }
    report = report_on([ScoredText(name, *texts) for name, texts in pairs.items()])
    assert [item.text.id for item in report.worst] == ["two", "one far", "one near"]


def test_unknown_durations_and_speakers_have_no_table():
    report = report_on([ScoredText("a", "एक", "दोन"), ScoredText("b", "एक", "एक")])
    assert (report.seconds, report.speakers, report.durations, report.patterns) == (None, (), (), ())
    assert "speaker" not in score_lines(report)


def test_text_report_lists_ten_speakers_and_json_lists_all():
    texts = [ScoredText(str(n), "एक दोन", "एक", f"s{n:02}") for n in range(30)] + [ScoredText("x", "एक", "दोन")]
    report = report_on(texts)
    text = score_lines(report)
    assert "the 10 with the highest WER of 31" in text and "resamples of speakers" in text and "(no label)" in text
    fields = json.loads(score_json(make_text_pairs(texts), report, None))
    assert len(fields["speakers"]) == 31 and fields["interval_unit"] == "speakers"
    page = draw_score_page(report)
    assert "16 more" in page and all(f"s{n:02}" in page for n in range(30))


def test_alignment_columns_account_for_zero_width_marks():
    text = ScoredText("a", "किंवा म्हूण बाजारांत 東京 वता सांज", "किंवा म्हणून बाजारात वता सांज आनी")
    lines = score_lines(report_on([text])).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("    reference  किंवा"))
    words = [re.findall(r"\S+\s*", line) for line in lines[start : start + 2]]
    starts = [list(itertools.accumulate(map(display_width, line), initial=4)) for line in words]
    assert starts[0][:-1] == starts[1][:-1] and len(starts[0]) == 9
    assert [word.strip() for word in words[0]][-1] == "***" and [word.strip() for word in words[1]][4] == "***"
    signs = {match.start(): match.group() for match in re.finditer(r"\S", lines[start + 2])}
    assert signs == {starts[0][2]: "S", starts[0][3]: "S", starts[0][4]: "D", starts[0][7]: "I"}
    # Negative control: columns counted in characters are not aligned.
    assert list(itertools.accumulate(map(len, words[0]))) != list(itertools.accumulate(map(len, words[1])))


def test_display_widths_equal_those_of_the_c_library():
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        wcwidth = ctypes.CDLL(None).wcwidth
        wcwidth.argtypes = [ctypes.c_wchar]
        for first, end in ((0x20, 0x7F), (0x900, 0xE00), (0x300, 0x370), (0x3041, 0x3100), (0x4E00, 0x5000)):
            for character in map(chr, range(first, end)):
                if unicodedata.category(character) != "Cn":
                    assert display_width(character) == wcwidth(character), hex(ord(character))
    except (locale.Error, AttributeError):
        pytest.skip("no C library with wcwidth and the locale C.UTF-8")
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert display_width("कि\u0902\u200da") == 3


def test_long_alignment_is_wrapped_and_truncated():
    words = " ".join(f"शब्द{n}" for n in range(300))
    lines = score_lines(report_on([ScoredText("a", words, words + " आनी")])).splitlines()
    assert max(map(display_width, lines)) < 120 and "    … and 101 words more" in lines


# Files


def write_files(
    folder: Path, references: str | bytes, hypotheses: str | bytes, suffix: str = ".txt"
) -> tuple[str, str]:
    paths = []
    for name, text in (("said", references), ("heard", hypotheses)):
        path = folder / f"{name}{suffix}"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        paths.append(str(path))
    return paths[0], paths[1]


def as_tuples(pairs: TextPairs) -> list[tuple[str, str, str]]:
    return [(text.id, text.reference, text.hypothesis) for text in pairs.texts]


def test_lines_are_paired_by_position_and_ids_by_name(tmp_path):
    lines = write_files(tmp_path, b"\xef\xbb\xbfa b\r\n\r\nc\n", "a\n\nc")
    assert as_tuples(read_pairs(*lines, "lines")) == [("line 1", "a b", "a"), ("line 2", "", ""), ("line 3", "c", "c")]
    ids = write_files(tmp_path, "u1\ta b\nu2 c d\n\n", "u2   c\nu1\n")
    assert as_tuples(read_pairs(*ids, "ids")) == [("u1", "a b", ""), ("u2", "c d", "  c")]


@pytest.mark.parametrize("duration", ["1" * 310, "-" + "1" * 310, "1e999", "NaN", "-1", "true", '"1"'])
def test_duration_other_than_a_finite_number_is_ignored(tmp_path, duration):
    path = tmp_path / "nemo.json"
    path.write_text(f'{{"audio_filepath": "a.wav", "text": "x", "pred_text": "y", "duration": {duration}}}\n')
    assert [text.seconds for text in read_pairs(None, str(path), "lines").texts] == [None]


def test_json_lines_fields_identify_reference_and_hypothesis(tmp_path):
    rows = [
        {"audio_filepath": "a.wav", "text": "x", "pred_text": "y", "speaker": 7, "duration": 1.5, "offset": 2},
        {"audio_filepath": "a.wav", "text": "x", "pred_text": "z", "duration": "long"},
    ]
    path = tmp_path / "nemo.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    pairs = read_pairs(None, str(path), "lines")
    assert as_tuples(pairs) == [("a.wav@2", "x", "y"), ("a.wav", "x", "z")]
    assert [(text.speaker, text.seconds) for text in pairs.texts] == [("7", 1.5), ("", None)]
    plain = tmp_path / "heard.txt"
    plain.write_text("p\nq\n")
    assert as_tuples(read_pairs(str(path), str(plain), "lines")) == [("a.wav@2", "x", "p"), ("a.wav", "x", "q")]


BAD_FILES = {
    "fewer lines": ("a\nb\n", "a\n", "has 2 transcripts and .*heard.txt 1, so they cannot be paired"),
    "empty": ("", "a\n", "said.txt is empty"),
    "not UTF-8": ("a\nb\n", b"a\n\xff\n", "heard.txt, line 2 is not UTF-8"),
    "UTF-16": ("a\n", "a\n".encode("utf-16"), "heard.txt, line 1 is not UTF-8"),
    "too long": ("a\n", "a" * (MAX_CHARACTERS + 1), "heard.txt, line 1 has more than 200,000 characters"),
    "far too long": ("a\n", "a" * 9 * MAX_CHARACTERS, "heard.txt, line 1 has more than 200,000 characters"),
}
BAD_IDS = {
    "missing": ("a 1\nb 2\nc 3\n", "b 2\n", "heard.txt has no transcript of 2 of the 3 utterances of .*: a, c"),
    "unexpected": ("a 1\n", "a 1\n\u202eb 2\n", r"said.txt has no transcript of 1 of the 2 .*⟨U\+202E⟩b"),
    "repeated": ("a 1\n", "a 1\na 2\n", "heard.txt has several transcripts of a"),
}
BAD_JSON = {
    "not JSON": ('{"id": "a", "text": "x"}', "{", "heard.jsonl, line 1 is not a line of JSON"),
    "deeply nested": ('{"id": "a", "text": "x"}', "[" * 100_000, "heard.jsonl, line 1 is not a line of JSON"),
    "not an object": ('{"id": "a", "text": "x"}', "[1]", "heard.jsonl, line 1 is not a JSON object"),
    "no text": ('{"id": "a", "text": "x"}', '{"id": "a", "reference": "x"}', "line 1 has no hypothesis"),
    "number as text": ('{"id": "a", "text": 5}', '{"id": "a", "text": "x"}', "line 1 has no reference"),
    "unpaired surrogate": (
        '{"id": "a", "text": "x"}',
        '{"id": "a", "text": "\\ud800"}',
        "contains an unpaired surrogate",
    ),
    "id in some rows only": (
        '{"id": "a", "text": "x"}\n{"text": "y"}',
        '{"text": "x"}',
        "1 row has an id .* row 2, have none",
    ),
}


@pytest.mark.parametrize(
    ("text_format", "suffix", "case"),
    [
        *(("lines", ".txt", case) for case in BAD_FILES.values()),
        *(("ids", ".txt", case) for case in BAD_IDS.values()),
        *(("lines", ".jsonl", case) for case in BAD_JSON.values()),
    ],
    ids=[*BAD_FILES, *BAD_IDS, *BAD_JSON],
)
def test_unusable_files_raise_data_error_with_reason(tmp_path, text_format, suffix, case):
    with pytest.raises(DataError, match=case[2]):
        read_pairs(*write_files(tmp_path, *case[:2], suffix), text_format)


def test_lines_starting_with_ids_are_noted(tmp_path):
    assert read_pairs(*write_files(tmp_path, "u1 a\nu2 b\nu3 c\n", "u1 a\nu2 x\nu3\n"), "lines").notes
    assert not read_pairs(*write_files(tmp_path, "a b\nb b\nc c\n", "a b\nb b\nc c\n"), "lines").notes


def test_normalisation_applies_to_both_sides_and_is_optional():
    text = ScoredText("a", "एक, ५ ABC", "एक 5 abc।")
    expected = {"konkanivani": ("एक ५ abc", "एक 5 abc"), "spell": ("एक पांच abc", "एक पांच abc")}
    expected["none"] = ("एक, ५ ABC", "एक 5 abc।")
    for name, pair in expected.items():
        [normal] = TextPairs((text,), TextFiles("a", "b"), name).normalized().texts
        assert (normal.reference, normal.hypothesis) == pair
    assert NORMALIZERS["none"][0]("  a \t b\n") == "a b"


def test_written_hypotheses_read_back_equal(tmp_path):
    texts = [ScoredText(f"u{n}", "एक दोन तीन", " ".join(WORDS[:n]), "s", n + 0.5, "seen") for n in range(4)]
    edits = count_edits([text.reference for text in texts], [text.hypothesis for text in texts])
    write_hypotheses(tmp_path / "out.jsonl", texts, edits)
    again = read_pairs(None, str(tmp_path / "out.jsonl"), "lines")
    assert list(again.texts) == texts
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(row["word_errors"] for row in rows) == edits.rates().words.errors
    assert list(tmp_path.glob("*.partial")) == []


# The page


HOSTILE = ("<script>alert(1)</script>", "\u202eउलट", '"><img src=x onerror=1>', "\x00\x1b[31m", "&lt;b&gt;")
HOSTILE += ("a\x85b\u2028",)


def test_html_page_is_self_contained_and_escapes_markup():
    texts = [ScoredText(f"{n}{text}", f"{text} एक", f"एक {text}x", text, 1.0, text) for n, text in enumerate(HOSTILE)]
    texts += [ScoredText("", "", "")]
    page = draw_score_page(report_on(texts, other=tuple(HOSTILE) + (None,)))
    parts = PageParts(page)
    assert not parts.tags & {"script", "link", "img", "iframe", "object", "a"} and parts.opened == []
    assert not {name for name in parts.attributes if name in ("src", "href") or name.startswith("on")}
    assert not re.search(r"https?:|@import|url\(", page)
    assert "&lt;script&gt;alert(1)" in page and not {"\u202e", "\x1b", "\x00", "\u2028"} & set(page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert all(picture["aria-label"].startswith("WER ") for picture in parts.pictures) and parts.pictures
    for sign, kind in (("S", "substitution"), ("D", "deletion"), ("I", "insertion")):
        assert re.search(rf'<span class="{kind}">.*?<b>{sign}</b></span>', page)
        assert f'class="key {kind}"' in page


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=60) | st.binary(max_size=40),
    st.text(max_size=60) | st.binary(max_size=40),
    st.sampled_from(["lines", "ids"]),
    st.sampled_from([".txt", ".jsonl"]),
    st.sampled_from(["konkanivani", "spell", "none"]),
)
def test_any_two_files_give_a_report_or_a_known_error(tmp_path_factory, one, other, text_format, suffix, normalizer):
    folder = tmp_path_factory.mktemp("any")
    if suffix == ".jsonl":
        one, other = (json.dumps({"text": str(text), "speaker": str(text)}) for text in (one, other))
    one, other = (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in (one, other))
    try:
        raw = read_pairs(*write_files(folder, one, other, suffix), text_format)
    except KonkaniVaniError:
        return
    pairs = TextPairs(raw.texts, raw.source, normalizer, raw.notes).normalized()
    report = report_on(list(pairs.texts))
    assert score_lines(report).encode("utf-8") and json.loads(score_json(pairs, report, None))
    assert PageParts(draw_score_page(report)).opened == []


def test_zero_is_an_id_and_a_speaker(tmp_path):
    rows = "".join(json.dumps({"id": n, "text": "एक", "speaker": n}) + "\n" for n in range(3))
    pairs = read_pairs(*write_files(tmp_path, rows, rows, ".jsonl"), "lines")
    assert [(text.id, text.speaker) for text in pairs.texts] == [("0", "0"), ("1", "1"), ("2", "2")]


# The script


def test_comparison_is_read_before_recognition(tmp_path, monkeypatch):
    recognized = []
    monkeypatch.setattr(evaluate, "recognize", lambda *_: recognized.append(1))
    checkpoint, manifest = tmp_path / "checkpoint.pt", tmp_path / "test.jsonl"
    for path in (checkpoint, manifest):
        path.write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="missing.jsonl"):
        evaluate.main(
            ["--checkpoint", str(checkpoint), "--manifest", str(manifest), "--compare", str(tmp_path / "missing.jsonl")]
        )
    assert not recognized


def test_script_scores_two_files_without_torch(tmp_path, capsys, monkeypatch):
    references, hypotheses = write_files(tmp_path, "हांव घरा वता\nएक दोन\n", "हांव घरा येता\nएक दोन तीन\n")
    page, out = tmp_path / "score.html", tmp_path / "out.jsonl"
    done = run_script(
        SCRIPT, "--references", references, "--hypotheses", hypotheses, "--html", str(page), "--output", str(out)
    )
    assert done.returncode == 0, done.stderr
    assert "WER  40.0 % (95 %: 33.3 to 50.0): 2 errors in 5 words: 1 substituted, 0 deleted, 1 inserted" in done.stdout
    assert "वता → येता (1)" in done.stdout and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = run_script(SCRIPT, "--hypotheses", str(out), "--compare", str(out), "--json")
    summary = json.loads(done.stdout)
    assert (summary["wer"], summary["word_insertions"], summary["utterances"]) == (0.4, 1, 2)
    assert summary["comparison"]["difference"] == 0 and summary["comparison"]["difference_interval"] == [None, None]
    program = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'training_scripts')!r})\n"
        f"sys.argv = ['evaluate', '--references', {references!r}, '--hypotheses', {hypotheses!r}]\n"
        f"try: runpy.run_path({str(ROOT / SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jiwer' in sys.modules and 'torch' not in sys.modules\n"
    )
    done = checked(subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True))


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        ((), 2, "Give --checkpoint and --manifest"),
        (("--references", "{references}"), 2, "Give --checkpoint and --manifest"),
        (("--hypotheses", "{hypotheses}"), 2, "--hypotheses alone if"),
        (
            ("--checkpoint", "x.pt", "--manifest", "y", "--references", "{references}"),
            2,
            "Give --checkpoint and --manifest",
        ),
        (
            ("--references", "{references}", "--hypotheses", "{hypotheses}", "--output", "{references}"),
            2,
            "would be overwritten",
        ),
        (
            ("--references", "{references}", "--hypotheses", "{hypotheses}", "--html", "{references}"),
            2,
            "would overwrite a file",
        ),
        (
            (
                *("--references", "{references}", "--hypotheses", "{hypotheses}"),
                *("--html", "{references}.x", "--output", "{references}.x"),
            ),
            2,
            "are the same file",
        ),
        (("--references", "{references}", "--hypotheses", "{hypotheses}", "--worst", "-1"), 2, "at least 0"),
        (
            ("--references", "{references}", "--hypotheses", "{hypotheses}", "--html", "/nowhere/a.html"),
            6,
            "cannot be written",
        ),
        (("--references", "{references}", "--hypotheses", "/nowhere/a.txt"), 3, "cannot be read"),
    ],
)
def test_invalid_flags_give_exit_code_and_message(tmp_path, monkeypatch, capsys, flags, exit_code, message):
    """Call the function of the script in this process, which saves one second per case."""
    one, other = write_files(tmp_path, "a\n", "a\n")
    given = evaluate.Flags(
        **{
            name.removeprefix("--"): int(value) if name == "--worst" else value.format(references=one, hypotheses=other)
            for name, value in zip(flags[::2], flags[1::2], strict=True)
        }
    )
    assert run_script_function(lambda: evaluate.score(given)) == exit_code
    assert message in capsys.readouterr().err
    assert Path(one).read_text() == "a\n"


def test_simulated_coverage_is_too_small_for_two_speakers():
    flags = ("--trials", "60", "--utterances", "40", "--speakers", "2", "20", "--spreads", "0")
    done = checked(run_script("benchmarks/accuracy.py", "intervals", *flags))
    [of_two, of_twenty] = [list(map(float, re.findall(r"([\d.]+)%", line))) for line in done.stdout.splitlines()[1:]]
    assert of_two[1] < 75 < of_twenty[1] and min(of_two[0], of_twenty[0]) > 80
