"""Recording augmentation: determinism, independence of the kinds, lengths, and sources of babble."""

import dataclasses

import pytest
import torch

from konkanivani.config import AugmentConfig, PretrainedConfig, TrainConfig
from konkanivani.data import augmentation, dataset
from konkanivani.data.audio.waveform import speech_span
from konkanivani.data.augmentation import PROBABILITIES, RecordingAugmentation
from konkanivani.data.dataset import EvalDataset, TrainDataset
from konkanivani.data.filtering import Selection, check_utterances, training_limits
from konkanivani.data.manifest import Rejection, read_manifest
from konkanivani.data.text import train_tokenizer
from konkanivani.flags import CorpusSize, config_from_text, config_to_text, resolve
from konkanivani.lengths import SAMPLE_RATE
from tests.conftest import Corpus

KINDS = tuple(PROBABILITIES["light"])


def speech(seconds: float = 1.0) -> torch.Tensor:
    return 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(1))


def other_talker(generator: torch.Generator) -> torch.Tensor:
    return 0.1 * torch.randn(12_000, generator=generator)


def no_talker(generator: torch.Generator) -> torch.Tensor:
    raise AssertionError("another utterance is read")


def enable_only(monkeypatch: pytest.MonkeyPatch, *kinds: str, probability: float = 1.0) -> None:
    """Restrict the strength `light` to these kinds."""
    drawn = {kind: probability if kind in kinds else 0.0 for kind in KINDS}
    monkeypatch.setitem(augmentation.PROBABILITIES, "light", drawn)


def light(longest: float = 10.0, seed: int = 1) -> RecordingAugmentation:
    return RecordingAugmentation(seed, "light", longest)


def test_augmentation_none_returns_the_same_waveform():
    waveform = speech()
    assert RecordingAugmentation()(waveform, 0, "a", no_talker).waveform is waveform


@pytest.mark.parametrize("kind", ["clipping", "band", "level", "offset", "codec"])
def test_empty_waveform_stays_empty(kind, monkeypatch):
    enable_only(monkeypatch, kind)
    for number in range(5):
        assert light()(torch.zeros(0), 0, f"a{number}", no_talker).waveform.shape == (0,)


@pytest.mark.parametrize("strength", ["light", "strong"])
def test_augmentation_is_determined_by_seed_epoch_and_utterance(strength):
    def recorded(seed: int, epoch: int, utterance: str) -> list[torch.Tensor]:
        augment = RecordingAugmentation(seed, strength, 10.0)
        return [augment(speech(), epoch, f"{utterance}{n}", other_talker).waveform for n in range(20)]

    first = recorded(1, 0, "a")
    assert all(map(torch.equal, first, recorded(1, 0, "a")))
    for others in (recorded(2, 0, "a"), recorded(1, 1, "a"), recorded(1, 0, "b")):
        assert not all(map(torch.equal, first, others))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone_changes_the_waveform(kind, monkeypatch):
    enable_only(monkeypatch)
    assert torch.equal(light()(speech(), 0, "a", no_talker).waveform, speech())  # negative control
    enable_only(monkeypatch, kind)
    changed = light()(speech(), 0, "a", other_talker).waveform
    assert changed.isfinite().all() and not torch.equal(changed, speech())


def test_kinds_draw_independently_of_each_other(monkeypatch):
    enable_only(monkeypatch, "floor")
    noise = light()(speech(), 0, "a", no_talker).waveform - speech()
    enable_only(monkeypatch, "floor", "offset")
    both = light()(speech(), 0, "a", no_talker).waveform - speech()
    assert (both - noise).std() < 1e-6 < abs(float((both - noise).mean()))


def test_strong_has_higher_probabilities_than_light():
    assert set(PROBABILITIES["strong"]) == set(KINDS)
    assert all(PROBABILITIES["strong"][kind] > PROBABILITIES["light"][kind] for kind in KINDS)


@pytest.mark.parametrize("longest", [0.5, 1.0, 1.5, 10.0])
def test_silence_keeps_utterances_within_the_maximum_length(longest, monkeypatch):
    enable_only(monkeypatch, "silence")
    seconds = [len(light(longest)(speech(), 0, str(n), no_talker).waveform) / SAMPLE_RATE for n in range(50)]
    assert max(seconds) <= max(longest, 1.0)
    assert min(seconds) >= 1.0
    assert max(seconds) > 0.9 * min(longest, 4.0)  # the allowance is used


def test_reported_delay_is_the_start_of_speech(monkeypatch):
    enable_only(monkeypatch, "silence")
    for number in range(20):
        recorded = light()(speech(), 0, str(number), no_talker)
        before = round(recorded.delay * SAMPLE_RATE)
        kept = recorded.waveform[before : before + SAMPLE_RATE]
        assert (kept - speech()).square().mean() <= 0.1 * speech().square().mean()
        if not recorded.waveform[:before].any():  # digital
            assert speech_span(recorded.waveform)[0] == pytest.approx(recorded.delay, abs=0.011)


