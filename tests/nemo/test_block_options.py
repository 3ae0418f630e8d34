"""A model with NeMo's parts can be trained, resumed, bundled, exported and used like any other."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.config import AugmentConfig, FeatureConfig, ModelConfig, TrainConfig
from konkanivani.data.filtering import training_limits
from konkanivani.flags import LEGACY_DEFAULTS
from konkanivani.inference.bundle import bundle_bytes, read_bundle
from konkanivani.inference.export import build_onnx, read_onnx
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.inference.write_exports import check_bundle, recognize_with
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.asr import BLANK
from konkanivani.models.conformer import keep_activations
from konkanivani.models.front_end import FrontEnd, described
from konkanivani.models.twin import twin_of
from konkanivani.ops.chunks import ChunkedRelativeSelfAttention
from konkanivani.ops.passes import optimize
from konkanivani.recipe.build import build_run
from konkanivani.training.loop import train
from tests.conftest import TINY_MODEL, Corpus, checked, mark_full, run_folders, run_script
from tests.inference.test_export import CPU, EXPORT, SHAPE, speech_model_of_shape, spoken
from tests.invariants.parts import OTHER_FEATURES, OTHER_PARTS
from tests.models.test_block_parts import layout_of, random_attention
from tests.run_setup import begin_run

FLAGS = (
    *("--attention_positions", "relative", "--convolution_norm", "none", "--subsampling", "striding"),
    *("--scaled_input", "--entry_norm", "False", "--biases", "False", "--log_floor_mode", "added"),
    *("--smallest_power", "5.96e-8", "--preemphasis", "0.97", "--window", "symmetric", "--frame_padding", "zeros"),
    *("--mel_scale", "slaney", "--std_ddof", "sample"),
    *("--dynamic_range", "0", "--dc_removal", "none", "--normalization", "utterance"),
)
PARTS = dataclasses.replace(OTHER_PARTS, d_model=32, subsampling_channels=8)
SHAPES = {  # by 4, as in AI4Bharat's Conformers, and by 8, as in FastConformers
    "striding": (PARTS, OTHER_FEATURES),
    "separable": (
        dataclasses.replace(PARTS, subsampling="separable", biases=True),
        dataclasses.replace(OTHER_FEATURES, frame_padding="zeros", mel_bins=128),
    ),
}


def speech_model_of(shape: ModelConfig, features: FeatureConfig) -> SpeechModel:
    """Return an untrained model whose best path has many tokens."""
    tokenizer = speech_model_of_shape(SHAPE).tokenizer
    torch.manual_seed(4)
    architecture = HybridArchitecture(shape, features, tokenizer.size)
    model = architecture.build().eval()
    optimize(model)
    with torch.no_grad():
        model.ctc_head.weight.mul_(2.0)
        model.ctc_head.bias[BLANK] = -1.0
    front_end = architecture.build_front_end(AugmentConfig())
    return SpeechModel(architecture, model, front_end, tokenizer, CPU, 20.0, "keep")


def test_model_with_nemo_parts_trains_resumes_and_exports(corpus: Corpus, tmp_path: Path):
    folder = (*run_folders(tmp_path), "--max_steps", "6", "--save_steps", "3", "--num_workers", "0")
    train(build_run(begin_run([*TINY_MODEL, *FLAGS, *corpus.flags(), *folder])))
    whole = read_checkpoint(tmp_path / "checkpoints" / "checkpoint_last.pt")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "checkpoints" / "checkpoint_previous.pt", tmp_path / "again" / "half.pt")
    assert 0 < read_checkpoint(tmp_path / "again" / "half.pt").step < whole.step == 6
    train(build_run(begin_run(["--resume", str(tmp_path / "again" / "half.pt")])))
    resumed = read_checkpoint(tmp_path / "again" / "checkpoint_last.pt")
    weights, others = whole.states["model"], resumed.states["model"]
    assert resumed.step == 6 and all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert "encoder.blocks.0.entry_norm.weight" not in weights and "encoder.blocks.1.entry_norm.weight" in weights

    checkpoint, bundle = str(tmp_path / "checkpoints" / "checkpoint_last.pt"), tmp_path / "m.safetensors"
    checked(run_script(EXPORT, "--checkpoint", checkpoint, "--bundle", str(bundle)))
    texts_of_both = [
        load_recognizer(path, device="cpu").transcribe(spoken(3.0).numpy()).text for path in (checkpoint, bundle)
    ]
    assert texts_of_both[0] == texts_of_both[1]
    changed = ("--resume", checkpoint, "--frame_padding", "none", *folder)
    other = run_script("training_scripts/train_konkanivani_asr.py", *changed)
    assert other.returncode == 4 and "--frame_padding is none here and zeros in the checkpoint" in other.stderr


@pytest.mark.parametrize("kind", SHAPES)
def test_bundle_restores_model_and_feature_settings(kind, tmp_path):
    expected_model = speech_model_of(*SHAPES[kind])
    (tmp_path / "a").write_bytes(bundle_bytes(expected_model))
    result = read_bundle(tmp_path / "a", CPU)
    assert (result.architecture.model, result.architecture.features) == SHAPES[kind]
    check_bundle(result, expected_model, tmp_path / "a")
    assert bundle_bytes(result) == (tmp_path / "a").read_bytes()
    front_ends = (result.front_end, FrontEnd(FeatureConfig(), AugmentConfig()))  # the second is the negative control
    lengths = [front_end(spoken(1.0)[None], (16_000,), None)[1] for front_end in front_ends]
    assert (
        lengths == [(expected_model.architecture.framing.feature_length(16_000),), (97,)] and lengths[0] != lengths[1]
    )


def test_default_settings_are_written_in_format_one():
    data = bundle_bytes(speech_model_of_shape(SHAPE, features=LEGACY_DEFAULTS.features))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = json.loads(header["__metadata__"]["konkanivani"])
    assert entry["format"] == 1 and "attention_positions" not in entry["model"]
    assert list(described(LEGACY_DEFAULTS.features)) == [
        *("sample_rate", "window", "mel_scale", "edges", "normalisation"),
        *("mel_bins", "fft_samples", "window_samples", "hop_samples", "smallest_power"),
    ]
    description = described(OTHER_FEATURES)
    assert "reflected" in description["edges"] and (description["preemphasis"], description["power_guard"]) == (
        0.97,
        "added",
    )


@pytest.mark.parametrize("kind", mark_full("striding", "separable"))  # separable by default: test_imported_model.py
def test_onnx_output_equals_model(kind, tmp_path):
    speech_model = speech_model_of(*SHAPES[kind])
    (tmp_path / "m.onnx").write_bytes(build_onnx(speech_model))
    onnx_model, framing = read_onnx(tmp_path / "m.onnx"), speech_model.architecture.framing
    alone = [spoken(seconds, seed) for seed, seconds in enumerate((0.41, 3.0, 1.3, 2.23, 7.001))]
    lengths = tuple(map(len, alone))
    waveforms = 0.3 * torch.randn(len(lengths), max(lengths) + 5000, generator=torch.Generator().manual_seed(4))
    for row, waveform in zip(waveforms, alone, strict=True):
        row[: len(waveform)] = waveform
    result, encoded_lengths = onnx_model.log_probabilities(waveforms, lengths)
    assert encoded_lengths == tuple(map(framing.encoded_length, lengths))
    with torch.no_grad():
        for row, waveform, length in zip(result, alone, encoded_lengths, strict=True):
            encoded, _ = speech_model.encode(waveform[None], (len(waveform),))
            expected_model = speech_model.model.ctc_head(encoded).log_softmax(dim=-1)[0]
            assert float((row[:length] - expected_model).abs().max()) < 1e-4
    recognize = recognize_with(speech_model)
    texts = [recognize(waveform[None], (len(waveform),))[0] for waveform in alone]
    assert onnx_model.recognize(waveforms, lengths) == texts and len(set(texts)) == len(texts)
    silent, none = onnx_model.log_probabilities(waveforms[:1, :100], (100,))
    assert none == (0,) and silent.isfinite().all()
    assert float(onnx_model.session.get_modelmeta().custom_metadata_map["frame_seconds"]) == framing.encoder_hop / 16e3


def test_ctc_frame_limit_follows_the_subsampling():
    """A second is 25 frames of 40 ms, and 13 of 80 ms, and the last of these extends beyond it."""
    shapes = [TrainConfig(model=shape, features=features) for shape, features in SHAPES.values()]
    augment = AugmentConfig(speed_perturbation=(1.0,))
    by_4, by_8 = (training_limits(dataclasses.replace(config, augment=augment)) for config in shapes)
    assert (int(by_4.encoder_frames(0.99)), int(by_8.encoder_frames(1.0))) == (25, 13)
    needed = np.array([13, 14, 25, 26])
    assert by_8.frames_missing(np.full(4, 1.0), needed).tolist() == [False, True, True, True]
    assert by_4.frames_missing(np.full(4, 0.99), needed).tolist() == [False, False, False, True]


@pytest.mark.parametrize(("wrap_block", "times"), [(keep_activations, 1), (RecomputePolicy("always")(1.0), 2)])
def test_relative_attention_is_recomputed_only_in_chunks(wrap_block, times, monkeypatch):
    """Only longer speech is computed in chunks, which adds one recomputation."""
    softmax, calls = torch.Tensor.softmax, []
    monkeypatch.setattr(torch.Tensor, "softmax", lambda scores, dim: (calls.append(dim), softmax(scores, dim))[1])
    attention, _ = random_attention()
    attention = twin_of(attention, ChunkedRelativeSelfAttention)
    x = torch.randn(1, 9, 12, dtype=torch.float64, requires_grad=True)
    for layout, expected in ((layout_of(x, None), times), (layout_of(x, None, chunk_frames=8), 2 * (times + 1))):
        calls.clear()
        wrap_block(0, attention)(x, layout).sum().backward()
        assert len(calls) == expected
