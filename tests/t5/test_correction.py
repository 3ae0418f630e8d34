"""Correction of transcripts: artificial errors, limits on changed words, and the raw text of segments."""

import json
import random
from types import SimpleNamespace

import pytest

from konkanivani.cli.texts import correct
from konkanivani.data.text import TextLimits, normalize_text
from konkanivani.errors import KonkaniVaniError, UsageError
from konkanivani.inference.word_times import Segment, Transcript, Word, json_text
from konkanivani.recipe import correction
from konkanivani.recipe.correction import (
    Confusions,
    Corrector,
    corrected_words,
    corrupt,
    load_corrector,
    pairs_of,
    read_confusions,
    with_corrector,
)
from konkanivani.scoring.metrics import count_edits
from tests.t5.parts import LINES, vocabulary, write_folder
from tests.whisper.small_model import write_model


def words(*scored: tuple[str, float]) -> tuple[Word, ...]:
    return tuple(Word(text, float(n), n + 1.0, confidence) for n, (text, confidence) in enumerate(scored))


RECOGNIZED = words(("हांव", 0.99), ("गोयांत", 0.4), ("रावता", 0.95), ("न", 0.3))
CASES = {
    "case and punctuation of confident words": ("Hanv, goa.", words(("hanv", 1.0), ("goa", 1.0)), ["Hanv,", "goa."]),
    "unsure word is replaced": ("हांव गोंयांत रावता न", RECOGNIZED, ["हांव", "गोंयांत", "रावता", "न"]),
    "confident word is kept": ("हांव गोयांत रावतां न", RECOGNIZED, ["हांव", "गोयांत", "रावता", "न"]),
    "unsure word is removed": ("हांव गोयांत रावता", RECOGNIZED, ["हांव", "गोयांत", "रावता"]),
    "confident word is not removed": ("गोयांत रावता न", RECOGNIZED, ["हांव", "गोयांत", "रावता", "न"]),
    "unsure word is split": ("हांव गो यांत रावता न", RECOGNIZED, ["हांव", "गो", "यांत", "रावता", "न"]),
    "added sentence is dropped": ("हांव गोयांत रावता न आनी एक नवें वाक्य", RECOGNIZED, ["हांव", "गोयांत", "रावता", "न"]),
    "sentence in place of a word is dropped": (
        "हांव एक दोन तीन चार रावता न",
        RECOGNIZED,
        ["हांव", "गोयांत", "रावता", "न"],
    ),
    "change of a quarter of the letters": ("sokallin", words(("sakallim", 0.2)), ["sokallin"]),
    "change of more letters is dropped": ("sokollin", words(("sakallim", 0.2)), ["sakallim"]),
    "another word is dropped": ("हांव घरा रावता न", RECOGNIZED, ["हांव", "गोयांत", "रावता", "न"]),
    "empty correction": ("", RECOGNIZED, ["हांव", "गोयांत", "रावता", "न"]),
}


@pytest.mark.parametrize("case", CASES)
def test_correction_stays_within_limits(case):
    text, recognized, expected = CASES[case]
    actual = corrected_words(recognized, text, 0.9)
    assert [word.text for word in actual] == expected
    assert all(one.end <= other.start + 1e-9 for one, other in zip(actual, actual[1:], strict=False))
    assert actual[0].start == recognized[0].start and all(word.start < word.end for word in actual)


def test_negative_control_without_limit_confident_words_change():
    changed = corrected_words(RECOGNIZED, "हांव गोयांत रावतां न", 1.1)
    assert [word.text for word in changed] == ["हांव", "गोयांत", "रावतां", "न"]


