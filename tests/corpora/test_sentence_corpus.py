"""Corpus of given sentences: no duplicates, no leaks between splits, rejected lines with reasons."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import soundfile

from konkanivani.corpora.builtin import (
    TEST_VOICES,
    TRAIN_VOICES,
    VALID_VOICES,
    SplitSizes,
    build_builtin_corpus,
    plan_corpus,
)
from konkanivani.corpora.sentences import build_sentence_corpus, plan_splits, read_sentences
from konkanivani.corpora.synthesis import SpeakingStyle, SpeechSynthesizer, UnspeakableError
from konkanivani.data.manifest import Utterance, read_manifest
from konkanivani.data.text import normalize_text
from konkanivani.errors import DataError, UsageError
from tests.conftest import TINY_MODEL, checked, run_folders, run_in_process, run_trainer
from tests.corpora.test_builtin_corpus import file_digests, kill_during_synthesis

SCRIPT = "training_scripts/prepare_builtin_corpus.py"
SPLITS = (("train", TRAIN_VOICES), ("valid", VALID_VOICES), ("test", TEST_VOICES))
WORDS = "हांव बाजारांत वता आनी उदक हाडटां "
LONG = " ".join([WORDS] * 40)
STUDENTS = (
    "हांव घरा वतां",
    "",
    "Hello world, he Konkani Latin lipint",
    "हांव घरा वतां।",  # equal to the first after normalisation
    "!!! ... ---",
    "\N{DEVANAGARI VOWEL SIGN II}",
    LONG,
    "ny\x00ul घर",
    "  आवय   शाळेंत  गेली ",
    "तूं खंय वता?",
    "माका १२ जाय",
    "\N{ZERO WIDTH JOINER}",
)


@pytest.fixture
def student_file(tmp_path: Path, synthesizer: SpeechSynthesizer) -> str:
    """Write a text file with byte order mark, CRLF line ends, and valid and invalid lines."""
    path = tmp_path / "students.txt"
    path.write_bytes(("\ufeff" + "\r\n".join(STUDENTS) + "\r\n").encode())
    return str(path)


def write_sentences(path: Path, count: int = 12) -> str:
    """Write a file of `count` different sentences of the built-in corpus."""
    sentences = plan_corpus(SplitSizes(train=90, valid=3, test=9)).train[:count]
    path.write_text("".join(f"{sentence.text}\n" for sentence in sentences), encoding="utf-8")
    return str(path)


def utterances(directory: Path, split: str) -> tuple[Utterance, ...]:
    return list(read_manifest(directory / f"{split}.jsonl"))


# Reading and splitting


def test_blank_and_repeated_lines_are_dropped_and_counted(tmp_path):
    (tmp_path / "one.txt").write_text("एक\n\n  \nदोन\nएक\n", encoding="utf-8")
    (tmp_path / "two.txt").write_bytes("\ufeffदोन !\r\n तीन  चार\r\n".encode())
    sentences = read_sentences([str(tmp_path / "one.txt"), str(tmp_path / "two.txt")])
    assert [(Path(line.file).name, line.row, line.text) for line in sentences.used] == [
        ("one.txt", 1, "एक"),
        ("one.txt", 4, "दोन"),
        ("two.txt", 2, "तीन चार"),
    ]
    assert (sentences.blank, sentences.repeated, sentences.left_out) == (2, 2, ())


@pytest.mark.parametrize("count", [3, 4, 20, 750])
def test_splits_partition_sentences_with_separate_voices(count):
    sentences = [f"वाक्य {number}" for number in range(count)]
    plan = plan_splits(sentences, None, None)
    planned = [sentence.text for split in (plan.train, plan.valid, plan.test) for sentence in split]
    assert sorted(planned) == sorted(sentences)
    assert len(plan.valid) == max(1, round(0.05 * count)) and len(plan.test) == max(1, round(0.1 * count))
    for name, voices in SPLITS:
        assert {sentence.style.voice for sentence in getattr(plan, name)} <= set(voices)
    assert plan == plan_splits(sentences, None, None)
    if count == 750:  # test sentences come from the whole file
        places = [sentences.index(sentence.text) for sentence in plan.test]
        assert min(places) < 20 and max(places) > 730


def test_impossible_split_size_raises_usage_error():
    assert len(plan_splits(["एक", "दोन", "तीन", "चार"], 2, 1).valid) == 2
    for valid, test in ((None, None), (0, 1), (1, 0), (1, 1), (-1, 1)):
        with pytest.raises(UsageError, match="cannot be split"):
            plan_splits(["एक", "दोन"], valid, test)


@pytest.mark.parametrize(
    "content, message",
    [
        ("एक\nदोन ".encode() + b"caf\xe9 \xff\n", "line 2: not UTF-8 at byte 14 of the line"),
        ("एक\n".encode("utf-16"), "line 1: not UTF-8"),
        (b"", "No sentence found in"),
        (b"\n\n...\n", "No sentence found in"),
    ],
)
def test_non_utf8_or_empty_file_raises_data_error(content, message, tmp_path):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_sentences([str(tmp_path / "bad.txt")])
    assert message in str(caught.value) and "bad.txt" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_or_folder_raises_data_error(tmp_path):
    for path in (tmp_path / "gone.txt", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_sentences([str(path)])


# Speech synthesis


def test_speech_longer_than_30_s_is_rejected(synthesizer):
    style = SpeakingStyle("mr", 130)
    for text in (LONG, LONG * 500):  # without a limit the second one takes hours
        with pytest.raises(UnspeakableError, match="longer than 30 s") as caught:
            synthesizer.speak(text, style)
        assert caught.value.text == text and len(str(caught.value)) < 200
    assert synthesizer.speak(WORDS * 5, style)


def test_every_line_of_student_file_is_synthesised_or_counted(student_file, tmp_path):
    report = build_sentence_corpus([student_file], tmp_path / "corpus")
    assert report.is_new and (report.blank, report.repeated) == (1, 1)
    assert [(line.row, line.reason) for line in report.left_out] == [
        (5, "it is empty after normalisation"),
        (6, "it contains no letter"),
        (7, "its speech is longer than 30 s"),
        (8, "it contains a control character"),
        (12, "it is empty after normalisation"),
    ]
    spoken = [utterance for split, _ in SPLITS for utterance in utterances(tmp_path / "corpus", split)]
    assert sorted(utterance.text for utterance in spoken) == sorted(
        ["हांव घरा वतां", "Hello world, he Konkani Latin lipint", "आवय शाळेंत गेली", "तूं खंय वता?", "माका १२ जाय"]
    )
    assert report.size.train + report.size.valid + report.size.test == len(spoken) == 5
    assert len(STUDENTS) == len(spoken) + len(report.left_out) + report.blank + report.repeated
    for utterance in spoken:
        information = soundfile.info(utterance.audio_path)
        assert (information.samplerate, information.channels) == (16_000, 1)
        assert utterance.duration == pytest.approx(information.duration, abs=1e-4) and utterance.duration > 0.5
    assert not build_sentence_corpus([student_file], tmp_path / "corpus").is_new
    again = build_sentence_corpus([student_file], tmp_path / "corpus")
    assert (again.size, again.left_out) == (report.size, report.left_out)


def test_sentences_and_voices_are_disjoint_between_splits(synthesizer, tmp_path):
    path = write_sentences(tmp_path / "s.txt", 20)
    report = build_sentence_corpus([path], tmp_path / "corpus", valid=4, test=6)
    assert report.size == SplitSizes(10, 4, 6) and report.left_out == ()
    for kind in (lambda utterance: normalize_text(utterance.text), lambda utterance: utterance.speaker):
        values = [{kind(utterance) for utterance in utterances(tmp_path / "corpus", split)} for split, _ in SPLITS]
        assert sum(map(len, values)) == len(set.union(*values))


def test_corpus_json_has_description_and_sentence_digest(synthesizer, tmp_path):
    build_sentence_corpus([write_sentences(tmp_path / "s.txt")], tmp_path / "corpus")
    description = json.loads((tmp_path / "corpus" / "corpus.json").read_text(encoding="utf-8"))
    assert description["what"] == "synthetic, Marathi voice" and description["name"] == "corpus of sentences"
    texts = [utterance.text for split, _ in SPLITS for utterance in utterances(tmp_path / "corpus", split)]
    assert description["sentences"] == hashlib.sha256("".join(f"{text}\n" for text in texts).encode()).hexdigest()
    assert description["utterances"] == {"train": 10, "valid": 1, "test": 1}


def test_builds_are_bitwise_equal_and_new_sentences_replace_corpus(synthesizer, tmp_path):
    path = write_sentences(tmp_path / "s.txt")
    assert build_sentence_corpus([path], tmp_path / "one").is_new
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (tmp_path / "two" / "left_out.jsonl").unlink()
    assert build_sentence_corpus([path], tmp_path / "two").is_new
    assert file_digests(tmp_path / "one") == file_digests(tmp_path / "two")
    write_sentences(tmp_path / "s.txt", 13)
    assert build_sentence_corpus([path], tmp_path / "two").is_new
    assert len(utterances(tmp_path / "two", "train")) == 11


def test_folder_with_other_content_is_not_overwritten(synthesizer, tmp_path):
    path, miniature = write_sentences(tmp_path / "s.txt"), SplitSizes(train=4, valid=1, test=2)
    build_builtin_corpus(tmp_path / "builtin", miniature)
    build_sentence_corpus([path], tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept.txt").write_text("kept")
    before = file_digests(tmp_path)
    for name in ("builtin", "other"):
        with pytest.raises(UsageError, match="The corpus of sentences cannot be written to"):
            build_sentence_corpus([path], tmp_path / name)
    with pytest.raises(UsageError, match="The built-in corpus cannot be written to"):
        build_builtin_corpus(tmp_path / "mine", miniature)
    assert file_digests(tmp_path) == before


def test_split_without_speakable_sentence_leaves_no_output(synthesizer, tmp_path):
    (tmp_path / "mute.txt").write_text("\u093e\n\u0940\n\u0941\n", encoding="utf-8")
    with pytest.raises(
        DataError, match="None of the sentences for train can be synthesised; the first: it contains no letter"
    ):
        build_sentence_corpus([str(tmp_path / "mute.txt")], tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["mute.txt"]


def test_killed_build_leaves_no_partial_corpus(synthesizer, tmp_path):
    path, directory = write_sentences(tmp_path / "s.txt", 80), tmp_path / "corpus"
    kill_during_synthesis(partial(build_sentence_corpus, [path], directory), directory)
    assert build_sentence_corpus([write_sentences(tmp_path / "s.txt")], directory).is_new
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "s.txt"]


# The command line


def test_corpus_from_text_files_trains_two_steps(student_file, tmp_path):
    more, corpus = write_sentences(tmp_path / "more.txt"), tmp_path / "corpus"
    done = checked(
        run_in_process(SCRIPT, "--sentences", student_file, more, "--output", str(corpus), "--valid_utterances", "2")
    )
    assert "17 utterances written in " in done.stdout and "(synthetic, Marathi voice)" in done.stdout
    assert "1 blank and 1 repeated lines dropped; 5 lines skipped" in done.stdout
    assert f"{student_file}, line 7: its speech is longer than 30 s" in done.stdout
    manifests = ("--train_manifest", str(corpus / "train.jsonl"), "--valid_manifest", str(corpus / "valid.jsonl"))
    shape = (*TINY_MODEL, "--vocab_size", "200", "--max_steps", "2", "--num_workers", "0")
    trained = checked(run_trainer(*shape, *manifests, *run_folders(tmp_path)))
    assert json.loads(trained.stdout.splitlines()[-1])["steps"] == 2


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (("--sentences",), 2, "--sentences is empty"),
        (("--sentences", "bad.txt", "--train_utterances", "5"), 2, "--train_utterances has no effect with --sentences"),
        (("--sentences", "few.txt"), 2, "cannot be split"),
        (("--sentences", "bad.txt"), 3, "bad.txt, line 2: not UTF-8"),
        (("--sentences", "gone.txt"), 3, "gone.txt cannot be read"),
    ],
)
def test_invalid_input_exits_with_code_and_one_line(flags, code, message, tmp_path):
    (tmp_path / "bad.txt").write_bytes("एक\n".encode() + b"\xff\n")
    (tmp_path / "few.txt").write_text("एक\nदोन\n", encoding="utf-8")
    done = run_in_process(SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "few.txt"]
