"""Silence after speech is removed before encoding, and endless repetitions of the decoder are cut.

Fine-tuned Whisper models repeat their last sentence over the silence between the last word and the end of a recording
(sk3llo/whisper_ggml#29, whisper.cpp#1507); the same audio without the silence is decoded correctly.
"""

import dataclasses
import random

import pytest
import torch

from konkanivani.config import AugmentConfig
from konkanivani.decoding.ctc import Hypothesis
from konkanivani.decoding.decode import ENDLESS_COPIES, ENDLESS_TOKENS, BeamDecode, greedy_decode
from konkanivani.inference.live import for_live_speech
from konkanivani.inference.recognizer import Recognizer
from konkanivani.inference.segmentation import MARGIN, STEPS_A_SECOND, Piece, build_segmentation
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.inference.whisper_generation import FallbackDecode, without_final_loop
from konkanivani.inference.word_times import EmissionDelay
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import Decoder, WhisperShape
from konkanivani.models.whisper.vocabulary import PromptedVocabulary
from tests.conftest import WORDS, speak
from tests.whisper.vocabularies import read_vocabulary, write_vocabulary

POSITIONS = 200
SILENCES = (1, 5, 25)  # seconds
SPOKEN_WORDS = list(WORDS[:4])
LOGIT_MARGIN = (
    30.0  # margin of the scripted token's logit: sampling at temperatures up to 1 never selects another token
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> PromptedVocabulary:
    return read_vocabulary(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


class CountingCache:
    """Decoder cache that counts tokens, the only state of `ScriptedDecoder`."""

    def __init__(self) -> None:
        self.length = 0

    def reorder(self, sources: torch.Tensor) -> None:
        pass

    def select(self, utterances: torch.Tensor) -> None:
        pass


class ScriptedDecoder(Decoder):
    """Decoder that predicts the tokens of `script` with certainty, then repeats `loop` endlessly."""

    def __init__(self, shape: WhisperShape, prompt: int, script: list[int], loop: list[int]) -> None:
        super().__init__(shape)
        self.prompt, self.script, self.loop = prompt, script, loop

    def begin(self, encoded: torch.Tensor, encoded_lengths: Lengths, beam: int) -> CountingCache:
        return CountingCache()

    def step(self, tokens: torch.Tensor, cache: CountingCache) -> torch.Tensor:
        place = cache.length - self.prompt
        cache.length += 1
        if place >= len(self.script):
            return torch.full_like(tokens, self.loop[(place - len(self.script)) % len(self.loop)])
        return torch.full_like(tokens, self.script[max(0, place)])

    def output(self, decoded: torch.Tensor) -> torch.Tensor:
        if decoded.is_floating_point():  # the pass that computes word times from attention
            return super().output(decoded)
        return LOGIT_MARGIN * torch.nn.functional.one_hot(decoded, len(self.embedding.weight)).float()


def text_tokens(vocabulary: PromptedVocabulary, text: str) -> list[int]:
    return vocabulary.encode(text)[len(vocabulary.prefix) :]


def scripted_recognizer(vocabulary: PromptedVocabulary, script: list[int], loop: list[int]) -> Recognizer:
    """Return a recognizer as built by `load_recognizer`, with a random encoder and a scripted decoder."""
    tokens = dataclasses.replace(vocabulary._tokens, positions=POSITIONS)
    vocabulary = PromptedVocabulary(vocabulary._pairs, vocabulary._prompt, tokens, vocabulary._says_times)
    architecture = WhisperArchitecture(WhisperShape(8, 1, 1, 1, 8, 80, vocabulary.size, 1500, POSITIONS))
    model, front_end = architecture.build().eval(), architecture.build_front_end(AugmentConfig())
    model.decoder = ScriptedDecoder(architecture.model, len(vocabulary.rules.prompt), script, loop).eval()
    speech_model = SpeechModel(architecture, model, front_end, vocabulary, torch.device("cpu"), 30.0, "keep")
    decode = FallbackDecode(greedy_decode(architecture, vocabulary), vocabulary)
    return Recognizer(speech_model, decode, build_segmentation(30.0, 0.4))


def speech() -> torch.Tensor:
    return torch.from_numpy(speak(SPOKEN_WORDS))


def speech_and_silence(silence: str, seconds: int) -> torch.Tensor:
    """Return speech followed by silence: digital zeros, 16-bit dither, room noise or a 50 Hz hum."""
    recording = torch.cat([speech(), torch.zeros(seconds * SAMPLE_RATE)])
    noise = torch.randn(len(recording), generator=torch.Generator().manual_seed(0))
    hum = torch.sin(2 * torch.pi * 50 * torch.arange(len(recording)) / SAMPLE_RATE)
    return recording + {"zeros": 0 * noise, "dither": 3e-5 * noise, "room": 1e-3 * noise, "hum": 2e-3 * hum}[silence]


@pytest.mark.parametrize("seconds", SILENCES)
@pytest.mark.parametrize("kind", ["zeros", "dither", "room", "hum"])
def test_trailing_silence_is_not_passed_to_the_model(vocabulary, kind, seconds):
    recognizer = scripted_recognizer(
        vocabulary, text_tokens(vocabulary, " ".join(SPOKEN_WORDS)), [vocabulary.special.end]
    )
    encoded_lengths = []
    encode = SpeechModel.encode

    def recording_encode(self: SpeechModel, waveforms: torch.Tensor, lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        encoded_lengths.extend(lengths)
        return encode(self, waveforms, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeechModel, "encode", recording_encode)
        transcript = recognizer.transcribe(speech_and_silence(kind, seconds).numpy())
    assert [word.text for word in transcript.words] == SPOKEN_WORDS
    (length,) = encoded_lengths
    end_of_speech = len(speech()) / SAMPLE_RATE - 0.06  # `speak` ends with a pause
    assert end_of_speech <= length / SAMPLE_RATE <= end_of_speech + (MARGIN + 5) / STEPS_A_SECOND
    assert transcript.words[-1].end <= length / SAMPLE_RATE


@pytest.mark.parametrize("seconds", SILENCES)
def test_digital_silence_equals_window_padding(vocabulary, seconds):
    front_end = WhisperArchitecture(WhisperShape(8, 1, 1, 1, 8, 80, 60, 1500, 40)).build_front_end(AugmentConfig())
    waveform = speech()
    alone, _ = front_end(waveform[None], (len(waveform),), None)
    followed = speech_and_silence("zeros", seconds)
    assert torch.equal(front_end(followed[None], (len(followed),), None)[0], alone)
    followed[-1] = 0.1  # negative control
    assert not torch.equal(front_end(followed[None], (len(followed),), None)[0], alone)


LOOPS = {"last word": SPOKEN_WORDS[3:], "last sentence": SPOKEN_WORDS[1:], "whole text": SPOKEN_WORDS}


@pytest.mark.parametrize(("loop", "seconds"), list(zip(LOOPS, SILENCES, strict=True)))
def test_endless_repetition_is_cut_and_earlier_words_are_kept(vocabulary, loop, seconds):
    script = text_tokens(vocabulary, " ".join(SPOKEN_WORDS))
    repeated = text_tokens(vocabulary, " " + " ".join(LOOPS[loop]))
    recognizer = scripted_recognizer(vocabulary, script, repeated)
    waveform = speech_and_silence("zeros", seconds).numpy()
    results = [word.text for word in recognizer.transcribe(waveform).words]
    # A second copy of a loop over the whole text can remain: its first token includes a space and differs.
    assert results[: len(SPOKEN_WORDS)] == SPOKEN_WORDS and len(results) <= len(SPOKEN_WORDS) + len(LOOPS[loop])
    # Negative control: without the fallback, the search repeats up to the last position of the decoder.
    inner = dataclasses.replace(recognizer, decode=recognizer.decode.inner)
    assert len(inner.transcribe(waveform).words) > 4 * len(SPOKEN_WORDS)


def test_repetition_with_timestamps_is_cut(vocabulary):
    timed = vocabulary.saying_times()
    text = text_tokens(vocabulary, " ".join(SPOKEN_WORDS))
    tokens = [timed.time_token(0.0), *text, timed.time_token(1.0)]
    for copy in range(1, 6):
        tokens += [timed.time_token(copy), *text_tokens(vocabulary, " " + SPOKEN_WORDS[3]), timed.time_token(copy + 1)]
    result = without_final_loop(tokens, timed)
    assert result[: len(text) + 2] == tokens[: len(text) + 2]
    assert timed.decode(result).split() in (SPOKEN_WORDS, [*SPOKEN_WORDS, SPOKEN_WORDS[3]])
    assert timed.seconds_of(result[-1]) in (1.0, 2.0)


def test_repetition_that_ends_is_kept(vocabulary):
    """A chant may be real speech; only an endless repetition is certainly a loop."""
    chant = text_tokens(vocabulary, " ".join([*SPOKEN_WORDS, *[SPOKEN_WORDS[3]] * 40]))
    recognizer = scripted_recognizer(vocabulary, chant, [vocabulary.special.end])
    results = [word.text for word in recognizer.transcribe(speech().numpy()).words]
    assert results == [*SPOKEN_WORDS, *[SPOKEN_WORDS[3]] * 40]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of each search."""
    counts: list[int] = []
    search = BeamDecode.search

    def recording_search(self: BeamDecode, *arguments: object, best: int) -> list[tuple[Hypothesis, ...]]:
        hypotheses = search(self, *arguments, best=best)
        counts.append(len(hypotheses[0][0].tokens))
        return hypotheses

    monkeypatch.setattr(BeamDecode, "search", recording_search)
    return counts


def endless_recognizer(vocabulary: PromptedVocabulary) -> Recognizer:
    """Return a recogniser whose texts neither end nor repeat themselves."""
    words = random.Random(0).choices(WORDS, k=400)
    endless = text_tokens(vocabulary, " ".join(words))
    return scripted_recognizer(vocabulary, endless, endless)


def piece_of(seconds: float) -> Piece:
    return Piece(torch.zeros(round(seconds * SAMPLE_RATE)), 0.0, 0.0, seconds, 0.0, seconds)


def test_partial_text_is_limited_by_the_duration_of_the_speech(vocabulary, searched):
    recognizer = endless_recognizer(vocabulary)
    for seconds in (0.5, 2.0, 30.0):
        recognizer.recognize_prefix(piece_of(seconds).waveform)
    assert searched == [35, 80, recognizer.decode.inner.rules.most_tokens]
    assert searched[2] > 2 * searched[1]  # negative control: 30 s are limited by the decoder alone


def test_final_text_of_live_speech_is_limited_by_its_duration(vocabulary, searched):
    recognizer = endless_recognizer(vocabulary)
    for each in (for_live_speech(recognizer), recognizer):
        each.recognize([piece_of(2.0)], EmissionDelay())
    assert searched == [80, recognizer.decode.inner.rules.most_tokens]


def test_loop_in_live_speech_is_ended(vocabulary, searched):
    script = text_tokens(vocabulary, " ".join(SPOKEN_WORDS))
    loop = text_tokens(vocabulary, " " + SPOKEN_WORDS[0])
    recognizer = scripted_recognizer(vocabulary, script, loop)
    live = for_live_speech(recognizer)
    (words,) = live.recognize([piece_of(30.0)], EmissionDelay())
    (usual,) = recognizer.recognize([piece_of(30.0)], EmissionDelay())
    partial = recognizer.recognize_prefix(piece_of(30.0).waveform).text
    assert [word.text for word in words] == [word.text for word in usual]
    assert {word.text for word in words} == set(SPOKEN_WORDS) == set(partial.split())
    repeated = max(ENDLESS_TOKENS, (ENDLESS_COPIES - 1) * len(loop))
    assert searched[0] == searched[2] <= len(script) + len(loop) + repeated
    assert searched[1] == recognizer.decode.inner.rules.most_tokens > 2 * searched[0]  # negative control: a recording


def test_chant_in_live_speech_is_kept(vocabulary):
    chant = [*SPOKEN_WORDS, *[SPOKEN_WORDS[3]] * (ENDLESS_COPIES - 2)]
    recognizer = scripted_recognizer(vocabulary, text_tokens(vocabulary, " ".join(chant)), [vocabulary.special.end])
    (words,) = for_live_speech(recognizer).recognize([piece_of(10.0)], EmissionDelay())
    assert [word.text for word in words] == chant


def test_live_speech_is_decoded_at_one_temperature(vocabulary, monkeypatch):
    word = text_tokens(vocabulary, " " + SPOKEN_WORDS[0])
    recognizer = scripted_recognizer(vocabulary, word, word)
    waveform = speech().numpy()
    attempts = []
    decode_rows = FallbackDecode._decode_rows
    monkeypatch.setattr(
        FallbackDecode, "_decode_rows", lambda self, *rest: attempts.append(1) or decode_rows(self, *rest)
    )
    live = for_live_speech(recognizer).transcribe(waveform)
    live_attempts = len(attempts)
    usual = recognizer.transcribe(waveform)
    assert live_attempts == 1 and len(attempts) - live_attempts == 6
    assert [word.text for word in live.words] == [word.text for word in usual.words]  # the loop is removed from both


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([5], [5]),
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 3, 3], [1, 2, 3, 3, 3]),
        ([1, 2, 3, 3, 3, 3], [1, 2, 3]),
        ([1, 2, 3, 2, 3, 2, 3, 2, 3, 2], [1, 2, 3]),
        ([7, 7, 7, 7], [7]),
        ([7, 7, 7, 7, 8], [7, 7, 7, 7, 8]),
        ([1, 1, 2] * 4, [1, 1, 2]),
    ],
)
def test_first_copy_of_final_loop_is_kept(vocabulary, tokens, expected):
    assert without_final_loop(tokens, vocabulary) == expected
