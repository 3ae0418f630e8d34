"""How far recognised words are from where the synthesiser began them, on the built-in corpus's test part."""

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
    """Absolute differences in milliseconds, over `words`."""

    words: int
    median: float
    mean: float
    percentile_90: float


@dataclass(frozen=True)
class WordTimes:
    """Differences of words' starts, and of their ends from where the next word begins or the speech ends.

    `spoken` counts all words of the utterances; compared are those that were recognised as they are written.
    """

    utterances: int
    spoken: int
    starts: Differences
    ends: Differences


def measure(recognizer: Recognizer, manifest: str, count: int) -> WordTimes:
    """Transcribes the first `count` utterances of a corpus's test part and speaks them again, to learn the truth.

    A DataError says where the corpus is not the speech that this espeak-ng speaks.
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
    """Raises a DataError where the corpus's audio is not, sample for sample, the sentence as it is spoken now."""
    spoken = spoken_waveform(sentence, synthesizer)
    heard = (load_audio(utterance.source).numpy() * 32768).round().astype(np.int16)
    if utterance.text != sentence.text or not np.array_equal(heard, spoken):
        raise DataError(
            f"{utterance.audio_path} is not what {synthesizer.engine} speaks now, so its words' times are not known. "
            "Write the corpus again with prepare_builtin_corpus.py, and give its test.jsonl."
        )


def matches(recognized: tuple[Word, ...], text: str, spoken: SpokenWords) -> list[tuple[Word, float, float]]:
    """The words that were recognised as they stand in the text, with the seconds at which they begin and end."""
    words, place = text.split(), 0
    times = [word.start for word in spoken.words] + [spoken.end]
    places = {word.character: number for number, word in enumerate(spoken.words)}
    characters = []
    for word in words:
        characters.append(text.index(word, place))
        place = characters[-1] + len(word)
    blocks = difflib.SequenceMatcher(None, [w.text for w in recognized], words, autojunk=False).get_matching_blocks()
    found = []
    for block in blocks:
        for offset in range(block.size):
            number = places.get(characters[block.b + offset])
            if number is not None:  # what the synthesiser takes for a part of the word before has no time of its own
                found.append((recognized[block.a + offset], times[number], times[number + 1]))
    return found


def summary(differences: list[float]) -> Differences:
    """Their median, mean and 90th percentile."""
    ranked = sorted(differences)
    if not ranked:
        raise DataError("Not one word was recognised as it was spoken. Give another --checkpoint.")
    highest = ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))]
    return Differences(
        len(ranked), *(round(x, 1) for x in (statistics.median(ranked), statistics.fmean(ranked), highest))
    )
