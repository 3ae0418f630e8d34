"""Whisper on speech without padding: padding has no effect, memory follows the speech, the folder stores the option."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from konkanivani import lengths as lengths_of_batches
from konkanivani.config import AugmentConfig, PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.data.batching import Example
from konkanivani.decoding.decode import greedy_decode
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import config_from_text, config_to_text, contradictions
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import step_flop
from konkanivani.models.conformer import keep_activations
from konkanivani.models.whisper import model as network
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.export import PretrainedWhisper, TunedWhisper, write_whisper_folder
from konkanivani.models.whisper.folder import read_whisper_architecture, read_whisper_folder
from konkanivani.planning.sizes import planned_architecture
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import build_tracer
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.step import StepParts, train_step
from tests.invariants.parts import measured_peak, relative_difference
from tests.run_setup import parse_flags
from tests.whisper.folders import KINDS, read_reference
from tests.whisper.test_training import (
    ARCHITECTURE,
    CPU,
    MATRIX_PRODUCTS,
    ONLY_TENSORS,
    SHAPE,
    UnconstrainedTokens,
    global_batch,
    gradients,
    speeches,
    step_config,
)

SPEECH = dataclasses.replace(ARCHITECTURE, audio_context="speech")
BOUND = 1e-9
GENERATION = "generation_config.json"


def parts_of(
    architecture: WhisperArchitecture = SPEECH, dtype: torch.dtype = torch.float64, recompute: str = "never"
) -> StepParts:
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return build_step_parts(step_config(recompute), architecture, CPU, 100)
    finally:
        torch.set_default_dtype(torch.float32)


def outputs(parts: StepParts, utterances: list[Example], size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the encoded frames and logits of the valid positions of each utterance."""
    values = {}
    with torch.no_grad():
        for batch in global_batch(size, utterances).micro_batches:
            output, _ = parts.forward(batch)
            logits = parts.model.decoder.output(output.decoded)
            for row, name in enumerate(batch.utterance_ids):
                frames, tokens = output.encoded_lengths[row], batch.token_lengths[row] + 1
                values[name] = output.encoded[row, :frames], logits[row, :tokens]
    return values