def test_corruption_matches_error_rate_and_confusion_table():
    text = " ".join(LINES[:5])
    clean = normalize_text(text)
    assert corrupt(text, 0.0, Confusions(), random.Random(0)) == clean
    wrong = [corrupt(text, 0.3, Confusions(), random.Random(n)) for n in range(200)]
    edits = count_edits([clean] * 200, wrong)
    assert 0.25 < edits.rates().wer < 0.35 and len(set(wrong)) == 200
    assert corrupt(text, 0.3, Confusions(), random.Random(1)) == wrong[1]
    table = Confusions({"त": {"थ": 3}})
    confused = "".join(corrupt("त" * 9, 1.0, table, random.Random(n)) for n in range(50))
    assert "थ" in confused and "थ" not in "".join(wrong)


def test_confusions_are_read_from_hypotheses_file(tmp_path):
    rows = [{"reference": "तूं खंय रावता", "hypothesis": "थूं खंय रावता"}, {"reference": "एक", "hypothesis": "एकक"}]
    path = tmp_path / "a.hypotheses.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert {one: dict(item) for one, item in read_confusions(path).characters.items()} == {"त": {"थ": 1}}


class RecordingCorrector(Corrector):
    """Corrector that returns its inputs in capitals, and keeps them."""

    def _generate(self, texts: list[str]) -> list[str]:
        self.model.seen.extend(texts)
        return [text.upper() for text in texts]


def test_long_texts_are_corrected_in_windows_without_losing_words():
    model = SimpleNamespace(tokenizer=vocabulary(TextLimits(16, 16), is_bytes=True), seen=[])
    text = "one two three four five six seven eight nine ten eleven twelve"
    long_word = "a" * 40
    result = RecordingCorrector(model, None).correct([text, "", f"one {long_word} two", "short"])
    assert result == [text.upper(), "", f"ONE {long_word} TWO", "SHORT"]
    assert all(len(window) < 16 for window in model.seen) and len(model.seen) < 12
    whole = SimpleNamespace(tokenizer=vocabulary(TextLimits(100, 100), is_bytes=True), seen=[])
    assert RecordingCorrector(whole, None).correct([text]) == [text.upper()] and whole.seen == [
        text
    ]  # no window is needed


class AddingCorrector(RecordingCorrector):
    """Corrector that changes the first word and appends a sentence of its own."""

    def _generate(self, texts: list[str]) -> list[str]:
        return ["hanv" + text[4:] + " and a new sentence of words" for text in texts]


def test_corrected_line_has_no_added_sentence():
    model = SimpleNamespace(tokenizer=vocabulary(TextLimits(100, 100), is_bytes=True), seen=[])
    assert AddingCorrector(model, None).correct(["hamv ravta"]) == ["hanv ravta"]


def test_corrupted_pairs_are_written_and_lines_corrected(tmp_path, monkeypatch):
    monkeypatch.setattr("konkanivani.data.text.DEFAULT_LIMIT", 12)  # a random model never ends
    base, lines = write_folder(tmp_path / "base"), tmp_path / "lines.txt"
    lines.write_text("\n".join(LINES[:5]), encoding="utf-8")
    pairs = tmp_path / "pairs.jsonl"
    message = correct.main([str(lines), "--corrupt", "0.3", "--output", str(pairs)])
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    assert message.startswith(f"{pairs}: 5 pairs") and [row["text"] for row in rows] == list(LINES[:5])
    assert all(row["input"] == normalize_text(row["input"]) for row in rows)
    assert any(row["input"] != normalize_text(row["text"]) for row in rows)
    texts = correct.main([str(lines), "--model", str(base), "--device", "cpu"]).split("\n")
    corrector = load_corrector(str(base), "cpu")
    assert len(texts) == 5 and texts == corrector.correct(list(LINES[:5]))
    assert corrector.correct(["", LINES[0]]) == ["", texts[0]]
    alone = [corrector.correct([line])[0] for line in LINES[:5]]
    assert alone == texts  # independent of the batch
    # Line by line as the input, whatever Python counts as the end of a line.
    lines.write_bytes(f"{LINES[0]}\r\n\n{LINES[1]}\u2028{LINES[2]}\n".encode())
    assert correct.main([str(lines), "--model", str(base), "--device", "cpu"]).count("\n") == 2
    with pytest.raises(UsageError, match=r"pairs.jsonl already exists\. Choose another name\.$"):
        correct.main([str(lines), "--corrupt", "0.3", "--output", str(pairs)])