def test_silence_is_digital_or_has_noise_with_or_without_noise_in_the_speech(monkeypatch):
    enable_only(monkeypatch, "silence")
    counts = {(False, False): 0, (True, False): 0, (True, True): 0}
    for number in range(60):
        recorded = light()(speech(), 0, str(number), no_talker)
        start = round(recorded.delay * SAMPLE_RATE)
        before = recorded.waveform[:start]
        assert not before.any() or (before != 0).float().mean() > 0.99
        is_speech_noisy = not torch.equal(recorded.waveform[start : start + SAMPLE_RATE], speech())
        counts[bool(before.any()), is_speech_noisy] += 1
    assert min(counts.values()) > 10


def test_noise_floor_stays_below_the_speech_of_quiet_recordings(monkeypatch):
    enable_only(monkeypatch, "floor")
    levels = []
    for decibels in (0.0, -40.0):
        quiet = speech() * 10 ** (decibels / 20)
        for number in range(20):
            added = light()(quiet, 0, str(number), no_talker).waveform - quiet
            levels.append(float(10 * (quiet.square().mean() / added.square().mean()).log10()))
    # Loud speech has a floor at -80 to -45 dBFS; of quiet speech, at -60 dBFS, many floors are limited.
    assert 20 < min(levels[:20]) and max(levels[:20]) > 40
    assert min(levels[20:]) == pytest.approx(10.0, abs=0.1) and max(levels[20:]) > 11


def test_babble_adds_the_speech_of_another_utterance(monkeypatch):
    enable_only(monkeypatch, "babble")
    pulses = torch.zeros(9_000)
    pulses[::90] = 1.0
    added = light()(speech(), 0, "a", lambda generator: pulses).waveform - speech()
    assert (added.abs() > 1e-4).float().mean() < 0.05  # only at the pulses of the babble
    missing = light()(speech(), 0, "a", lambda generator: None).waveform
    assert torch.equal(missing, speech())


def test_augmentation_auto_is_light_from_scratch_and_none_with_initial_weights():
    amount = CorpusSize(1.0, 1000)
    tuned = TrainConfig(pretrained=PretrainedConfig(pretrained="whisper-tiny"))
    assert resolve(TrainConfig(), amount).augment.augmentation == "light"
    assert resolve(tuned, amount).augment.augmentation == "none"
    given = AugmentConfig(augmentation="strong")
    assert resolve(TrainConfig(augment=given), amount).augment.augmentation == "strong"
    assert resolve(dataclasses.replace(tuned, augment=given), amount).augment.augmentation == "strong"


def test_config_without_augmentation_flag_resolves_to_none():
    lines = config_to_text(TrainConfig()).splitlines(keepends=True)
    older = "".join(line for line in lines if not line.startswith("--augmentation "))
    assert len(older) < len("".join(lines))
    assert config_from_text(older).augment.augmentation == "none"
    assert config_from_text("".join(lines)).augment.augmentation == AugmentConfig().augmentation


def training_set(corpus: Corpus) -> tuple[TrainDataset, Selection]:
    """Return the training set with light augmentation, and its utterances."""
    manifest = read_manifest(corpus.manifest("train"))
    tokenizer = train_tokenizer([row.text for row in manifest], "char", 100)
    limits = training_limits(resolve(TrainConfig(), CorpusSize(1.0, 10)))
    kept, _ = check_utterances(manifest, tokenizer, limits, "keep")
    return TrainDataset(kept, tokenizer, (1.0,), 1, manifest.path, recording=light()), kept


def test_babble_is_read_from_utterances_of_the_training_set(corpus, monkeypatch):
    enable_only(monkeypatch, "babble")
    augmented, kept = training_set(corpus)
    first, usual = augmented[0, 0], EvalDataset(kept, augmented.tokenizer, augmented.manifest)[0]
    assert len(first.waveform) == len(usual.waveform) and not torch.equal(first.waveform, usual.waveform)
    assert torch.equal(first.waveform, augmented[0, 0].waveform)
    assert not torch.equal(first.waveform, augmented[1, 0].waveform)
    read: list[str] = []

    def read_and_record(utterance, manifest):
        read.append(utterance.id)
        return usual_read(utterance, manifest)

    usual_read = dataset._read
    monkeypatch.setattr(dataset, "_read", read_and_record)
    assert torch.equal(augmented[0, 0].waveform, first.waveform)
    assert read[0] == kept[0].id and 2 <= len(read) <= 4
    assert set(read) <= {utterance.id for utterance in kept}


def test_unreadable_babble_utterance_is_skipped(corpus, monkeypatch):
    enable_only(monkeypatch, "babble")
    augmented, kept = training_set(corpus)
    usual_read = dataset._read

    def read_only_the_first(utterance, manifest):
        if utterance.id == kept[0].id:
            return usual_read(utterance, manifest)
        return Rejection(manifest, utterance.row, utterance.id, "unreadable", is_broken=True)

    usual = EvalDataset(kept, augmented.tokenizer, augmented.manifest)[0].waveform
    monkeypatch.setattr(dataset, "_read", read_only_the_first)
    results = [augmented[epoch, 0].waveform for epoch in range(5)]
    assert any(torch.equal(waveform, usual) for waveform in results)
