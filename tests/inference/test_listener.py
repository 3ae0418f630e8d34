"""Streaming recognition: finals do not depend on the block size, and fixed words do not change."""

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
import torchaudio

from konkanivani.config import DecodingConfig, PretrainedConfig
from konkanivani.data.audio.waveform import resample_blocks
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.errors import DataError, UsageError
from konkanivani.inference.listener import Event, Final, Listener, LocalAgreement, Partial, matched_prefix
from konkanivani.inference.recognizer import STABLE_SECONDS, Recognizer, build_recognizer, lengthen
from konkanivani.inference.segmentation import TICK_SAMPLES, CausalSegmenter, build_segmentation
from konkanivani.inference.word_times import EmissionDelay
from konkanivani.scoring.metrics import error_rates
from tests.trained_model import tones

SENTENCES = (("एक", "दोन", "तीन"), ("उदक", "घर", "शाळा", "बाजार"), ("आवय", "चार"))


def quiet(seconds: float, level: float = 0.005) -> np.ndarray:
    return level * np.random.default_rng(1).standard_normal(round(seconds * 16_000)).astype(np.float32)


def recording() -> np.ndarray:
    """Return the sentences with pauses of 0.75 s."""
    parts = [part for number, words in enumerate(SENTENCES) for part in (tones(words, number), quiet(0.75))]
    return np.concatenate(parts)


def listen(recognizer: Recognizer, samples: np.ndarray, block: int, rate: int = 16_000, **settings) -> list[Event]:
    listener = Listener(recognizer, rate, **settings)
    events = []
    for start in range(0, len(samples), block):
        events += listener.accept(samples[start : start + block])
    return events + listener.finish()


def finals(events: list[Event]) -> list[Final]:
    return [event for event in events if isinstance(event, Final)]


def recognize_segments(recognizer: Recognizer, samples: np.ndarray, rate: int = 16_000) -> list[tuple]:
    """Return the words of each segment as recognized offline."""
    waveform = torch.cat(list(resample_blocks([torch.from_numpy(samples)], rate)))
    segmenter = CausalSegmenter(recognizer.segmentation)
    *ticks, last = waveform.split(TICK_SAMPLES)
    pieces = [*itertools.chain.from_iterable(map(segmenter.advance, ticks)), *segmenter.advance(last, is_end=True)]
    delay = EmissionDelay()
    words = [tuple(recognizer.recognize([piece], delay)[0]) for piece in pieces if recognizer.is_long_enough(piece)]
    return [each for each in words if each]


def recording_at_rate(rate: int) -> np.ndarray:
    return torchaudio.functional.resample(torch.from_numpy(recording()), 16_000, rate).numpy()


@pytest.mark.parametrize("block", [160, 1_601, 48_000, 10**6])
def test_finals_equal_the_recognizer_for_any_block_size(trained, block):
    actual = finals(listen(trained.recognizer, recording(), block))
    expected = recognize_segments(trained.recognizer, recording())
    assert [final.words for final in actual] == expected
    assert len(actual) == len(SENTENCES)
    references = [" ".join(words) for words in SENTENCES]
    assert error_rates(references, [final.text for final in actual]).cer < 0.2
    # Negative control: other samples give other words.
    assert [final.words for final in finals(listen(trained.recognizer, recording()[24_000:], block))] != expected


def test_blocks_of_one_sample_give_the_same_finals(trained):
    samples = recording()[:20_000]
    result = finals(listen(trained.recognizer, samples, 1))
    assert result and [final.words for final in result] == recognize_segments(trained.recognizer, samples)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_finals_equal_the_recognizer_at_any_sample_rate(trained, rate):
    samples = recording_at_rate(rate)
    expected = recognize_segments(trained.recognizer, samples, rate)
    for block in (777, 3 * rate):
        actual = finals(listen(trained.recognizer, samples, block, rate))
        assert [final.text for final in actual] == [" ".join(word.text for word in words) for words in expected]
        starts = [word.start for final in actual for word in final.words]
        assert starts == pytest.approx([word.start for words in expected for word in words], abs=0.05)
    # Negative control: the rate matters.
    wrong = finals(listen(trained.recognizer, samples, 777, 2 * rate))
    assert [final.text for final in wrong] != [final.text for final in actual]


