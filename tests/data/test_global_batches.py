"""Epoch plans, the stream of global batches, and the lengths on which both rely."""

import dataclasses
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st

from konkanivani.config import AugmentConfig, FeatureConfig
from konkanivani.data.audio.files import AudioSource
from konkanivani.data.audio.waveform import change_rate, load_audio, one_thread
from konkanivani.data.batching import (
    Cursor,
    EpochPlanner,
    Example,
    GlobalBatch,
    choose_subset,
    collate,
    plan_evaluation,
    same_size,
    split_into_micro_batches,
)
from konkanivani.data.dataset import EvalDataset, TrainDataset, choose_speed, perturb_speed
from konkanivani.data.filtering import Limits
from konkanivani.data.index import ARRAYS, ManifestIndex, Utterance
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.manifest import Manifest, Rejection, Rejections, read_manifest, write_manifest
from konkanivani.data.text import OUR_TOKENS, train_tokenizer
from konkanivani.errors import DataError, ResourceError
from konkanivani.lengths import Framing, ctc_frames_needed, speed_perturbed_samples, subsampled_length
from konkanivani.models.conformer import Subsampling
from konkanivani.models.front_end import FrontEnd, SpecAugment
from konkanivani.randomness import utterance_generator
from tests.conftest import Corpus
from tests.timeouts import PROCESS_TIMEOUT

FRAMING = Framing(FeatureConfig())

DURATIONS = np.random.default_rng(0).uniform(0.5, 15, size=103)

# Epoch plan


def planner(count: int = 103, global_batch_size: int = 8, seed: int = 1) -> EpochPlanner:
    return EpochPlanner(DURATIONS[:count], global_batch_size, seed)


def as_lists(plan: list[np.ndarray]) -> list[list[int]]:
    return [global_batch.tolist() for global_batch in plan]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 103), st.integers(1, 20), st.integers(0, 5), st.integers(0, 2**63 - 1))
def test_epoch_is_partitioned_into_full_global_batches_and_a_last_one(count, global_batch_size, epoch, seed):
    plan = list(planner(count, global_batch_size, seed).plan_epoch(epoch))
    assert sorted(index for global_batch in plan for index in global_batch) == list(range(count))
    assert all(len(global_batch) == global_batch_size for global_batch in plan[:-1])
    assert 1 <= len(plan[-1]) <= global_batch_size
    assert len(plan) == planner(count, global_batch_size).global_batches_per_epoch()


def test_epoch_plan_is_determined_by_seed_and_epoch():
    plans = [as_lists(planner(seed=seed).plan_epoch(epoch)) for seed in (1, 2) for epoch in range(4)]
    again = [as_lists(planner(seed=seed).plan_epoch(epoch)) for seed in (2, 1) for epoch in (3, 2, 1, 0)]
    assert plans == again[::-1]
    assert all(one != other for i, one in enumerate(plans) for other in plans[:i])
    global_batches = [{frozenset(global_batch) for global_batch in plan} for plan in plans]
    assert len(global_batches[0] & global_batches[1]) <= 2  # other utterances are grouped, not only in another order


def test_global_batch_contains_utterances_of_similar_length():
    plan = planner().plan_epoch(0)
    spread = np.mean([np.ptp(DURATIONS[global_batch]) for global_batch in plan])
    shuffled = np.random.default_rng(1).permutation(103)
    by_chance = np.mean([np.ptp(DURATIONS[shuffled[i : i + 8]]) for i in range(0, 103, 8)])
    assert spread < 0.6 * by_chance


def test_shortest_first_reorders_only_the_first_epoch():
    sorted_first = dataclasses.replace(planner(), shortest_first=True)
    first, shuffled = (as_lists(one.plan_epoch(0)) for one in (sorted_first, planner()))
    assert sorted(first) == sorted(shuffled) and first[-1] == shuffled[-1]
    rising, by_chance = (np.corrcoef(range(12), [DURATIONS[w].mean() for w in p[:-1]])[0, 1] for p in (first, shuffled))
    assert rising > 0.9 > by_chance
    assert as_lists(sorted_first.plan_epoch(1)) == as_lists(planner().plan_epoch(1))


def test_digest_changes_with_every_planner_setting():
    digests = {planner(*shape).digest() for shape in ((103, 8, 1), (102, 8, 1), (103, 7, 1), (103, 8, 2))}
    assert len(digests | {dataclasses.replace(planner(), shortest_first=True).digest()}) == 5
    assert planner().digest() == planner().digest()


