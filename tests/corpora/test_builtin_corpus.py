"""The built-in corpus has the documented counts, splits and voices, and is bitwise reproducible."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import soundfile

from konkanivani.corpora.builtin import (
    BUILT_IN,
    TEST_VOICES,
    TRAIN_VOICES,
    VALID_VOICES,
    WHAT_IT_IS,
    CorpusPlan,
    CorpusRecipe,
    SplitSizes,
    SpokenSentence,
    build_builtin_corpus,
    pattern_sentences,
    plan_corpus,
    publish_corpus,
    read_patterns,
)
from konkanivani.corpora.synthesis import SpeakingStyle, SpeechSynthesizer, reads_signs_by_name
from konkanivani.data.manifest import read_manifest
from konkanivani.data.text import normalize_text
from konkanivani.errors import DataError, KonkaniVaniError, ResourceError, UsageError
from tests.conftest import run_in_process
from tests.fork_server import DEV_NULL, Job, fork_server

MINIATURE = SplitSizes(train=14, valid=2, test=6)


@pytest.fixture(scope="module")
def plan() -> CorpusPlan:
    return plan_corpus(SplitSizes())


@pytest.fixture(scope="module")
def miniature(tmp_path_factory) -> Path:
    pytest.importorskip("espeakng_loader", reason="espeakng-loader is not installed")
    directory = tmp_path_factory.mktemp("data") / "builtin"
    assert build_builtin_corpus(directory, MINIATURE)
    return directory


def distinct_words(sentences: tuple[SpokenSentence, ...]) -> set[str]:
    return {word for sentence in sentences for word in sentence.text.split()}


def file_digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_corpus_has_enough_patterns_sentences_words_and_voices(plan):
    book = read_patterns()
    everything = plan.train + plan.valid + plan.test
    assert len(book.seen) + len(book.unseen) >= 60
    assert len(book.unseen) >= 10
    assert len({sentence.text for sentence in everything}) == len(everything) == 1450
    assert len(distinct_words(everything)) >= 500
    assert len({sentence.style.voice for sentence in everything}) >= 10
    assert {sentence.style.rate for sentence in plan.train} == {sentence.style.rate for sentence in plan.test}
    assert all(3 <= len(sentence.text.split()) <= 12 for sentence in everything)


def test_sentences_and_voices_are_disjoint_between_splits(plan):
    splits = (plan.train, plan.valid, plan.test)
    for kind in (lambda sentence: sentence.text, lambda sentence: sentence.style.voice):
        values = [{kind(sentence) for sentence in split} for split in splits]
        assert sum(map(len, values)) == len(set.union(*values))
    assert {sentence.style.voice for sentence in plan.test} == set(TEST_VOICES)
    assert len(TRAIN_VOICES + VALID_VOICES + TEST_VOICES) == len(set(TRAIN_VOICES + VALID_VOICES + TEST_VOICES))


@pytest.mark.parametrize("size", [SplitSizes(), MINIATURE, SplitSizes(train=100, valid=3, test=9)])
def test_seen_and_unseen_patterns_are_marked_correctly(size):
    plan, book = plan_corpus(size), read_patterns()

    def pattern_of(sentence: SpokenSentence, patterns: tuple[str, ...]) -> str:
        return next(p for p in patterns if sentence.text in set(pattern_sentences(p, book.slots)))

    trained = {sentence.text for sentence in plan.train}
    for sentence in plan.test[:: max(1, size.test // 6)]:
        pattern = pattern_of(sentence, book.unseen if sentence.pattern == "unseen" else book.seen)
        in_training = trained & set(pattern_sentences(pattern, book.slots))
        assert bool(in_training) == (sentence.pattern == "seen"), sentence.text
    assert sum(sentence.pattern == "unseen" for sentence in plan.test) == size.test // 2
    assert all(sentence.pattern == "seen" for sentence in plan.train + plan.valid)


def test_unseen_patterns_have_almost_no_new_words(plan):
    unseen = tuple(sentence for sentence in plan.test if sentence.pattern == "unseen")
    running = [word for sentence in unseen for word in sentence.text.split()]
    new = [word for word in running if word not in distinct_words(plan.train)]
    assert len(new) <= 0.02 * len(running), set(new)


def test_texts_are_devanagari_and_normalised(plan):
    for sentence in plan.train + plan.valid + plan.test:
        assert all(character == " " or "\u0900" <= character <= "\u0963" for character in sentence.text)
        assert sentence.text == normalize_text(sentence.text)


def test_impossible_split_size_raises_usage_error():
    with pytest.raises(UsageError, match="Use fewer utterances"):
        plan_corpus(SplitSizes(test=10**6))
    with pytest.raises(UsageError, match="at least"):
        plan_corpus(SplitSizes(valid=0))


def test_marathi_voice_reads_vowel_signs_that_kok_voice_spells_out(plan, synthesizer):
    words = sorted(distinct_words(plan.train + plan.test))[::6]
    assert [word for word in words if reads_signs_by_name(word, synthesizer.phonemes(word, "mr"))] == []
    # Negative control: a voice that reads the vowel sign as "aakaar" instead of a long a.
    signed = ("म्हाका", "शाळेंत", "कितें", "हांव", "जाय")
    assert all(reads_signs_by_name(word, synthesizer.phonemes(word, "kok")) for word in signed)
    for text in (sentence.text for sentence in plan.test[::10]):
        assert not reads_signs_by_name(text, synthesizer.phonemes(text, "mr"))
        assert reads_signs_by_name(text, synthesizer.phonemes(text, "kok")), text


def test_voice_that_spells_out_vowel_signs_stops_the_build(tmp_path, monkeypatch, synthesizer):
    speak_kok = SpeechSynthesizer.phonemes
    monkeypatch.setattr(SpeechSynthesizer, "phonemes", lambda self, text, voice: speak_kok(self, text, "kok"))
    with pytest.raises(DataError, match="vowel signs"):
        build_builtin_corpus(tmp_path / "builtin", MINIATURE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("voice", TRAIN_VOICES + VALID_VOICES + TEST_VOICES)
def test_speech_depends_only_on_text_and_style(voice, synthesizer):
    style = SpeakingStyle(voice, 175, 46)
    first = synthesizer.speak("हांव फाल्यां पणजेंत वतलों", style)
    synthesizer.speak("तुका कितें जाय", SpeakingStyle("mr+f2", 130, 62))
    assert synthesizer.speak("हांव फाल्यां पणजेंत वतलों", style) == first
    assert len(first) > 2 * synthesizer.sample_rate
    assert first != synthesizer.speak("हांव फाल्यां पणजेंत वतलों", SpeakingStyle("mr", 175, 46))


def test_unknown_voice_and_text_without_letters_raise_data_error(synthesizer):
    with pytest.raises(DataError, match="the voice does not exist"):
        synthesizer.speak("उदक", SpeakingStyle("mr+nobody"))
    with pytest.raises(DataError, match="contains no letter"):
        synthesizer.speak(" ।", SpeakingStyle("mr"))
    assert synthesizer.speak("उदक", SpeakingStyle("mr"))


def test_manifests_match_audio_files(miniature):
    for split, count, voices in (("train", 14, TRAIN_VOICES), ("valid", 2, VALID_VOICES), ("test", 6, TEST_VOICES)):
        utterances = list(read_manifest(miniature / f"{split}.jsonl"))
        assert len(utterances) == count
        for utterance in utterances:
            samples, rate = soundfile.read(utterance.audio_path, dtype="int16")
            information = soundfile.info(utterance.audio_path)
            assert (rate, information.channels, information.subtype) == (16000, 1, "PCM_16")
            assert utterance.duration == pytest.approx(len(samples) / rate, abs=1e-4)
            assert 0.5 < utterance.duration < 8
            assert 1000 < abs(samples.astype(int)).max() < 32767
            assert utterance.speaker in voices
    assert '"synthetic, Marathi voice"' in (miniature / "corpus.json").read_text(encoding="utf-8")


def test_complete_corpus_is_kept_and_incomplete_one_is_rebuilt_bitwise(miniature, tmp_path):
    before = file_digests(miniature)
    directory = tmp_path / "builtin"
    os.symlink(miniature, tmp_path / "linked")
    assert not build_builtin_corpus(tmp_path / "linked", MINIATURE)
    shutil.copytree(miniature, directory)
    (directory / "audio" / "train-0003.flac").unlink()
    assert build_builtin_corpus(directory, MINIATURE)
    assert file_digests(directory) == before
    assert build_builtin_corpus(directory, SplitSizes(train=13, valid=2, test=6))
    assert len(list(read_manifest(directory / "train.jsonl"))) == 13


def publish_empty_corpus(directory: Path, digest: str) -> bool:
    """Publish a corpus of empty files, which is complete, without speech synthesis."""

    def write(partial: Path) -> None:
        (partial / "audio").mkdir(parents=True)
        for split in ("train", "valid", "test"):
            (partial / f"{split}.jsonl").touch()
            (partial / "audio" / f"{split}-0000.flac").touch()
        sizes = {"train": 1, "valid": 1, "test": 1}
        description = {"name": BUILT_IN, "what": WHAT_IT_IS, "utterances": sizes, "recipe": digest}
        (partial / "corpus.json").write_text(json.dumps(description))

    return publish_corpus(directory, CorpusRecipe(BUILT_IN, CorpusPlan((), (), ()), digest), write)


@pytest.mark.parametrize("state", ["empty", "missing", "relative link", "after an earlier version"])
def test_link_to_a_folder_on_another_disk_stays_one(tmp_path, monkeypatch, state):
    disk = tmp_path / "disk" / "corpus"
    if state != "missing":
        disk.mkdir(parents=True)
    link = tmp_path / "data" / "builtin"
    link.parent.mkdir()
    link.symlink_to("../disk/corpus" if state == "relative link" else disk)
    if state == "after an earlier version":
        (disk / "other").touch()
        link.rename(link.with_name(".builtin.outdated"))
    monkeypatch.chdir(tmp_path)
    for digest in ("first", "second", "third"):
        assert publish_empty_corpus(Path("data/builtin"), digest)
        assert not publish_empty_corpus(Path("data/builtin"), digest)
        assert json.loads((link / "corpus.json").read_text())["recipe"] == digest
        assert os.listdir(link.parent) == ["builtin"] and os.listdir(disk.parent) == ["corpus"]
        assert link.is_symlink() == (state != "after an earlier version")
    assert os.listdir(disk) == ["other"] or link.is_symlink()


def test_link_to_other_files_or_to_itself_is_rejected(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "thesis.tex").touch()
    for name, target in (("linked", "files"), ("circle", "circle")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UsageError, match="contains other files"):
            publish_empty_corpus(tmp_path / name, "first")
    assert sorted(os.listdir(tmp_path)) == ["circle", "files", "linked"]
    assert os.listdir(tmp_path / "files") == ["thesis.tex"]


def test_corpus_is_made_and_kept_on_file_system_without_locks(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert publish_empty_corpus(tmp_path / "builtin", "first")
    # Not even opened for a lock.
    monkeypatch.setattr("konkanivani.corpora.builtin.exclusive_lock", None)
    assert not publish_empty_corpus(tmp_path / "builtin", "first")


def kill_during_synthesis(build: Callable[[], object], directory: Path) -> None:
    """Build a corpus in another process, and kill it after the first audio file."""
    process = fork_server().start(Job(DEV_NULL, (), DEV_NULL, before=build))
    try:
        while not list(directory.parent.glob(f".{directory.name}.partial/audio/*.flac")):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not directory.exists()


def test_killed_build_leaves_no_partial_corpus(miniature, tmp_path):
    directory = tmp_path / "builtin"
    kill_during_synthesis(partial(build_builtin_corpus, directory), directory)
    assert build_builtin_corpus(directory, MINIATURE)
    assert file_digests(directory) == file_digests(miniature)
    assert [path.name for path in tmp_path.iterdir()] == ["builtin"]


def test_unwritable_output_and_missing_package_raise_resource_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        build_builtin_corpus(tmp_path / "file" / "builtin", MINIATURE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="pip install espeakng-loader"):
        build_builtin_corpus(tmp_path / "builtin", MINIATURE)


def test_killed_synthesizer_process_raises_error(synthesizer):
    with SpeechSynthesizer() as dying:
        dying._process.kill()
        with pytest.raises(KonkaniVaniError, match="exited with code -9"):
            dying.speak("उदक", SpeakingStyle("mr"))


def test_espeak_library_is_not_loaded_in_this_process(synthesizer):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")
    assert "espeak" not in maps.read_text()


def test_script_exits_with_code_of_usage_error(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    done = run_in_process("training_scripts/prepare_builtin_corpus.py", "--output", str(tmp_path))
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith("The built-in corpus cannot be written to ") and "Traceback" not in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "kept"