@pytest.mark.parametrize("block", [160, 3_000])
def test_stereo_of_opposite_phases_gives_the_finals_of_one_channel(block, trained):
    samples = recording()
    opposite = np.stack([samples, -samples], axis=1)
    expected = recognize_segments(trained.recognizer, samples)
    assert expected and trained.recognizer.transcribe(opposite) == trained.recognizer.transcribe(samples)
    assert [final.words for final in finals(listen(trained.recognizer, opposite, block))] == expected
    # Negative control: the mean of the channels is silent.
    assert not finals(listen(trained.recognizer, opposite.mean(axis=1), block))


def test_another_number_of_channels_is_rejected(trained):
    listener = Listener(trained.recognizer, 16_000)
    listener.accept(np.zeros((1000, 2), dtype=np.float32))
    with pytest.raises(DataError, match="changed from 2 to 1"):
        listener.accept(np.zeros(1000, dtype=np.float32))
    listener.accept(np.zeros((1000, 2), dtype=np.float32))
    listener.finish()


def test_int16_stereo_gives_the_same_finals_as_mono_float(trained):
    samples = recording()
    stereo = np.stack([samples, samples], axis=1)
    expected = [final.text for final in finals(listen(trained.recognizer, samples, 4_000))]
    actual = finals(listen(trained.recognizer, (stereo * 32768).round().astype(np.int16), 4_000))
    assert [final.text for final in actual] == expected


def test_partials_appear_and_fixed_words_stay_until_the_final(trained):
    events = listen(trained.recognizer, recording(), 800)
    before: list[str] = []
    shown = 0
    for event in events:
        if isinstance(event, Final):
            texts = [word.text for word in event.words]
            assert event.changed == (texts[: len(before)] != before)
            before = []
            continue
        shown += bool(event.tentative)
        fixed = event.fixed.split()
        assert fixed[: len(before)] == before
        before = fixed
    assert shown > len(SENTENCES)
    assert any(event.fixed for event in events if isinstance(event, Partial))
    # Negative control: tentative words do change.
    words = [event.tentative.split()[:1] for event in events if isinstance(event, Partial)]
    assert any(a and b and a != b for a, b in itertools.pairwise(words))


def test_local_agreement_only_appends_and_never_fixes_the_last_word():
    generator = np.random.default_rng(0)
    changes = 0
    for _ in range(200):
        agreement = LocalAgreement()
        before: list[str] = []
        for length in range(1, 12):
            words = [f"w{place}" for place in range(length)]
            words[int(generator.integers(length))] = "other"
            agreement.update(words)
            assert agreement.fixed[: len(before)] == before
            assert len(agreement.fixed) + len(agreement.tentative) >= 1 and agreement.tentative
            # Negative control: without local agreement, this pass would replace fixed words.
            changes += words[: len(before)] != before
            before = list(agreement.fixed)
    assert changes > 100


def test_two_agreeing_passes_fix_words():
    agreement = LocalAgreement()
    for words, fixed in (("a b", ""), ("a b", "a"), ("x c d", "a"), ("a b c d", "a"), ("a b c d", "a b c")):
        agreement.update(words.split())
        assert " ".join(agreement.fixed) == fixed
    agreement.settle(["a", "b", "c", "e"])
    assert agreement.fixed == ["a", "b", "c", "e"] and agreement.tentative == []
    agreement.fixed = ["a", "b"]
    assert not agreement.finish(["a", "b", "c"], is_cut=False)
    agreement.fixed = ["a", "b", "c"]
    assert not agreement.finish(["a", "b"], is_cut=True)
    assert agreement.fixed == ["c"]
    assert agreement.finish(["d"], is_cut=False)


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_word_needs_one_more_pass_for_each_differing_decoding(differing):
    agreement = LocalAgreement()
    views = [["a", "x", "c"]] * differing + [["a", "b", "c"], ["a", "b", "d"]]
    needed = 2 + differing
    for number in range(1, needed + 1):
        assert agreement.fixed == (["a"] if number > 2 else [])
        agreement.update(["a", "b", "c"], views)
    assert agreement.fixed == ["a", "b"]