def test_evaluation_batches_are_longest_first_within_seconds_limit():
    plan = plan_evaluation(DURATIONS, 40.0)
    assert sorted(index for batch in plan for index in batch) == list(range(103))
    longest = [DURATIONS[batch[0]] for batch in plan]
    assert longest == sorted(longest, reverse=True)
    assert all(len(batch) * DURATIONS[batch].max() <= 40.0 for batch in plan)
    assert [len(batch) for batch in plan_evaluation(DURATIONS, 0.1)] == [1] * 103


def test_subset_is_reproducible_sorted_and_of_requested_size():
    assert choose_subset(200, 10, 7).tolist() == choose_subset(200, 10, 7).tolist()
    assert choose_subset(200, 10, 7).tolist() != choose_subset(200, 10, 8).tolist()
    for percent, size in ((100, 200), (50, 100), (0.01, 1)):
        chosen = choose_subset(200, percent, 7)
        assert len(set(chosen.tolist())) == size and (np.diff(chosen) > 0).all()
    assert set(choose_subset(200, 10, 7)) <= set(choose_subset(200, 20, 7))


# Global batches and micro-batches


def make_examples(lengths: list[int]) -> list[Example]:
    return [Example(f"u{i}", torch.full((n,), float(i + 1)), [4 + i] * (1 + i % 3), i) for i, n in enumerate(lengths)]


def test_global_batch_is_split_into_micro_batches_by_length():
    global_batch = split_into_micro_batches(make_examples([800, 100, 500, 300, 900]), same_size(2), OUR_TOKENS)
    lengths = [list(batch.sample_lengths) for batch in global_batch.micro_batches]
    assert lengths == [[100, 300], [500, 800], [900]]
    assert (global_batch.utterances, global_batch.tokens) == (5, 1 + 2 + 3 + 1 + 2)
    assert global_batch.audio_seconds == 2600 / 16_000
    assert global_batch.padding_share == pytest.approx(1 - 2600 / (600 + 1600 + 900))


def test_collate_pads_waveforms_and_tokens_at_the_end():
    batch = collate(make_examples([3, 5]), OUR_TOKENS)
    assert batch.waveforms.tolist() == [[1, 1, 1, 0, 0], [2, 2, 2, 2, 2]]
    assert batch.tokens.tolist() == [[4, 0], [5, 5]]
    assert batch.decoder_tokens.tolist() == [[2, 4, 0], [2, 5, 5]]
    assert batch.targets.tolist() == [[4, 3, -1], [5, 5, 3]]
    assert (batch.token_lengths, batch.augment_seeds) == ((1, 2), (0, 1))


# Stream of global batches

BEGINNING = Cursor(0, 0)


@pytest.fixture(scope="module")
def train_dataset(corpus: Corpus) -> TrainDataset:
    utterances = list(read_manifest(corpus.manifest("train")))
    tokenizer = train_tokenizer([u.text for u in utterances], "char", 100)
    return TrainDataset(utterances, tokenizer, (0.9, 1.0, 1.1), seed=3)


def stream(
    train_dataset: TrainDataset, workers: int, cursor: Cursor = BEGINNING, timeout: float = PROCESS_TIMEOUT
) -> Iterator[tuple[GlobalBatch, Cursor]]:
    plan = EpochPlanner(np.array([u.duration for u in train_dataset.utterances]), 4, seed=3)
    rejections = Rejections(None, most=0.5)
    columns = (np.zeros(len(train_dataset.utterances), kind) for kind in ARRAYS.values())
    rejections.begin(Manifest(train_dataset.manifest, ManifestIndex(*columns, broken=(), sketch=(), folder=None)))
    loader = LoaderConfig(workers, timeout, pin_memory=False)
    return GlobalBatchStream(train_dataset, plan, same_size(2), loader, rejections).from_cursor(cursor)


def first(global_batches: Iterator[tuple[GlobalBatch, Cursor]], count: int) -> list[tuple[GlobalBatch, Cursor]]:
    """Return the first global batches and close the stream."""
    taken = list(islice(global_batches, count))
    global_batches.close()
    return taken


