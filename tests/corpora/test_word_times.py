"""Reference word times of espeak-ng, and their comparison with recognised words."""

import dataclasses
import re

import numpy as np
import pytest
import soundfile

from benchmarks.accuracy import check_speech, matches, summary
from konkanivani.corpora.builtin import SplitSizes, SpokenSentence, plan_corpus, spoken_waveform
from konkanivani.corpora.synthesis import SpeakingStyle, SpokenWord, SpokenWords
from konkanivani.data.index import Utterance
from konkanivani.errors import DataError
from konkanivani.inference.word_times import Word
from tests.conftest import run_script


@pytest.fixture(scope="module")
def sentences() -> tuple[SpokenSentence, ...]:
    return plan_corpus(SplitSizes()).test[:4]


def test_every_word_has_a_start_time_within_the_speech(synthesizer, sentences):
    for sentence in sentences:
        spoken = synthesizer.words(sentence.text, sentence.style)
        seconds = len(synthesizer.speak(sentence.text, sentence.style)) / 2 / synthesizer.sample_rate
        assert [word.character for word in spoken.words] == [m.start() for m in re.finditer(r"\S+", sentence.text)]
        starts = [word.start for word in spoken.words]
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < spoken.end
        assert spoken.end == pytest.approx(seconds, abs=0.1)


def test_word_start_matches_end_of_pause_in_samples(synthesizer):
    """Independent reference: a comma makes espeak-ng pause between two words, which the samples show."""
    style = SpeakingStyle("mr+m3", 130)
    spoken = synthesizer.words("घर, शाळा", style)
    samples = np.frombuffer(synthesizer.speak("घर, शाळा", style), dtype=np.int16).astype(float)
    loud = np.abs(samples) > 300
    silent = np.flatnonzero(np.diff(np.flatnonzero(loud)) > 0.1 * synthesizer.sample_rate)
    assert len(silent) == 1
    begins = np.flatnonzero(loud)[silent[0] + 1] / synthesizer.sample_rate
    assert spoken.words[1].start == pytest.approx(begins, abs=0.06)
    assert abs(spoken.words[1].start - begins - 0.2) > 0.06  # negative control


def test_speech_of_other_sentence_or_level_is_rejected(synthesizer, sentences, tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, spoken_waveform(sentences[0], synthesizer), 16_000, subtype="PCM_16")
    seconds = soundfile.info(path).duration
    utterance = Utterance(audio_filepath="a.flac", audio_path=str(path), duration=seconds, text=sentences[0].text)
    check_speech(utterance, sentences[0], synthesizer)
    for other in (dataclasses.replace(sentences[0], level=sentences[0].level - 1), sentences[1]):
        with pytest.raises(DataError, match="is not what espeak-ng"):
            check_speech(utterance, other, synthesizer)


def test_only_correctly_recognised_words_are_compared():
    text = "एक दोन तीन घर"  # the synthesiser has no separate time for तीन, which it joins to दोन
    words = [Word(t, k, k + 1, None) for k, t in enumerate(("एक", "तीन", "दोन", "तीन", "घर"))]
    spoken = SpokenWords((SpokenWord(0, 0.0), SpokenWord(3, 0.5), SpokenWord(11, 1.0)), end=1.5)
    result = matches(tuple(words), text, spoken)
    assert [(word.text, start, end) for word, start, end in result] == [
        ("एक", 0.0, 0.5),
        ("दोन", 0.5, 1.0),
        ("घर", 1.0, 1.5),
    ]
    assert matches((words[1],), "एक दोन", spoken) == []


def test_summary_uses_absolute_differences():
    result = summary([float(n) for n in range(100, -1, -1)])
    assert (result.words, result.median, result.mean, result.percentile_90) == (101, 50.0, 50.0, 90.0)
    with pytest.raises(DataError, match="Not one word"):
        summary([])


@pytest.mark.parametrize(
    ("flags", "exit_code"), [(("--utterances", "0"), 2), (("--checkpoint", "nowhere.pt"), 4), (("--minutes", "1"), 2)]
)
def test_invalid_flags_exit_with_code_and_message(flags, exit_code):
    done = run_script("benchmarks/accuracy.py", "word_times", *flags)
    assert done.returncode == exit_code and flags[0].strip("-") in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
