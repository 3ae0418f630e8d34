"""Features that do not depend on silence, DC offset and level, and storage of their settings."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors
import torch

from konkanivani.config import AugmentConfig, FeatureConfig, TrainConfig
from konkanivani.flags import LEGACY_DEFAULTS, config_from_text, config_to_text
from konkanivani.inference.bundle import bundle_bytes, read_bundle
from konkanivani.inference.onnx_graph import MatrixLogMel, RecognitionGraph
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.front_end import LogMel, described
from tests.inference.test_export import SHAPE, speech_model_of_shape, spoken
from tests.invariants.parts import double_parts, relative_difference, speeches
from tests.invariants.test_padding_is_invisible import BOUND, outputs

OLD = LEGACY_DEFAULTS.features
NEW = {
    kind: dataclasses.replace(OLD, normalization=kind, dynamic_range=80.0, dc_removal="frame", smallest_power=1e-16)
    for kind in ("utterance", "speech", "peak")
}
SILENCE_INVARIANT = ("speech", "peak")  # normalizations that silence does not change


def features(waveform: torch.Tensor, config: FeatureConfig) -> torch.Tensor:
    """Return features (T, F) of one waveform (S,)."""
    return LogMel(config)(waveform[None], (len(waveform),))[0][0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def reference_features(waveform: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """Return features (T, F) in float64 of the settings in NEW, computed frame by frame."""
    window = np.zeros(512)
    window[56:456] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([waveform[start : start + 512] for start in range(0, len(waveform) - 511, 160)])
    frames = frames - (frames @ window / window.sum())[:, None]
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    logs = np.log(np.maximum(1e-16, power @ LogMel(config).power.mel_scale.fb.double().numpy()))
    decibels = 10 * logs / np.log(10)
    decibels = np.maximum(decibels, decibels.max() - 80)
    if config.normalization == "peak":
        return 1.5 * ((decibels - decibels.max()) / 40 + 1)
    levels = 10 * np.log10((10 ** (decibels / 10)).sum(axis=1))
    weights = np.interp(levels - levels.max(), [-35, -25], [0, 1])
    weights = np.ones_like(weights) if config.normalization == "utterance" else weights
    centred = decibels - np.average(decibels, axis=0, weights=weights)
    return centred / np.sqrt(np.average(centred**2, axis=0, weights=weights))


@pytest.mark.parametrize("kind", NEW)
def test_features_equal_definition(kind):
    waveform = spoken(2.5) + 0.01
    actual = features(waveform, NEW[kind])
    expected = torch.from_numpy(reference_features(waveform.double().numpy(), NEW[kind]))
    assert distance(actual, expected) < 5e-3
    assert distance(features(waveform, OLD), expected) > 0.1  # negative control


@pytest.mark.parametrize("kind", SILENCE_INVARIANT)
def test_digital_silence_does_not_change_speech_features(kind):
    # Both have 0.1 s of silence at the edges, because the first and last frames of the silence contain speech too.
    waveform = torch.nn.functional.pad(spoken(2.0), (1_600, 1_600))
    silence = torch.zeros(16_000)
    longer = torch.cat([silence, waveform, silence])
    usual = features(waveform, NEW[kind])
    first = 16_000 // 160
    assert distance(features(longer, NEW[kind])[first : first + len(usual)], usual) < 1e-4
    old = features(waveform, OLD)
    assert distance(features(longer, OLD)[first : first + len(old)], old) > 0.5  # negative control


@pytest.mark.parametrize("kind", SILENCE_INVARIANT)
def test_trailing_noise_at_minus_60_db_does_not_change_speech_features(kind):
    noise = torch.randn(32_000, generator=torch.Generator().manual_seed(1))
    waveform = torch.nn.functional.pad(spoken(2.0), (0, 1_600))
    usual = features(waveform, NEW[kind])
    longer = torch.cat([waveform, 0.001 * noise])
    assert distance(features(longer, NEW[kind])[: len(usual) - 10], usual[: len(usual) - 10]) < 1e-3
    old = features(waveform, OLD)
    assert distance(features(longer, OLD)[: len(old) - 10], old[: len(old) - 10]) > 0.5  # negative control


@pytest.mark.parametrize("kind", NEW)
def test_dc_offset_and_level_do_not_change_features(kind):
    waveform = spoken(2.0)
    usual = features(waveform, NEW[kind])
    assert distance(features(waveform + 0.05, NEW[kind]), usual) < 0.02
    assert distance(features(0.02 * waveform, NEW[kind]), usual) < 1e-2
    assert distance(features(waveform + 0.05, OLD), features(waveform, OLD)) > 1.0  # negative control


@pytest.mark.parametrize("kind", NEW)
@pytest.mark.parametrize("samples", [0, 511, 512, 40_000])
def test_silence_and_short_waveforms_give_finite_features(kind, samples):
    log_mel = LogMel(NEW[kind])
    silence = torch.zeros(1, max(samples, 512))
    frames = log_mel.framing.feature_length(samples)
    if frames:  # training and recognition reject audio shorter than a frame
        assert log_mel(silence, (samples,))[0].isfinite().all()
    assert MatrixLogMel(log_mel)(silence, torch.tensor([frames])).isfinite().all()


@pytest.mark.parametrize("kind", NEW)
def test_outputs_are_equal_alone_and_in_a_batch(kind):
    parts = double_parts(features=NEW[kind])
    utterances = speeches(7)
    # Quiet and loud neighbours, and padding after the shorter ones.
    utterances = [
        dataclasses.replace(one, waveform=one.waveform * 10.0 ** -(number % 3)) for number, one in enumerate(utterances)
    ]
    alone, together = outputs(parts, utterances, 1), outputs(parts, utterances, 7)
    for name, pair in alone.items():
        for one, other in zip(pair, together[name], strict=True):
            assert one.shape == other.shape and relative_difference(one, other) < BOUND


@pytest.mark.parametrize("kind", NEW)
def test_padding_is_not_normalized_as_silence(kind):
    first, second = spoken(1.0), spoken(2.0, seed=1)
    waveforms = torch.zeros(2, len(second))
    waveforms[0, : len(first)], waveforms[1] = first, second
    result, lengths = LogMel(NEW[kind])(waveforms, (len(first), len(second)))
    assert distance(result[0, : lengths[0]], features(first, NEW[kind])) < 1e-5
    assert not result[0, lengths[0] :].any()


@pytest.mark.parametrize("kind", NEW)
def test_matrix_features_and_onnx_graph_equal_model(kind):
    waveform = spoken(2.5) + 0.01
    log_mel = LogMel(NEW[kind])
    expected, lengths = log_mel(waveform[None], (len(waveform),))
    assert distance(MatrixLogMel(log_mel)(waveform[None], torch.tensor(lengths)), expected) < 1e-3
    model = with_features(NEW[kind])
    with torch.no_grad():
        actual, frames = RecognitionGraph(model)(waveform[None], torch.tensor([len(waveform)]))
        encoded, _ = model.encode(waveform[None], (len(waveform),))
        expected = model.model.ctc_head(encoded).log_softmax(dim=-1)[0]
    assert frames.tolist() == [len(expected)]
    assert distance(actual[0, : len(expected)], expected) < 1e-3


def with_features(config: FeatureConfig) -> SpeechModel:
    model = speech_model_of_shape(SHAPE)
    assert isinstance(model.architecture, HybridArchitecture)
    architecture = dataclasses.replace(model.architecture, features=config)
    front_end = architecture.build_front_end(AugmentConfig())
    return dataclasses.replace(model, architecture=architecture, front_end=front_end)


@pytest.mark.parametrize("kind", NEW)
def test_bundle_keeps_feature_settings(kind, tmp_path):
    model = with_features(NEW[kind])
    path = tmp_path / "model.safetensors"
    path.write_bytes(bundle_bytes(model))
    read = read_bundle(path, torch.device("cpu"))
    assert isinstance(read.architecture, HybridArchitecture) and read.architecture.features == NEW[kind]
    waveform = spoken(1.5)
    actual, expected = (one.encode(waveform[None], (len(waveform),))[0] for one in (read, model))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("config", "number"), [(OLD, 1), (dataclasses.replace(OLD, preemphasis=0.97), 2), (NEW["speech"], 3)]
)
def test_bundle_uses_oldest_sufficient_format_version(config, number, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bundle_bytes(with_features(config)))
    with safetensors.safe_open(path, framework="pt") as file:
        entry = json.loads(file.metadata()["konkanivani"])
    assert entry["format"] == number
    assert ("normalization" in entry["features"]) == (number == 3)
    architecture = read_bundle(path, torch.device("cpu")).architecture
    assert isinstance(architecture, HybridArchitecture) and architecture.features == config


def test_checkpoint_without_settings_keeps_legacy_features():
    names = ("dynamic_range", "dc_removal", "normalization")
    lines = config_to_text(TrainConfig(features=OLD)).splitlines(keepends=True)
    older = "".join(line for line in lines if not line.startswith(tuple(f"--{name} " for name in names)))
    assert len(older.splitlines()) == len(lines) - len(names)
    assert config_from_text(older).features == OLD
    stored = TrainConfig(features=NEW["peak"])
    assert config_from_text(config_to_text(stored)).features == NEW["peak"]


def test_description_depends_on_feature_settings():
    words = {str(described(config)["normalisation"]) for config in NEW.values()}
    assert len(words) == 3
    assert "dynamic_range" not in described(OLD) and described(NEW["speech"])["dynamic_range"] == 80.0