def is_same(one: GlobalBatch, other: GlobalBatch) -> bool:
    def parts(global_batch: GlobalBatch) -> list[tuple]:
        return [(b.utterance_ids, b.augment_seeds, b.sample_lengths) for b in global_batch.micro_batches]

    def tensors(global_batch: GlobalBatch) -> list[torch.Tensor]:
        return [tensor for batch in global_batch.micro_batches for tensor in batch.tensors()]

    pairs = zip(tensors(one), tensors(other), strict=True)
    return parts(one) == parts(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_stream_from_cursor_equals_tail_for_any_worker_count(train_dataset):
    whole = first(stream(train_dataset, 0), 17)  # 7 global batches per epoch
    assert [cursor for _, cursor in whole][5:8] == [Cursor(0, 6), Cursor(1, 0), Cursor(1, 1)]
    for workers, skipped in ((0, 3), (0, 7), (2, 0), (2, 10)):
        cursor = whole[skipped - 1][1] if skipped else Cursor(0, 0)
        tail = first(stream(train_dataset, workers, cursor), 17 - skipped)
        for (global_batch, behind), (expected, expected_behind) in zip(tail, whole[skipped:], strict=True):
            assert behind == expected_behind and is_same(global_batch, expected)
    assert multiprocessing.active_children() == []


def shared_mappings() -> int:
    """Return the number of memory mappings shared with the workers."""
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/torch_")


def test_global_batch_uses_one_shared_memory_mapping(train_dataset):
    before, global_batches = shared_mappings(), stream(train_dataset, 1)
    held, mappings = [], []
    for _ in range(3):
        held.append(next(global_batches)[0])
        mappings.append(shared_mappings() - before)
    assert all(len(global_batch.micro_batches) == 2 for global_batch in held)
    assert mappings[2] - mappings[1] == mappings[1] - mappings[0] == 1
    apart = [tensor.clone().share_memory_() for tensor in held[0].micro_batches[0].tensors()]
    # One mapping per tensor: the count can be larger.
    assert shared_mappings() - before - mappings[2] == len(apart) == 4
    global_batches.close()


def test_negative_control_another_epoch_has_other_global_batches(train_dataset):
    here = first(stream(train_dataset, 0), 7)
    later = first(stream(train_dataset, 0, Cursor(1, 0)), 7)
    assert not any(is_same(one, other) for (one, _), (other, _) in zip(here, later, strict=True))
    for epoch in (here, later):
        batches = [batch for global_batch, _ in epoch for batch in global_batch.micro_batches]
        assert sorted(i for batch in batches for i in batch.utterance_ids) == sorted(
            u.id for u in train_dataset.utterances
        )


def test_unreadable_global_batch_still_ends_its_epoch(train_dataset, tmp_path):
    """The last global batch of the epoch is one utterance, whose file is missing."""
    utterances = list(train_dataset.utterances[:5])
    planner = EpochPlanner(np.array([u.duration for u in utterances]), 4, seed=3)
    (last,) = planner.plan_epoch(0)[-1]
    utterances[last] = dataclasses.replace(utterances[last], audio_path=str(tmp_path / "gone.flac"))
    speech = TrainDataset(utterances, train_dataset.tokenizer, (1.0,), seed=3)
    taken = first(stream(speech, 0), 3)
    assert [cursor for _, cursor in taken] == [Cursor(0, 1), Cursor(1, 0), Cursor(1, 1)]
    assert [global_batch is None for global_batch, _ in taken][:2] == [False, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_audio_files_raise_data_error_and_stop_workers(train_dataset, workers, tmp_path):
    absent = [Utterance(f"gone{row}.flac", str(tmp_path / "gone"), 2.0, "एक", row=row) for row in range(1, 5)]
    changed_dataset = TrainDataset(absent, train_dataset.tokenizer, (1.0,), 3)
    with pytest.raises(DataError, match=r"4 of the 4 rows of .*\n  row \d, gone\d.flac: it does not exist"):
        next(stream(changed_dataset, workers))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_utterance_is_skipped_and_reported_once(train_dataset, workers, tmp_path, capsys):
    missing = dataclasses.replace(train_dataset.utterances[3], audio_path=str(tmp_path / "gone"), roots=None)
    changed_dataset = dataclasses.replace(
        train_dataset, utterances=[*train_dataset.utterances[:3], missing, *train_dataset.utterances[4:]]
    )
    global_batches = stream(changed_dataset, workers)
    for (global_batch, behind), (expected, expected_behind) in zip(
        first(global_batches, 15), first(stream(train_dataset, workers), 15), strict=True
    ):
        ids = [i for batch in global_batch.micro_batches for i in batch.utterance_ids]
        expected_ids = [i for batch in expected.micro_batches for i in batch.utterance_ids]
        assert behind == expected_behind and ids == [i for i in expected_ids if i != missing.id]
        assert global_batch.utterances == len(ids)
    output = capsys.readouterr().out
    assert output.count(missing.id) == 1 and "it does not exist" in output


def hang() -> None:
    time.sleep(2 * PROCESS_TIMEOUT)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fail", [hang, die])
def test_hanging_or_killed_worker_raises_error_with_utterance_id(train_dataset, fail, monkeypatch):
    monkeypatch.setattr(
        "konkanivani.data.dataset.load_audio", lambda source: fail() if source.path == "x" else load_audio(source)
    )
    failing = dataclasses.replace(train_dataset.utterances[5], audio_path="x")
    changed_dataset = dataclasses.replace(
        train_dataset, utterances=[*train_dataset.utterances[:5], failing, *train_dataset.utterances[6:]]
    )
    with pytest.raises(ResourceError, match=rf"while reading .*{re.escape(failing.id)}"):
        first(stream(changed_dataset, 2, timeout=2.0), 10)
    assert multiprocessing.active_children() == []


# Lengths


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60_000), st.integers(50, 200))
def test_predicted_speed_perturbed_length_equals_resampled_length(samples, percent):
    perturbed = perturb_speed(torch.zeros(samples), percent / 100)
    assert len(perturbed) == speed_perturbed_samples(samples, percent / 100)