def test_copies_of_a_text_have_different_errors():
    texts = [LINES[0], LINES[1]]
    rows = list(pairs_of(texts, 0.5, Confusions(), 1, copies=20))
    assert [row["text"] for row in rows] == 20 * texts
    assert rows[:2] == list(pairs_of(texts, 0.5, Confusions(), 1))
    assert len({row["input"] for row in rows}) > 30  # a few have the same errors, or none


class UppercaseCorrector(Corrector):
    """Corrector that writes capitals, and a sentence of its own."""

    def __init__(self) -> None: ...

    def correct(self, texts: list[str]) -> list[str]:
        return [text.upper() + " and a new sentence" for text in texts]


def test_segments_are_corrected_and_keep_raw_text(monkeypatch):
    recognized = [Segment(words(("hello", 0.99), ("wrld", 0.5)))]
    monkeypatch.setattr(correction.Recognizer, "segments", lambda *_: iter(recognized))
    recognizer = correction.Recognizer(None, None, None)
    results = list(with_corrector(recognizer, UppercaseCorrector(), 0.9).segments("a.wav"))
    assert [segment.text for segment in results] == ["HELLO WRLD"]
    (corrected,) = json.loads(json_text(Transcript(tuple(results)), "segment", "a.wav"))["segments"]
    assert corrected["raw_text"] == "hello wrld" and (corrected["start"], corrected["end"]) == (0.0, 2.0)
    (plain,) = json.loads(json_text(Transcript(tuple(recognized)), "segment", "a.wav"))["segments"]
    assert "raw_text" not in plain


BAD = {
    "no input": ([], 2, "No input"),
    "model and corrupt": (["a.txt", "--model", "m", "--corrupt", "0.1"], 2, "either --model"),
    "neither model nor corrupt": (["a.txt"], 2, "either --model"),
    "error rate above 1": (["a.txt", "--corrupt", "1.5", "--output", "o"], 2, "between 0 and 1"),
    "no output": (["a.txt", "--corrupt", "0.5"], 2, "--output"),
    "zero copies": (["a.txt", "--corrupt", "0.5", "--output", "o", "--copies", "0"], 2, "--copies must be at least 1"),
    "copies without corrupt": (["a.txt", "--model", "m", "--copies", "2"], 2, "no effect without --corrupt"),
    "confusions without corrupt": (["a.txt", "--model", "m", "--confusions", "c"], 2, "no effect without --corrupt"),
    "missing file": (["missing.txt", "--corrupt", "0.5", "--output", "o"], 3, "missing.txt cannot be read"),
    "not a hypotheses file": (
        ["a.txt", "--corrupt", "0.5", "--output", "o", "--confusions", "a.txt"],
        3,
        "line 1: it has no",
    ),
    "name too long for the file system": (
        ["a.txt", "--corrupt", "0.5", "--output", "o" * 250],
        6,
        "^o+ could not be written: File name too long. Free disk space, or choose another file.$",
    ),
    "missing model": (["a.txt", "--model", "missing"], 2, "There is no folder missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_rejected_and_nothing_is_written(case, tmp_path, monkeypatch):
    arguments, code, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(KonkaniVaniError, match=message) as result:
        correct.main(arguments)
    assert result.value.exit_code == code and [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_whisper_folder_is_rejected_without_advice_for_another_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    write_model(tmp_path / "whisper")
    with pytest.raises(UsageError, match=r"^whisper is a model of speech. Give a checkpoint or folder of a T5 model.$"):
        correct.main(["a.txt", "--model", "whisper"])
