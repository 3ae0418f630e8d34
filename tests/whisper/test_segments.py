"""Segments equal those of transformers' tokenizer, and word times lie within segment and audio."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.config import AugmentConfig
from konkanivani.data.text import train_tokenizer
from konkanivani.decoding.decode import BeamDecode
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.segmentation import build_segmentation
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.models.whisper.vocabulary import PromptedVocabulary, TimedSegment, timed_segments
from tests.whisper.byte_vocabularies import TIMES
from tests.whisper.folders import FRAMES, SECONDS, reference, to_project_model, transformers
from tests.whisper.vocabularies import kind_of, read_vocabulary, write_vocabulary

LAST_TEXT = 255  # id of the last byte


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> PromptedVocabulary:
    return read_vocabulary(folder).saying_times()


@pytest.fixture(scope="module")
def hf_tokenizer(folder: Path):
    """Return transformers' tokenizer with the special tokens of published files."""
    names = json.loads((folder / "added_tokens.json").read_text())
    special = [name for name in names if name not in TIMES]
    return transformers.WhisperTokenizer.from_pretrained(str(folder), additional_special_tokens=special)


def tuples(segments: list[TimedSegment], vocabulary: PromptedVocabulary) -> list[tuple[str, float, float]]:
    return [(vocabulary.decode(s.tokens), pytest.approx(s.begin), pytest.approx(s.end)) for s in segments]


def transformers_segments(tokens: list[int], hf_tokenizer) -> list[tuple[str, float, float]]:
    """Return the segments from transformers, which omits a last segment without end time."""
    return [
        (item["text"].strip(), *item["timestamp"])
        for item in hf_tokenizer.decode(tokens, output_offsets=True)["offsets"]
    ]


SEGMENTS = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 90), st.lists(st.integers(0, LAST_TEXT), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=100)
@given(SEGMENTS, st.booleans())
def test_segments_equal_transformers(vocabulary, hf_tokenizer, segments, is_open):
    tokens, step = [], 0
    for gap, length, text in segments:
        begin, step = step + gap, step + gap + length
        tokens += [vocabulary.first_time + begin, *text, vocabulary.first_time + step]
    tokens = tokens[:-1] if is_open else tokens
    result = timed_segments(tokens, vocabulary, 30.0)
    assert tuples(result[:-1] if is_open else result, vocabulary) == transformers_segments(tokens, hf_tokenizer)
    assert len(result) == len(segments) and (not is_open or result[-1].end == 30.0)
    assert [token for segment in result for token in segment.tokens] == [t for t in tokens if t < vocabulary.first_time]


def test_negative_control_changed_time_is_detected(vocabulary, hf_tokenizer):
    time = vocabulary.time_token
    tokens = [time(0.5), 65, time(1.0)]
    assert tuples(timed_segments(tokens, vocabulary, 30.0), vocabulary) == transformers_segments(tokens, hf_tokenizer)
    assert tuples(timed_segments([*tokens[:2], time(1.02)], vocabulary, 30.0), vocabulary) != transformers_segments(
        tokens, hf_tokenizer
    )


def test_segments_of_decoded_tokens_equal_transformers(vocabulary, hf_tokenizer):
    # The rules treat language and task tokens as text; no trained model predicts them.
    named = range(vocabulary.special.start, vocabulary.no_times)
    rules = dataclasses.replace(vocabulary.rules, suppressed=(*vocabulary.rules.suppressed, *named))
    search = BeamDecode(1, 0.0, 0.0, None, 0.0, vocabulary.special, rules)
    compared = 0
    for seed in range(6):
        model = to_project_model(reference(kind_of(vocabulary), seed), kind_of(vocabulary))
        encoded = torch.randn(3, FRAMES, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            model.decoder.embedding.weight[vocabulary.no_times :] *= 0.7
            actual = search(model, encoded, (FRAMES,) * 3)
        for tokens in actual:
            segments, expected = timed_segments(tokens, vocabulary, 30.0), transformers_segments(tokens, hf_tokenizer)
            assert tuples(segments[: len(expected)], vocabulary) == expected and len(segments) - len(expected) in (0, 1)
            compared += len(expected)
    assert compared > 20


def test_segment_times_are_ordered_and_within_the_audio(vocabulary):
    time, text = vocabulary.time_token, (5, 6)
    tokens = [*text, time(0.5), *text, time(0.2), time(0.8), *text, time(9.0), time(9.5), *text]
    assert timed_segments(tokens, vocabulary, 1.0) == [
        TimedSegment(0.0, 0.5, text),
        TimedSegment(0.5, 0.5, text),
        TimedSegment(0.8, 1.0, text),
        TimedSegment(1.0, 1.0, text),
    ]
    assert timed_segments([time(0.5), time(0.7)], vocabulary, 1.0) == []
    tokenizer = train_tokenizer(["एक दोन"], "char", 40)
    assert timed_segments([5, 6], tokenizer, 2.5) == [TimedSegment(0.0, 2.5, (5, 6))] and tokenizer.size < time(0.0)


def recognized_words(vocabulary: PromptedVocabulary, tokens: list[int], seconds: float):
    """Return the words of a recording of noise that is decoded into these tokens."""
    shape = WhisperShape(8, 1, 1, 1, 8, 80, vocabulary.size, 50 * SECONDS, 64)
    architecture = WhisperArchitecture(shape)
    model, front_end = architecture.build().eval(), architecture.build_front_end(AugmentConfig())
    speech_model = SpeechModel(architecture, model, front_end, vocabulary, torch.device("cpu"), float(SECONDS), "keep")
    decode = lambda model, encoded, lengths: [tokens] * len(encoded)  # noqa: E731
    noise = 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(0))
    return Recognizer(speech_model, decode, build_segmentation(SECONDS, 0.4)).transcribe(noise).words


@pytest.mark.parametrize("seconds", [0.7, 0.4])
def test_word_times_are_within_segment_and_audio(vocabulary, seconds):
    word = {text: vocabulary.encode(text)[len(vocabulary.prefix) :] for text in (" a", " b", " c")}
    assert {len(tokens) for tokens in word.values()} == {2}
    time = vocabulary.time_token
    timed = [time(0.1), *word[" a"], time(0.2), time(0.24), *word[" b"], *word[" c"], time(0.36)]
    result = recognized_words(vocabulary, timed, seconds)
    assert [each.text for each in result] == ["a", "b", "c"]
    assert 0.1 <= result[0].start <= result[0].end <= 0.2
    assert 0.24 <= result[1].start <= result[1].end <= result[2].start <= result[2].end <= 0.36
    assert all(0 < each.confidence < 1 and type(each.start) is type(each.end) is float for each in result)
    untimed = recognized_words(vocabulary, [*word[" a"], *word[" b"]], seconds)
    assert [each.text for each in untimed] == ["a", "b"]
    assert 0 == untimed[0].start <= untimed[0].end == untimed[1].start <= untimed[1].end <= seconds
    late = [time(0.1), *word[" a"], time(0.9), time(0.9), *word[" b"], time(1.0)]  # after the end of the audio
    # Words after the end of the audio are outside the core of every piece.
    assert [each.text for each in recognized_words(vocabulary, late, 0.4)] == ["a"]
