"""Differences between recognised and true word times, on the test part of the built-in corpus.

The speech is synthesised, so the synthesiser gives the true times.
"""

import difflib
import itertools
import statistics
from dataclasses import dataclass

import numpy as np

from konkanivani.base.errors import DataError
from konkanivani.data.audio.waveform import load_audio
from konkanivani.data.manifest import read_manifest
from konkanivani.data.synthetic.builtin_corpus import SplitSizes, plan_corpus
from konkanivani.data.synthetic.speech_synthesis import SpeechSynthesizer, SpokenWords
from konkanivani.data.synthetic.spoken_sentences import SpokenSentence, spoken_waveform
from konkanivani.data.utterance import Utterance
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.transcript import Word


@dataclass(frozen=True)
class Differences:
    """Statistics of the absolute differences of `words` words, in milliseconds."""

    words: int
    median: float
    mean: float
    percentile_90: float


@dataclass(frozen=True)
class WordTimes:
    """Differences of word starts and ends; the true end is the start of the next word or the end of the speech.

    `spoken` counts all words of the utterances; only correctly recognised ones are compared.
    """

    utterances: int
    spoken: int
    starts: Differences
    ends: Differences


def measure(recognizer: Recognizer, manifest: str, count: int) -> WordTimes:
    """Transcribe the first `count` utterances of the test part, and compare the word times with the synthesiser's.

    Raises DataError if the audio differs from the speech of the installed espeak-ng.
    """
    utterances = list(itertools.islice(read_manifest(manifest), count))
    starts, ends, spoken_words = [], [], 0
    with SpeechSynthesizer() as synthesizer:
        for utterance, sentence in zip(utterances, plan_corpus(SplitSizes()).test, strict=False):
            check_speech(utterance, sentence, synthesizer)
            spoken = synthesizer.words(sentence.text, sentence.style)
            spoken_words += len(spoken.words)
            recognized = recognizer.transcribe(utterance.audio_path).words
            for word, start, end in matches(recognized, sentence.text, spoken):
                starts.append(1000 * abs(word.start - start))
                ends.append(1000 * abs(word.end - end))
    return WordTimes(len(utterances), spoken_words, summary(starts), summary(ends))


def check_speech(utterance: Utterance, sentence: SpokenSentence, synthesizer: SpeechSynthesizer) -> None:
    """Raise DataError unless the audio equals, sample for sample, the sentence as it is synthesised now."""
    spoken = spoken_waveform(sentence, synthesizer)
    # The corpus is stored as 16-bit integers, which float32 represents exactly.
    heard = (load_audio(utterance.source).numpy() * 32768).round().astype(np.int16)
    if utterance.text != sentence.text or not np.array_equal(heard, spoken):
        raise DataError(
            f"{utterance.audio_path} is not what {synthesizer.engine} speaks now, so its words' times are not known. "
            "Write the corpus again with prepare_builtin_corpus.py, and give its test.jsonl."
        )


def matches(recognized: tuple[Word, ...], text: str, spoken: SpokenWords) -> list[tuple[Word, float, float]]:
    """Return the correctly recognised words, each with its true start and end in seconds."""
    # The synthesiser identifies a word by the position of its first character in the text.
    words, place = text.split(), 0
    times = [word.start for word in spoken.words] + [spoken.end]
    places = {word.character: number for number, word in enumerate(spoken.words)}
    characters = []
    for word in words:
        characters.append(text.index(word, place))
        place = characters[-1] + len(word)
    # autojunk would ignore words that are frequent in a long text.
    blocks = difflib.SequenceMatcher(None, [w.text for w in recognized], words, autojunk=False).get_matching_blocks()
    found = []
    for block in blocks:
        for offset in range(block.size):
            number = places.get(characters[block.b + offset])
            if number is not None:  # None if the synthesiser joins the word to the previous one
                found.append((recognized[block.a + offset], times[number], times[number + 1]))
    return found


def summary(differences: list[float]) -> Differences:
    """Return count, median, mean and 90th percentile, rounded to 0.1 ms."""
    ranked = sorted(differences)
    if not ranked:
        raise DataError("Not one word was recognised as it was spoken. Give another --checkpoint.")
    highest = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return Differences(
        len(ranked), *(round(x, 1) for x in (statistics.median(ranked), statistics.fmean(ranked), highest))
    )
