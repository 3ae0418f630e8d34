"""Invariant 3: from the waveform on, an utterance has the same output alone and in any batch (1e-9, float64)."""

import dataclasses
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from konkanivani.data.augmentation import RecordingAugmentation
from konkanivani.data.batching import Cursor, EpochPlanner, GlobalBatch, same_size
from konkanivani.data.dataset import TrainDataset, read_noise_reverb
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.loading import GlobalBatchStream
from konkanivani.data.manifest import Rejections, read_manifest
from konkanivani.data.text import train_tokenizer
from konkanivani.models.attention import SequenceLayout
from konkanivani.training.step import StepParts
from tests.conftest import Corpus, mark_full, write_augmentation, write_shards
from tests.invariants.parts import KINDS, double_parts, global_batch, relative_difference, speeches
from tests.run_setup import parse_flags

BOUND = 1e-9


pytestmark = pytest.mark.usefixtures("is_packed")


def outputs(parts: StepParts, spoken: list, batch_size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the CTC and attention logits of the valid positions of each utterance."""
    return batch_outputs(parts, global_batch(spoken, batch_size))


def batch_outputs(parts: StepParts, spoken: GlobalBatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits of `outputs` for a global batch that is already split into micro-batches."""
    values = {}
    with torch.no_grad():
        for batch in spoken.micro_batches:
            output, _ = parts.forward(batch)
            for row, name in enumerate(batch.utterance_ids):
                frames, tokens = output.encoded_lengths[row], batch.token_lengths[row] + 1
                ctc, attention = parts.model.ctc_head(output.encoded), parts.model.decoder.output(output.decoded)
                values[name] = ctc[row, :frames], attention[row, :tokens]
    return values


def parts_of(kind: str) -> StepParts:
    """Return step parts whose subsampling bias makes a convolution non-zero on zero input."""
    parts = double_parts(KINDS[kind])
    for stage in getattr(parts.model.encoder.subsampling, "stages", ()):
        torch.nn.init.constant_(stage[-1].bias, 0.5)
    return parts


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_equal_alone_and_in_a_batch(kind, augmented):
    parts = parts_of(kind)
    spoken = speeches(7, augmented=augmented)
    alone, together = outputs(parts, spoken, 1), outputs(parts, spoken, 7)
    for name, pair in alone.items():
        for one, other in zip(pair, together[name], strict=True):
            assert one.shape == other.shape and one.abs().max() > 0
            assert relative_difference(one, other) < BOUND


@pytest.mark.parametrize("workers", [0, 2, *mark_full(1, 4)])
def test_augmented_shards_give_equal_logits_in_any_micro_batch(corpus, workers, tmp_path):
    speech = augmented_dataset(corpus, tmp_path)
    parts = double_parts(vocab_size=speech.tokenizer.size)
    global_batches = {size: epoch_of(speech, size, workers) for size in (1, 4)}
    results = [
        {
            name: pair
            for global_batch in global_batches[size]
            for name, pair in batch_outputs(parts, to_float64(global_batch)).items()
        }
        for size in (1, 4)
    ]
    assert results[0].keys() == results[1].keys() and len(results[0]) == 26
    for name, pair in results[0].items():
        for one, other in zip(pair, results[1][name], strict=True):
            assert one.shape == other.shape and relative_difference(one, other) < BOUND


def augmented_dataset(corpus: Corpus, directory: Path) -> TrainDataset:
    """Return the corpus from shards, with noise and room impulse responses."""
    shards, more = write_shards(corpus, directory / "shards"), write_augmentation(directory / "sounds")
    utterances = list(read_manifest(shards.manifest("train")))
    tokenizer = train_tokenizer([u.text for u in utterances], "char", 100)
    augment = parse_flags(list(more)).augment
    return TrainDataset(
        utterances,
        tokenizer,
        (0.9, 1.1),
        3,
        noise_reverb=read_noise_reverb(augment, 3),
        recording=RecordingAugmentation(3, "strong", 4.0),
    )


def epoch_of(speech: TrainDataset, size: int, workers: int) -> list[GlobalBatch]:
    """Return the global batches of an epoch in micro-batches of `size` utterances."""
    planner = EpochPlanner(np.array([u.duration for u in speech.utterances]), 4, seed=3)
    loader = LoaderConfig(workers, 60.0, pin_memory=False)
    stream = GlobalBatchStream(speech, planner, same_size(size), loader, Rejections(None, most=0.0))
    with closing(stream.from_cursor(Cursor(0, 0))) as global_batches:
        return [global_batch for global_batch, _ in islice(global_batches, planner.global_batches_per_epoch())]


def to_float64(global_batch: GlobalBatch) -> GlobalBatch:
    return dataclasses.replace(
        global_batch,
        micro_batches=tuple(
            dataclasses.replace(batch, waveforms=batch.waveforms.double()) for batch in global_batch.micro_batches
        ),
    )


def test_packed_encoder_computes_no_padding_frames(is_packed):
    parts, shapes = double_parts(), []
    parts.model.encoder.blocks[1].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:2]))
    batch = global_batch(speeches(5), 5).micro_batches[0]
    output, _ = parts.forward(batch)
    frames = sum(output.encoded_lengths)
    assert shapes == [(1, frames) if is_packed else (5, max(output.encoded_lengths))] and frames < 5 * shapes[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_values_in_padding_do_not_change_losses(kind):
    parts = parts_of(kind)
    batch = global_batch(speeches(4), 4).micro_batches[0]
    filled = batch.waveforms.clone()
    for row, length in enumerate(batch.sample_lengths):
        filled[row, length:] = 1e3
    with torch.no_grad():
        _, clean = parts.forward(batch)
        _, dirty = parts.forward(dataclasses.replace(batch, waveforms=filled))
    for clean_sum, dirty_sum in zip(clean, dirty, strict=True):
        assert relative_difference(clean_sum, dirty_sum) < BOUND


def test_negative_control_without_convolution_mask_logits_differ(monkeypatch):
    parts = double_parts()
    spoken = speeches(7)
    alone = outputs(parts, spoken, 1)
    for block in parts.model.encoder.blocks:
        forward = block.convolution.forward
        monkeypatch.setattr(
            block.convolution,
            "forward",
            lambda x, layout, forward=forward: forward(x, SequenceLayout(layout.positions)),
        )
    together = outputs(parts, spoken, 7)
    assert max(relative_difference(alone[name][0], together[name][0]) for name in alone) > 1e-6


@pytest.mark.parametrize("kind", ["other parts", "other parts, by 8"])
def test_negative_control_without_subsampling_mask_logits_differ(kind, monkeypatch):
    parts, spoken = parts_of(kind), speeches(7)
    alone, subsampling = outputs(parts, spoken, 1), parts.model.encoder.subsampling
    forward = subsampling.forward
    monkeypatch.setattr(subsampling, "forward", lambda features, _layout: forward(features))
    together = outputs(parts, spoken, 7)
    assert max(relative_difference(alone[name][0], together[name][0]) for name in alone) > 1e-6