def test_short_speech_is_decoded_longer(trained):
    recognizer = trained.recognizer
    speech = recognizer.speech_model
    whole = torch.from_numpy(tones(("उदक", "घर", "शाळा", "बाजार", "एक", "दोन", "तीन")))
    short = whole[: round(0.8 * STABLE_SECONDS * 16_000)]
    views = []
    for longer in lengthen(short):
        encoded, _ = speech.encode(longer[None], (len(longer),))
        frames = speech.architecture.framing.encoded_length(len(short))
        (tokens,) = greedy_ctc(speech.model, encoded[:, :frames], (frames,))
        views.append(speech.tokenizer.decode(tokens))
    assert len(views) == 3 and recognizer.recognize_prefix(short).views == tuple(views)
    # Negative control: longer speech has one decoding, of itself.
    long = whole.repeat(3)[: round(STABLE_SECONDS * 16_000)]
    (tokens,) = greedy_ctc(speech.model, *speech.encode(long[None], (len(long),)))
    prefix = recognizer.recognize_prefix(long)
    assert prefix.views == () and prefix.text == speech.tokenizer.decode(tokens)


def test_speech_is_continued_by_its_mirror_image_or_after_a_gap():
    waveform = torch.arange(1.0, 16_001.0)
    shorter, longer, repeated = lengthen(waveform)
    assert torch.equal(shorter, torch.cat([waveform, waveform.flip(0)]))
    assert torch.equal(longer, torch.cat([shorter, waveform]))
    assert torch.equal(repeated[:17_600], torch.cat([waveform, torch.zeros(1600)]))
    assert torch.equal(repeated[17_600:33_600], waveform) and len(repeated) == 48_000
    # Speech longer than the first duration is not cut.
    assert torch.equal(lengthen(waveform.repeat(5)[:40_000])[0], waveform.repeat(5)[:40_000])


def test_pause_is_decoded_once_and_again_if_speech_resumes(trained, monkeypatch):
    decoded = []
    recognize = Recognizer.recognize
    monkeypatch.setattr(
        Recognizer, "recognize", lambda self, *given: decoded.append(given[0]) or recognize(self, *given)
    )
    events = listen(trained.recognizer, recording(), 800)
    assert len(decoded) == len(finals(events)) == len(SENTENCES)
    for before, event in itertools.pairwise(events):
        if isinstance(event, Final):
            assert isinstance(before, Partial) and before.fixed.split()[-1:] == event.text.split()[-1:]
    # Speech that resumes after the decoding is decoded again.
    decoded.clear()
    word = tones(("शाळा", "बाजार"))
    resumed = np.concatenate([word, quiet(0.36), word, quiet(0.75)])
    (final,) = finals(listen(trained.recognizer, resumed, 800))
    assert len(decoded) == 2
    assert [final.words] == recognize_segments(trained.recognizer, resumed)


@pytest.mark.parametrize(
    ("words", "others", "count"),
    [("", "", 0), ("", "a b", 0), ("a b", "a b c", 2), ("a b", "a x b c", 3), ("a b", "b c", 1), ("a", "x y", 1)],
)
def test_prefix_is_matched_with_the_fewest_edits(words, others, count):
    assert matched_prefix(words.split(), others.split()) == count


def test_speech_without_pause_is_joined_from_cut_pieces(trained):
    words = tuple(itertools.chain.from_iterable(SENTENCES)) * 2
    spoken = tones(words)
    recognizer = dataclasses.replace(trained.recognizer, segmentation=build_segmentation(3.0, 0.4))
    result = finals(listen(recognizer, spoken, 1_600))
    assert len(result) > 2
    assert [final.words for final in result] == recognize_segments(recognizer, spoken)
    whole = trained.recognizer.transcribe(spoken).text
    assert error_rates([whole], [" ".join(final.text for final in result)]).wer <= 0.2


def test_words_carried_over_a_cut_do_not_start_the_next_sentence(trained):
    listener = Listener(trained.recognizer, 16_000)
    listener.accept(quiet(0.5))
    listener._agreement.fixed = ["carried"]  # as a cut leaves them, if no speech follows
    listener.accept(quiet(0.5))
    events = listener.accept(recording()) + listener.finish()
    assert not any("carried" in event.fixed for event in events if isinstance(event, Partial))
    assert not any(event.changed for event in events if isinstance(event, Final))


def test_passes_replaced_within_a_block_are_skipped(trained, monkeypatch):
    passes = []
    greedy = Recognizer.recognize_prefix
    monkeypatch.setattr(Recognizer, "recognize_prefix", lambda self, w: passes.append(len(w)) or greedy(self, w))
    one_block = listen(trained.recognizer, recording(), 10**6)
    skipped = len(passes)
    passes.clear()
    every = listen(trained.recognizer, recording(), 10**6, skips_passes=False)
    assert skipped <= 2 < len(passes)
    passes.clear()
    never = listen(trained.recognizer, recording(), 160, every=None)
    assert not passes and len(never) == len(SENTENCES)
    texts = [[final.text for final in finals(events)] for events in (one_block, every, never)]
    assert texts[0] == texts[1] == texts[2]
    # Passes at fixed sample counts equal those of small blocks.
    assert every == listen(trained.recognizer, recording(), 160)