@pytest.mark.parametrize("rates", [(90, 100), (110, 100), (8_000, 16_000), (44_100, 16_000), (48_000, 16_000)])
@pytest.mark.parametrize("samples", [1, 3_999, 4_000, 4_001, 43_210])
def test_change_rate_equals_torchaudio_resample(rates, samples):
    waveform = torch.randn(samples, generator=torch.Generator().manual_seed(samples))
    changed = change_rate(waveform, *rates)

    def equals_torchaudio(waveform: torch.Tensor) -> bool:
        reference = torchaudio.functional.resample(waveform, *rates)
        return changed.shape == reference.shape and torch.allclose(changed, reference, atol=1e-6, rtol=0)

    assert equals_torchaudio(waveform)
    assert not equals_torchaudio(torch.cat([waveform[:-1], waveform[-1:] + 0.1]))  # negative control


def test_faster_speed_raises_the_pitch():
    time = torch.arange(16_000) / 16_000
    fast = perturb_speed(torch.sin(2 * torch.pi * 440 * time), 1.1)
    spectrum = torch.fft.rfft(fast * torch.hann_window(len(fast))).abs()
    assert spectrum.argmax() * 16_000 / len(fast) == pytest.approx(484, abs=2)


@pytest.fixture(scope="module")
def front_end() -> FrontEnd:
    return FrontEnd(FeatureConfig(), AugmentConfig())


SUBSAMPLING = Subsampling(80, 2, 4)


@settings(max_examples=80, deadline=None)
@given(samples=st.integers(512, 40_000))
def test_predicted_feature_and_encoder_lengths_equal_tensor_shapes(front_end, samples):
    features, lengths = front_end(torch.randn(1, samples), (samples,), None)
    assert features.shape == (1, FRAMING.feature_length(samples), 80)
    assert lengths == (FRAMING.feature_length(samples),)
    if features.shape[1] >= 7:
        assert SUBSAMPLING(features).shape[1] == subsampled_length(features.shape[1])
    else:
        assert subsampled_length(features.shape[1]) == 0


def test_lengths_are_never_negative():
    assert min(map(FRAMING.feature_length, range(3000))) == min(map(subsampled_length, range(300))) == 0
    assert [*map(FRAMING.feature_length, (511, 512)), *map(subsampled_length, (6, 7))] == [0, 1, 0, 1]
    assert FRAMING.feature_length(0) == subsampled_length(0) == 0


def test_ctc_frames_needed_counts_tokens_and_blanks_between_repeats():
    assert [ctc_frames_needed(tokens) for tokens in ([], [5], [5, 6], [5, 5], [5, 5, 5, 6])] == [0, 1, 2, 3, 6]


# Augmentation


def test_speed_perturbation_does_not_depend_on_thread_count():
    waveform, results = torch.randn(30_000, generator=torch.Generator().manual_seed(0)), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(perturb_speed(waveform, 0.9))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_one_thread_restores_thread_count_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_speeds_are_drawn_evenly_by_epoch_and_utterance():
    def draw(epoch: int, number: int) -> float:
        return choose_speed((0.9, 1.0, 1.1), utterance_generator(3, epoch, f"u{number}", "speed"))

    drawn = [draw(0, number) for number in range(300)]
    assert drawn == [draw(0, number) for number in range(300)] != [draw(1, number) for number in range(300)]
    assert all(70 < drawn.count(speed) < 130 for speed in (0.9, 1.0, 1.1))