def max_relative_difference(one: dict, other: dict) -> float:
    """Return the largest relative difference between two outputs of the same utterances."""
    assert one.keys() == other.keys()
    pairs = [pair for name in one for pair in zip(one[name], other[name], strict=True)]
    assert all(mine.shape == theirs.shape for mine, theirs in pairs)
    return max(relative_difference(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("augmented", [False, True])
def test_outputs_do_not_depend_on_batch_size(augmented):
    parts, utterances = parts_of(), speeches(6, augmented=augmented)
    alone = outputs(parts, utterances, 1)
    assert [len(alone[one.utterance_id][0]) for one in utterances] == [
        math.ceil(len(one.waveform) / 320) for one in utterances
    ]
    assert max(max_relative_difference(alone, outputs(parts, utterances, size)) for size in (2, 6)) < BOUND


@pytest.mark.parametrize("hidden", ["padding_or_none", "score_mask_for"])
def test_negative_control_without_mask_padding_changes_outputs(hidden, monkeypatch):
    parts, utterances = parts_of(), speeches(6)
    alone = outputs(parts, utterances, 1)
    monkeypatch.setattr(network, hidden, lambda *_: None)
    assert max_relative_difference(alone, outputs(parts, utterances, 6)) > 1e-6


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_gradients_do_not_depend_on_micro_batch_size(recompute):
    parts = parts_of(recompute=recompute)
    whole = gradients(parts, global_batch(5, speeches(5)))
    for size in (1, 2):
        batch = gradients(parts, global_batch(size, speeches(5)))
        assert max(relative_difference(whole[name], batch[name]) for name in whole) < BOUND
    other = gradients(parts_of(ARCHITECTURE), global_batch(5, speeches(5)))
    # Negative control: padded windows give other gradients.
    assert max(relative_difference(whole[name], other[name]) for name in whole) > 1e-3


def test_greedy_search_does_not_depend_on_batch_size():
    parts, decode, results = parts_of(), greedy_decode(SPEECH, UnconstrainedTokens()), []
    for parameter in parts.model.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)
    utterances = speeches(6, augmented=False)
    for size in (1, 6):
        values = {}
        for batch in global_batch(size, utterances).micro_batches:
            features, lengths = parts.forward.front_end(batch.waveforms, batch.sample_lengths, None)
            with torch.no_grad():
                encoded = parts.model.encoder(features, lengths, keep_activations)
            values |= dict(zip(batch.utterance_ids, decode(parts.model, *encoded), strict=True))
        results.append(values)
    assert results[0] == results[1] and len({tuple(tokens) for tokens in results[0].values()}) > 1


@pytest.mark.parametrize("samples", [5_001, 6_400, 16_000])
def test_encoder_equals_transformers_layers_on_speech_frames(samples, whisper_folders):
    folder = read_whisper_folder(whisper_folders["tiny"])
    theirs = read_reference(folder.path).double().model.encoder
    architecture = dataclasses.replace(folder.architecture, audio_context="speech")
    model = architecture.build().double().eval()
    model.load_state_dict(folder.weights())
    features, lengths = architecture.build_front_end(AugmentConfig())(torch.randn(1, samples), (samples,), None)
    assert lengths == (-(-samples // 160),) == features.shape[1:2]
    features = features.double()
    with torch.no_grad():
        x = F.gelu(theirs.conv2(F.gelu(theirs.conv1(features.transpose(1, 2))))).transpose(1, 2)
        x = x + theirs.embed_positions.weight[: x.shape[1]]
        for layer in theirs.layers:
            result = layer(x, None)
            x = result[0] if isinstance(result, tuple) else result
        encoded, encoded_lengths = model.encoder(features, lengths, keep_activations)
    assert encoded_lengths == (encoded.shape[1],) == (-(-lengths[0] // 2),)
    assert relative_difference(theirs.layer_norm(x), encoded) < 1e-12


def test_speech_features_start_the_window_and_full_window_has_no_mask(monkeypatch):
    waves, lengths = torch.randn(2, 9_000), (9_000, 8_000)
    whole, _ = ARCHITECTURE.build_front_end(AugmentConfig())(waves, lengths, None)
    speech, frames = SPEECH.build_front_end(AugmentConfig())(waves, lengths, None)
    assert frames == (57, 50) and torch.equal(speech, whole[:, :57])
    monkeypatch.setattr(lengths_of_batches, "padding_mask", None)
    window_model, model = ARCHITECTURE.build(), SPEECH.build()
    model.load_state_dict(window_model.state_dict())
    (plain, _), (same, _) = (each.encoder(whole, (100, 100), keep_activations) for each in (window_model, model))
    assert torch.equal(plain, same)  # a full window needs no mask
    with pytest.raises(TypeError):
        model.encoder(speech, frames, keep_activations)
    with pytest.raises(ValueError, match="57 frames do not match the window of 100"):
        window_model.encoder(speech, frames, keep_activations)
    with pytest.raises(ValueError, match="102 frames do not match the window of 100"):
        model.encoder(torch.randn(1, 102, 80), (102,), keep_activations)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_planned_peak_is_within_2_percent_of_measured(recompute):
    config, batch = step_config(recompute), global_batch(2, speeches(4, torch.float32, augmented=False))
    measured = measured_peak(parts_of(SPEECH, torch.float32, recompute), batch)
    planned = build_tracer(config, SPEECH, ONLY_TENSORS).trace_global_batch(batch, RecomputePolicy(recompute)).bytes
    assert 0.999 * measured <= planned <= 1.02 * measured


def test_planned_memory_of_short_speech_is_below_full_window():
    shape = dataclasses.replace(SHAPE, source_positions=1500)
    peaks = []
    for context in ("window", "speech"):
        tracer = build_tracer(step_config(), WhisperArchitecture(shape, audio_context=context), ONLY_TENSORS)
        peak = tracer.trace(BatchShape(2, 3.0, 20), RecomputePolicy("never"))
        peaks.append(peak.bytes - peak.state)
    assert peaks[1] < 0.25 * peaks[0]


def test_flop_formulas_equal_counted_flops():
    utterances = speeches(3, torch.float32, augmented=False)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        train_step(parts_of(SPEECH, torch.float32), global_batch(3, utterances), 0)
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flop for kind, flop in counts.items() if kind in MATRIX_PRODUCTS)
    samples = tuple(len(one.waveform) for one in utterances)
    layers = SPEECH.forward_layers(samples, 20)
    dense = tuple(layer for layer in layers if layer.is_dense and "convolution" not in layer.name)
    log_mel = SPEECH.build_front_end(AugmentConfig()).log_mel
    frame_count = sum(log_mel(torch.zeros(1, count), (count,))[0].shape[2] for count in samples)
    (head,) = (layer.flop for layer in layers if layer.name == "decoder's output")  # the loss computes it once more
    assert counted == step_flop(dense, False) + head + 2 * frame_count * SHAPE.mel_bins * 201
    assert step_flop(layers, False) < step_flop(ARCHITECTURE.forward_layers(samples, 20), False)


def test_flag_overrides_folder_and_checkpoint_stores_audio_context(whisper_folders, tmp_path):
    plain, marked = whisper_folders["tiny"], tmp_path / "marked"
    base = read_whisper_folder(plain)
    write_whisper_folder(base, base.weights(), marked, "speech")
    before, after = (json.loads((path / GENERATION).read_text()) for path in (plain, marked))
    assert after == before | {"audio_context": "speech"} and "audio_context" not in before
    read_reference(marked)
    for folder, flag, expected in (
        (plain, None, "window"),
        (plain, "speech", "speech"),
        (marked, None, "speech"),
        (marked, "window", "window"),
    ):
        config = PretrainedConfig(pretrained=str(folder), audio_context=flag)
        pretrained = PretrainedWhisper(read_whisper_folder(folder))
        assert pretrained.complete_settings(config).audio_context == expected
        assert pretrained.architecture(TuningConfig(), config).audio_context == expected
        assert planned_architecture(TrainConfig(pretrained=config)).audio_context == expected
    write_whisper_folder(read_whisper_folder(marked), base.weights(), tmp_path / "back", "window")
    assert read_whisper_architecture(tmp_path / "back").audio_context == "window"
    stored = parse_flags(["--pretrained", str(marked), "--audio_context", "speech"])
    assert config_from_text(config_to_text(stored)) == stored and contradictions(stored, stored) == []
    other = dataclasses.replace(stored, pretrained=dataclasses.replace(stored.pretrained, audio_context="window"))
    assert contradictions(stored, other) == ["--audio_context is window here and speech in the checkpoint"]


def test_audio_context_is_stored_without_generation_config(whisper_folders, tmp_path):
    shutil.copytree(whisper_folders["tiny"], tmp_path / "base")
    (tmp_path / "base" / GENERATION).unlink()
    base = read_whisper_folder(tmp_path / "base")
    write_whisper_folder(base, base.weights(), tmp_path / "out", "speech")
    assert not (tmp_path / "out" / GENERATION).exists()
    assert read_whisper_folder(tmp_path / "out").architecture.audio_context == "speech"


def test_invalid_audio_context_is_rejected_and_export_has_a_note(whisper_folders, tmp_path):
    folder = Path(shutil.copytree(whisper_folders["tiny"], tmp_path / "folder"))
    settings = json.loads((folder / GENERATION).read_text())
    (folder / GENERATION).write_text(json.dumps(settings | {"audio_context": ["speech"]}))
    with pytest.raises(CheckpointError, match=r"audio_context in its generation_config\.json is \['speech'\]"):
        read_whisper_folder(folder)
    with pytest.raises(UsageError, match="--audio_context has no effect without --pretrained"):
        parse_flags(["--audio_context", "speech"])
    note = TunedWhisper(TrainConfig(), SPEECH, {}, b"").note()
    assert (
        "--audio-ctx of whisper.cpp: 50 frames per second" in note
        and TunedWhisper(TrainConfig(), ARCHITECTURE, {}, b"").note() is None
    )
    assert KINDS["tiny"].mel_bins == SHAPE.mel_bins