@pytest.mark.parametrize("level", [0.0, 10**-2.0, 10**-3.5])
def test_silence_has_no_events(trained, level):
    assert listen(trained.recognizer, quiet(20, level), 1_600) == []
    # Negative control: two words in the background.
    spoken = quiet(6, level)
    spoken[64_000:] = 0
    word = tones(("शाळा", "बाजार"))
    spoken[32_000 : 32_000 + len(word)] += word
    assert len(finals(listen(trained.recognizer, spoken, 1_600))) == 1


def test_first_word_is_recognized_at_the_start_and_after_silence(trained):
    for before in (np.zeros(0, np.float32), np.zeros(160_000, np.float32), quiet(10)):
        events = listen(trained.recognizer, np.concatenate([before, recording()]), 1_600)
        assert finals(events)[0].text.split()[:1] == ["एक"]


def test_listener_memory_does_not_grow_with_time(trained):
    listener = Listener(trained.recognizer, 16_000, every=None)
    minute = np.concatenate([np.zeros(160_000, np.float32), quiet(20), recording(), quiet(10)])
    kept = []
    tracemalloc.start()
    for _ in range(3):
        for start in range(0, len(minute), 8_000):
            listener.accept(minute[start : start + 8_000])
        kept.append((tracemalloc.get_traced_memory()[0], listener.buffered_samples))
    tracemalloc.stop()
    assert len(listener.finals) == 3 * len(SENTENCES)
    assert kept[-1][0] - kept[1][0] < 2**17
    assert kept[-1][1] <= kept[1][1] + TICK_SAMPLES


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 32_767.0])
def test_invalid_samples_are_rejected_and_the_recording_continues(trained, value):
    listener = Listener(trained.recognizer, 16_000)
    samples = recording()
    bad = samples[:1_000].copy()
    bad[500] = value
    with pytest.raises(DataError, match=r"NaN or infinite|not between -1 and 1"):
        listener.accept(bad)
    events = listener.accept(samples) + listener.finish()
    assert len(finals(events)) == len(SENTENCES)


@pytest.mark.parametrize("rate", [0, 3_999, 384_001, 400_000])
def test_sample_rate_outside_limits_is_rejected(trained, rate):
    with pytest.raises(DataError, match=rf"sample rate {rate} Hz"):
        Listener(trained.recognizer, rate)


@pytest.mark.parametrize("samples", [["a"], np.zeros((2, 2, 2)), np.zeros(4, np.uint8), np.zeros(4, bool)])
def test_arrays_that_are_not_samples_are_rejected(trained, samples):
    with pytest.raises(DataError):
        Listener(trained.recognizer, 16_000).accept(samples)


def test_empty_recording_gives_no_events(trained):
    listener = Listener(trained.recognizer, 16_000)
    assert listener.accept(np.zeros(0, np.float32)) == []
    assert listener.finish() == [] and listener.finish() == []
    with pytest.raises(ValueError):
        listener.accept(np.zeros(1, np.float32))


def test_whisper_uses_temperature_fallback_only_for_finals(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    from konkanivani.inference.whisper_generation import FallbackDecode
    from tests.whisper.parts import write_small_folder

    folder = write_small_folder(tmp_path / "whisper")
    recognizer_settings = PretrainedConfig(pretrained=str(folder), language="mr")
    recognizer = build_recognizer("", DecodingConfig(), "cpu", pretrained=recognizer_settings)
    assert isinstance(recognizer.decode, FallbackDecode)
    with pytest.raises(UsageError, match=r"--longest_piece 60 is longer than the model's window of 2 s"):
        build_recognizer("", DecodingConfig(), "cpu", 60.0, pretrained=recognizer_settings)
    falls = []
    fallback = FallbackDecode.__call__
    monkeypatch.setattr(
        FallbackDecode, "__call__", lambda self, *given: falls.append(len(given[1])) or fallback(self, *given)
    )
    listener = Listener(recognizer, 16_000)
    samples = recording()[:36_000]
    events = [*listener.accept(samples[:12_000]), *listener.accept(samples[12_000:]), *listener.finish()]
    pieces = len(falls)
    assert 0 < pieces <= 3
    assert [final.words for final in finals(events)] == recognize_segments(recognizer, samples)