def test_spec_augment_masks_depend_only_on_seed_and_length():
    augment = SpecAugment(AugmentConfig(time_mask_share=0.3), 80)
    time, frequency = augment.draw_masks((11, 22), [40, 90])
    alone, alone_frequency = augment.draw_masks((11,), [40])
    assert torch.equal(time[0, :40], alone[0]) and torch.equal(frequency[0], alone_frequency[0])
    assert not time[0, 40:].any()
    others = [augment.draw_masks((seed,), [40]) for seed in range(20)]
    assert len({(t.numpy().tobytes(), f.numpy().tobytes()) for t, f in others}) > 15


# Audio files


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("name, subtype", [("a.wav", "PCM_16"), ("a.flac", "PCM_16"), ("a.wav", "FLOAT")])
def test_loading_resamples_to_16_khz_and_keeps_level_and_pitch(rate, name, subtype, tmp_path):
    time = np.arange(int(1.5 * rate)) / rate
    soundfile.write(tmp_path / name, 0.5 * np.sin(2 * np.pi * 1000 * time), rate, subtype=subtype)
    waveform = load_audio(AudioSource(str(tmp_path / name)))
    assert waveform.dtype == torch.float32 and abs(len(waveform) - 24_000) <= 1
    assert waveform[1000:-1000].square().mean().sqrt().item() == pytest.approx(0.5 / 2**0.5, rel=0.01)
    spectrum = torch.fft.rfft(waveform[:16_000] * torch.hann_window(16_000)).abs()
    assert spectrum.argmax().item() == pytest.approx(1000, abs=1)


def test_channels_are_averaged(tmp_path):
    left, right = np.full(8000, 0.5), np.full(8000, -0.25)
    soundfile.write(tmp_path / "stereo.wav", np.stack([left, right], axis=1), 16_000, subtype="FLOAT")
    assert torch.equal(load_audio(AudioSource(str(tmp_path / "stereo.wav"))), torch.full((8000,), 0.125))


# Manifests


def test_written_manifest_reads_back_equal(tmp_path: Path):
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    utterances = [
        Utterance("a", str(tmp_path / "a"), 1.25, 'एक "दोन"', "आवय", "seen"),
        Utterance(str(tmp_path / "b"), str(tmp_path / "b"), 0.5, "तीन", offset=0.0),
        Utterance("c", str(tmp_path / "c"), 0.75, "चार", offset=2.5, byte_offset=512, byte_count=4096),
    ]
    write_manifest(tmp_path / "m.jsonl", utterances)
    assert list(read_manifest(tmp_path / "m.jsonl")) == utterances
    assert [u.row for u in read_manifest(tmp_path / "m.jsonl")] == [1, 2, 3]
    assert [u.id for u in utterances] == ["a", f"{tmp_path / 'b'}@0", "c#512@2.5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "m.jsonl"]


def test_file_too_short_for_its_text_is_rejected(train_dataset, tmp_path):
    """The manifest's duration has just enough frames for CTC; the file is 0.09 s shorter, which its row may be."""
    utterance = train_dataset.utterances[0]
    tokens = train_dataset.tokenizer.encode(utterance.text)
    limits = Limits(0.0, 30.0, 1000, fastest_speed=1.0)
    frames = np.array([ctc_frames_needed(tokens)])
    duration = next(d for d in np.arange(0.1, 10, 0.01) if not limits.frames_missing(np.array([d]), frames)[0])
    for name, seconds in (("whole", duration), ("short", duration - 0.09)):
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * np.ones(round(seconds * 16_000)), 16_000)
    rows = [
        Utterance(f"{name}.wav", str(tmp_path / f"{name}.wav"), float(duration), utterance.text, row=row)
        for row, name in enumerate(("whole", "short"), start=1)
    ]
    for speech, keys in (
        (TrainDataset(rows, train_dataset.tokenizer, (1.0,), 3, limits=limits), ((0, 0), (0, 1))),
        (EvalDataset(rows, train_dataset.tokenizer, limits=limits), (0, 1)),
    ):
        whole, short = (speech[key] for key in keys)
        assert isinstance(whole, Example) and isinstance(short, Rejection) and short.is_broken
        assert short.row == 2 and "CTC cannot align it" in short.reason
        unlimited = dataclasses.replace(speech, limits=None)  # negative control
        assert isinstance(unlimited[keys[1]], Example)
