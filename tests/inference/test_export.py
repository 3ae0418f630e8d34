"""Exports equal their model, and damaged or hostile files are rejected."""

import base64
import dataclasses
import importlib
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch

from benchmarks.accuracy import WAYS, Way, measure_ways
from konkanivani.checkpoints.checkpoint import Checkpoint, write_checkpoint
from konkanivani.config import AugmentConfig, FeatureConfig, ModelConfig, TrainConfig
from konkanivani.data.text import Tokenizer, train_tokenizer
from konkanivani.errors import CheckpointError, NumericsError, ResourceError
from konkanivani.files import atomic_write
from konkanivani.flags import LEGACY_DEFAULTS, config_to_text
from konkanivani.inference import bundle, onnx_graph
from konkanivani.inference.bundle import Contents, bundle_bytes, is_bundle, read_bundle
from konkanivani.inference.export import TOLERANCE, OnnxModel, check_onnx, quantize, read_onnx, token_texts
from konkanivani.inference.onnx_graph import MatrixLogMel, RecognitionGraph, require_onnx
from konkanivani.inference.recognizer import load_recognizer
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.inference.write_exports import check_bundle, check_signal, recognize_with
from konkanivani.lengths import Framing, subsampled_length
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.front_end import LogMel, described
from konkanivani.ops.passes import optimize
from tests.conftest import ROOT, WORDS, Corpus, checked, run_script, speak
from tests.timeouts import PROCESS_TIMEOUT

FRAMING = Framing(FeatureConfig())
OLDER = LEGACY_DEFAULTS.features  # the features that bundles of the first format describe
FEATURES = described(OLDER)
CPU = torch.device("cpu")
EXPORT = "training_scripts/export_asr.py"
SHAPE = ModelConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, attention_heads=2, convolution_kernel=7, subsampling_channels=8
)
TEXTS = [f"{first} {second}" for first in WORDS for second in WORDS]


def speech_model_of_shape(shape: ModelConfig, seed: int = 0, features: FeatureConfig | None = None) -> SpeechModel:
    """Return an untrained model whose best path has many tokens."""
    tokenizer = train_tokenizer(TEXTS, "char", 100)
    torch.manual_seed(seed)
    architecture = HybridArchitecture(shape, features or FeatureConfig(), tokenizer.size)
    model = architecture.build().eval()
    optimize(model)
    with torch.no_grad():
        model.ctc_head.weight.mul_(5.0)
    front_end = architecture.build_front_end(AugmentConfig())
    return SpeechModel(architecture, model, front_end, tokenizer, CPU, 20.0, "keep")


def as_checkpoint(speech_model: SpeechModel) -> Checkpoint:
    config = TrainConfig(model=speech_model.model.config)
    states = {"model": speech_model.model.state_dict()}
    tokenizer = speech_model.tokenizer
    return Checkpoint(config_to_text(config), tokenizer.model, tokenizer.size, 0, 0, states)


@pytest.fixture(scope="module")
def speech_model() -> SpeechModel:
    return speech_model_of_shape(SHAPE)


@pytest.fixture(scope="module")
def older_speech_model() -> SpeechModel:
    """Return a model whose bundle has the first format."""
    return speech_model_of_shape(SHAPE, features=OLDER)


@dataclass(frozen=True)
class Run:
    """Folder with a checkpoint and the output of its export."""

    directory: Path
    checkpoint: Path
    lines: list[str]


@pytest.fixture(scope="module")
def exported(speech_model: SpeechModel, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("exported")
    checkpoint = directory / "checkpoint_averaged.pt"  # weights only
    write_checkpoint(checkpoint, as_checkpoint(speech_model))
    files = ("--bundle", "m.safetensors", "--onnx", "m.onnx", "--int8", "m.int8.onnx")
    words = "--checkpoint", str(checkpoint), *files, "--manifest", corpus.manifest("test")
    done = checked(run_script(EXPORT, *words, cwd=directory))
    assert done.stderr == ""
    return Run(directory, checkpoint, done.stdout.splitlines())


@pytest.fixture(scope="module")
def onnx_bytes(exported: Run) -> bytes:
    return (exported.directory / "m.onnx").read_bytes()


@pytest.fixture(scope="module")
def onnx_model(exported: Run) -> OnnxModel:
    return read_onnx(exported.directory / "m.onnx")


def spoken(seconds: float, seed: int = 0) -> torch.Tensor:
    """Return words (S,) with a little noise, then silence up to `seconds`."""
    generator = np.random.default_rng(seed)
    samples = round(seconds * 16_000)
    words = speak([WORDS[i] for i in generator.integers(len(WORDS), size=1 + int(seconds))])[:samples]
    audio = np.pad(words, (0, samples - len(words))) + 0.003 * generator.standard_normal(samples)
    return torch.from_numpy(audio.astype(np.float32))


@pytest.fixture(scope="module")
def path(speech_model: SpeechModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid bundle."""
    path = tmp_path_factory.mktemp("bundle") / "model.safetensors"
    path.write_bytes(bundle_bytes(speech_model))
    return path


class TestBundle:
    @pytest.mark.parametrize(
        "shape",
        [SHAPE, dataclasses.replace(SHAPE, encoder_type="transformer", feedforward_dim=48, decoder_layers=2)],
        ids=["conformer", "transformer"],
    )
    def test_bundle_reads_back_equal(self, shape, tmp_path):
        wanted = dataclasses.replace(speech_model_of_shape(shape), longest_seconds=12.5, digits="spell")
        (tmp_path / "a").write_bytes(bundle_bytes(wanted))
        result = read_bundle(tmp_path / "a", CPU)
        assert result.model.config == shape and not result.model.training
        assert (result.tokenizer.model, result.longest_seconds, result.digits) == (
            wanted.tokenizer.model,
            12.5,
            "spell",
        )
        weights = result.model.state_dict()
        assert weights.keys() == wanted.model.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.model.state_dict().items())
        check_bundle(result, wanted, tmp_path / "a")
        (tmp_path / "b").write_bytes(bundle_bytes(result))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert sorted(tmp_path.iterdir()) == [tmp_path / "a", tmp_path / "b"]

    def test_bundle_of_another_model_is_detected(self, path, tmp_path):
        with pytest.raises(NumericsError, match="gives different output"):
            check_bundle(read_bundle(path, CPU), speech_model_of_shape(SHAPE, seed=1), path)

    def test_bundle_is_recognised_by_name_or_first_bytes(self, path, tmp_path, speech_model):
        write_checkpoint(tmp_path / "checkpoint.pt", as_checkpoint(speech_model))
        (tmp_path / "renamed").write_bytes(path.read_bytes())
        (tmp_path / "damaged.safetensors").write_text("nothing")
        (tmp_path / "text").write_text("nothing")
        assert is_bundle(path) and is_bundle(tmp_path / "renamed") and is_bundle(tmp_path / "damaged.safetensors")
        assert not any(is_bundle(tmp_path / name) for name in ("checkpoint.pt", "text", "absent", "."))

    def test_any_flipped_bit_in_bundle_is_detected(self, path, tmp_path):
        data, flipped = bytearray(path.read_bytes()), tmp_path / "flipped"
        header = 8 + int.from_bytes(data[:8], "little")
        generator = np.random.default_rng(2)
        places = [*range(12), *generator.integers(header, size=150), *generator.integers(header, len(data), size=50)]
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << int(generator.integers(8))
            flipped.write_bytes(changed)
            with pytest.raises(CheckpointError) as raised:
                read_bundle(flipped, CPU)
            assert "\n" not in str(raised.value)
        flipped.write_bytes(data)
        read_bundle(flipped, CPU)

    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
    def test_truncated_bundle_is_rejected(self, path, tmp_path, share):
        data = path.read_bytes()
        (tmp_path / "short").write_bytes(data[: int(share * len(data))])
        with pytest.raises(CheckpointError, match="damaged or not a KonkaniVani"):
            read_bundle(tmp_path / "short", CPU)

    @pytest.mark.parametrize(
        "content",
        [
            b"no bundle at all, but a text of more than eight letters",
            struct.pack("<Q", 2**60) + b"{}",
            struct.pack("<Q", 2**64 - 1) + b"{}",
            struct.pack("<Q", 200_000) + b"[" * 200_000,
            struct.pack("<Q", 2) + b"{}",
            struct.pack("<Q", 4) + b"null",
        ],
        ids=["text", "length 2^60", "length 2^64 - 1", "deep", "empty", "null"],
    )
    def test_file_that_is_not_a_bundle_is_rejected(self, content, tmp_path):
        (tmp_path / "other.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="other.safetensors is (damaged or not a|not a) KonkaniVani bundle"):
            read_bundle(tmp_path / "other.safetensors", CPU)

    @pytest.mark.parametrize(
        "offsets",
        [((0, 8), (4, 12)), ((0, 8), (16, 24)), ((8, 0), (8, 16)), ((0, 8), (8, 2**62)), ((0, 8), (-8, 0))],
        ids=["overlapping", "gap", "descending", "beyond the end", "negative"],
    )
    def test_invalid_tensor_offsets_are_rejected(self, offsets, tmp_path):
        tensors = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in zip("ab", offsets, strict=True)
        }
        header = json.dumps({"__metadata__": {"konkanivani": '{"format": 1}'}, **tensors}).encode()
        (tmp_path / "bundle").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        with pytest.raises(CheckpointError, match="damaged or not a KonkaniVani"):
            read_bundle(tmp_path / "bundle", CPU)

    def test_missing_or_unreadable_bundle_is_reported(self, path, tmp_path, monkeypatch):
        with pytest.raises(CheckpointError, match="There is no bundle at"):
            read_bundle(tmp_path / "absent", CPU)

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(bundle.safetensors, "safe_open", refuse)
        with pytest.raises(ResourceError, match="permission denied"):
            read_bundle(path, CPU)


def write_forged_bundle(path: Path, description: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a bundle with this content and a correct checksum."""
    entry = description | {"sha256": Contents(description, tensors).checksum}
    path.write_bytes(safetensors.torch.save(tensors, {"konkanivani": json.dumps(entry)}))
    return path


Change = Callable[[dict, dict[str, torch.Tensor]], object]


def with_dimension(name: str, value: object) -> Change:
    return lambda description, tensors: description["model"].update({name: value})


def with_entry(name: str, value: object) -> Change:
    return lambda description, tensors: description.update({name: value})


def with_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda description, tensors: tensors.update({name: make(tensors[name])})


CHANGES: dict[str, tuple[Change, str]] = {
    "d_model of 2^40": (with_dimension("d_model", 2**40), "dimensions are out of range"),
    "feedforward_dim of 10^400": (
        with_dimension("feedforward_dim", 10**400),
        "dimensions are out of range|not a KonkaniVani bundle",
    ),
    "d_model of 10^400 + 1": (with_dimension("d_model", 10**400 + 1), "--d_model 1000"),
    "10^9 encoder layers": (with_dimension("encoder_layers", 10**9), "dimensions are out of range"),
    "more encoder layers than weights": (with_dimension("encoder_layers", 3), "do not match its dimensions"),
    "larger d_model than weights": (with_dimension("d_model", 36), "do not match its dimensions"),
    "d_model not divisible by heads": (with_dimension("attention_heads", 5), "must be a multiple"),
    "even kernel size": (with_dimension("convolution_kernel", 8), "must be odd"),
    "dimension as text": (with_dimension("d_model", "32"), "wrong type"),
    "dimension as boolean": (with_dimension("encoder_layers", True), "wrong type"),
    "unknown dimension name": (with_dimension("mel_bins", 80), "unknown names"),
    "no dimensions": (with_entry("model", None), "not a KonkaniVani bundle"),
    "unsupported format": (with_entry("format", 4), "has format 4; this version reads formats 1 to 3"),
    "very long format": (with_entry("format", "x" * 10**5), "has format 'xxx"),
    "other features": (with_entry("features", FEATURES | {"mel_scale": "slaney"}), "mel_scale 'slaney' for 'htk"),
    "more features": (with_entry("features", FEATURES | {"preemphasis": 0.97}), "preemphasis 0.97 for None"),
    "other bins": (with_entry("features", FEATURES | {"mel_bins": 40}), "do not match its dimensions"),
    "not features": (with_entry("features", 7), "different features than this version's: "),
    "longest utterance is NaN": (with_entry("longest_seconds", math.nan), "longest_seconds is nan"),
    "other digits": (with_entry("digits", "roman"), "wrong type"),
    "flags in digits": (with_entry("digits", "x'\n--epochs 7"), "wrong type"),
    "NaN weight": (with_tensor("ctc_head.bias", lambda t: t * math.nan), "ctc_head.bias of .* are not finite"),
    "half-precision weight": (with_tensor("ctc_head.bias", torch.Tensor.half), "do not match its dimensions"),
    "weight of wrong shape": (with_tensor("ctc_head.bias", lambda t: t[None]), "do not match its dimensions"),
    "missing weight": (lambda d, t: t.pop("ctc_head.bias"), "do not match its dimensions"),
    "unexpected weight": (lambda d, t: t.update(more=torch.zeros(1)), "do not match its dimensions"),
    "no tokenizer": (lambda d, t: t.pop("tokenizer"), "not a KonkaniVani bundle"),
    "tokenizer of floats": (with_tensor("tokenizer", torch.Tensor.float), "not binary data"),
    "reversed tokenizer bytes": (
        with_tensor("tokenizer", lambda t: t.flip(0).contiguous()),
        "not a SentencePiece model",
    ),
    "empty tokenizer": (with_tensor("tokenizer", lambda t: t[:0]), "not a KonkaniVani bundle"),
}


@pytest.mark.parametrize("kind", ["none", *CHANGES])
def test_forged_bundle_is_rejected_with_one_sentence(kind, older_speech_model, tmp_path):
    speech_model = older_speech_model
    (tmp_path / "sound").write_bytes(bundle_bytes(speech_model))
    with safetensors.safe_open(tmp_path / "sound", framework="pt") as file:
        description = json.loads(file.metadata()["konkanivani"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    del description["sha256"]
    if kind == "none":
        check_bundle(
            read_bundle(write_forged_bundle(tmp_path / "forged", description, tensors), CPU), speech_model, tmp_path
        )
        return
    change, message = CHANGES[kind]
    change(description, tensors)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_bundle(write_forged_bundle(tmp_path / "forged", description, tensors), CPU)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_non_finite_weights_are_not_written(tmp_path):
    broken = speech_model_of_shape(SHAPE)
    with torch.no_grad():
        broken.model.ctc_head.bias[3] = math.inf
    with pytest.raises(CheckpointError, match="ctc_head.bias of .* are not finite"):
        (tmp_path / "bundle").write_bytes(bundle_bytes(broken))
    assert list(tmp_path.iterdir()) == []


RECOGNITION_PROGRAM = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from konkanivani.inference.bundle import read_bundle
from konkanivani.decoding.ctc import greedy_ctc
speech_model = read_bundle(Path(sys.argv[2]), torch.device("cpu"))
encoded = speech_model.encode(torch.randn(1, 16000), (16000,))
print([speech_model.tokenizer.decode(tokens) for tokens in greedy_ctc(speech_model.model, *encoded)])
trainer = ("konkanivani.training.step", "konkanivani.training.logbook", "konkanivani.data.loading")
print([name for name in trainer if name in sys.modules])
import konkanivani.training.loop

print([name for name in trainer if name in sys.modules])
"""


def test_bundle_is_recognized_without_importing_the_trainer(path, tmp_path, torch_only_parent):
    done = checked(torch_only_parent.run_program(RECOGNITION_PROGRAM, str(ROOT), str(path), cwd=tmp_path))
    _, loaded, control = done.stdout.splitlines()
    assert loaded == "[]" and control.count("konkanivani.") == 3


class TestFeatures:
    def by_definition(self, waveform: np.ndarray, symmetric_window: bool = False) -> np.ndarray:
        """Return features (T, F) in float64, computed from FEATURES by definition."""
        size, width = FEATURES["fft_samples"], FEATURES["window_samples"]
        window = np.zeros(size)
        before, period = (size - width) // 2, width - symmetric_window
        window[before : before + width] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(width) / period)
        starts = range(0, len(waveform) - size + 1, FEATURES["hop_samples"])
        frames = np.stack([waveform[start : start + size] * window for start in starts])
        power = np.abs(np.fft.rfft(frames)) ** 2
        hertz = np.linspace(0, FEATURES["sample_rate"] / 2, size // 2 + 1)
        highest = 2595 * np.log10(1 + FEATURES["sample_rate"] / 2 / 700)
        edges = 700 * (10 ** (np.linspace(0, highest, FEATURES["mel_bins"] + 2) / 2595) - 1)
        rise = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        fall = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
        filters = np.maximum(0, np.minimum(rise, fall))
        features = np.log(np.maximum(FEATURES["smallest_power"], power @ filters.T))
        features -= features.mean(axis=0)
        return features / (np.sqrt((features**2).mean(axis=0)) + 1e-5)

    def test_features_equal_their_definition(self):
        waveform = spoken(2.5)
        result, _ = LogMel(OLDER)(waveform[None], (len(waveform),))
        wanted = torch.from_numpy(self.by_definition(waveform.double().numpy()))
        assert float((result[0] - wanted).abs().max()) < 1e-3
        other = torch.from_numpy(self.by_definition(waveform.double().numpy(), symmetric_window=True))
        assert float((result[0] - other).abs().max()) > 1e-2

    @pytest.mark.parametrize("seconds", [0.3, 0.5, 2.5, 6.01])
    def test_matrix_features_equal_fft_features(self, seconds):
        """Bins 50 dB below the loudest are excluded: the single-precision FFT is inaccurate there."""
        log_mel, waveform = LogMel(OLDER), spoken(seconds)
        wanted, lengths = log_mel(waveform[None], (len(waveform),))
        result = MatrixLogMel(log_mel)(waveform[None], torch.tensor(lengths))
        power = log_mel.power(waveform[None]).transpose(1, 2)
        is_loud = power > 1e-5 * power.amax(dim=2, keepdim=True)
        assert result.shape == wanted.shape and is_loud.double().mean() > 0.3
        assert float((result - wanted)[is_loud].abs().max()) < 1e-4
        exact = torch.from_numpy(self.by_definition(waveform.double().numpy()))
        assert float((result[0] - exact).abs().max()) < 2 * float((wanted[0] - exact).abs().max()) + 1e-5

    def test_features_of_silence_are_zero(self):
        silence = torch.zeros(1, 8000)
        frames = FRAMING.feature_length(8000)
        assert MatrixLogMel(LogMel(FeatureConfig()))(silence, torch.tensor([frames])).abs().max() == 0

    def test_graph_lengths_equal_host_lengths(self):
        samples = list(range(0, 6000))
        frames = [FRAMING.feature_length(s) for s in samples]
        assert FRAMING.feature_length(torch.tensor(samples)).tolist() == frames
        assert subsampled_length(torch.tensor(frames)).tolist() == [subsampled_length(f) for f in frames]


@pytest.mark.parametrize("kind", ["char", "unigram", "bpe"])
def test_joined_token_texts_equal_decoded_text(kind):
    tokenizer = train_tokenizer(TEXTS, kind, 40)
    texts = token_texts(tokenizer)
    generator = np.random.default_rng(3)
    for _ in range(300):
        tokens = generator.integers(tokenizer.size, size=generator.integers(12)).tolist()
        assert "".join(texts[token] for token in tokens).strip() == tokenizer.decode(tokens)
    for text in TEXTS:
        assert "".join(texts[token] for token in tokenizer.encode(text)).strip() == text


class TestOnnx:
    def wanted(self, speech_model: SpeechModel, waveform: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities (T', V) of one waveform (S,) alone."""
        with torch.no_grad():
            encoded, _ = speech_model.encode(waveform[None], (len(waveform),))
            return speech_model.model.ctc_head(encoded).log_softmax(dim=-1)[0]

    @pytest.mark.parametrize("samples", [1472, 1600, 2111, 2112, 2433, 9999, 16_000, 80_001, 320_003, 960_000])
    def test_onnx_log_probabilities_equal_the_model_at_any_length(self, speech_model, onnx_model, samples):
        waveform = spoken(samples / 16_000, seed=samples)
        result, lengths = onnx_model.log_probabilities(waveform[None], (samples,))
        wanted = self.wanted(speech_model, waveform)
        assert lengths == (len(wanted),) == (subsampled_length(FRAMING.feature_length(samples)),)
        assert float((result[0, : len(wanted)] - wanted).abs().max()) < 1e-3

    @pytest.mark.parametrize("samples", [0, 1, 399, 1471])
    def test_too_short_waveform_gives_no_text_and_affects_no_other(self, onnx_model, samples):
        waveforms = torch.stack([spoken(1.0), spoken(1.0, seed=1)])
        result, lengths = onnx_model.log_probabilities(waveforms[:1, :samples], (samples,))
        assert lengths == (0,) and result.isfinite().all()
        assert onnx_model.recognize(waveforms[:1, :samples], (samples,)) == [""]
        alone = onnx_model.recognize(waveforms[1:], (16_000,))
        assert alone != [""] and onnx_model.recognize(waveforms, (samples, 16_000)) == ["", *alone]

    def test_texts_equal_the_model_alone_and_in_a_noise_padded_batch(self, speech_model, onnx_model):
        spoken_ones = [spoken(seconds, seed) for seed, seconds in enumerate((0.4, 3.0, 1.3, 2.2, 0.9, 4.7, 1.8, 2.9))]
        lengths = tuple(map(len, spoken_ones))
        waveforms = 0.3 * torch.randn(len(lengths), max(lengths) + 5000, generator=torch.Generator().manual_seed(4))
        for row, waveform in zip(waveforms, spoken_ones, strict=True):
            row[: len(waveform)] = waveform
        recognize = recognize_with(speech_model)
        wanted = [recognize(waveform[None], (len(waveform),))[0] for waveform in spoken_ones]
        assert len(set(wanted)) == len(wanted) and min(map(len, wanted)) > 1
        assert [onnx_model.recognize(waveform[None], (len(waveform),))[0] for waveform in spoken_ones] == wanted
        assert onnx_model.recognize(waveforms, lengths) == wanted

    def test_graph_of_transformer_encoder_equals_the_model(self):
        other = speech_model_of_shape(dataclasses.replace(SHAPE, encoder_type="transformer"))
        waveform = spoken(2.0)
        with torch.no_grad():
            result, lengths = RecognitionGraph(other)(waveform[None], torch.tensor([len(waveform)]))
        wanted = self.wanted(other, waveform)
        assert lengths.tolist() == [len(wanted)]
        assert float((result[0, : len(wanted)] - wanted).abs().max()) < 1e-3

    def test_onnx_file_has_all_metadata_and_no_local_paths(self, onnx_model, onnx_bytes, speech_model):
        about = onnx_model.session.get_modelmeta().custom_metadata_map
        assert json.loads(about["features"]) == described(speech_model.architecture.features)
        assert (about["sample_rate"], about["blank"]) == ("16000", "0")
        assert (float(about["frame_seconds"]), float(about["longest_seconds"]), about["digits"]) == (0.04, 20, "keep")
        assert Tokenizer(base64.b64decode(about["sentencepiece_model"])).size == len(onnx_model.token_texts)
        for word in (str(ROOT), "onnx_graph.py", "konkanivani", "/home", "site-packages"):
            assert word.encode() not in onnx_bytes
        shapes = {value.name: value.shape for value in onnx_model.session.get_inputs()}
        assert shapes == {"waveforms": ["batch", "samples"], "sample_lengths": ["batch"]}
        outputs = {value.name: value.shape for value in onnx_model.session.get_outputs()}
        size = speech_model.tokenizer.size
        assert outputs == {"log_probabilities": ["batch", "frames", size], "encoded_lengths": ["batch"]}

    def test_onnx_file_of_another_model_is_detected(self, onnx_model, speech_model, tmp_path):
        check_onnx(onnx_model, speech_model, tmp_path, TOLERANCE)
        with pytest.raises(NumericsError, match="probabilities differ by up to"):
            check_onnx(onnx_model, speech_model_of_shape(SHAPE, seed=1), tmp_path, TOLERANCE)

    def test_int8_probabilities_are_close_to_float32(self, onnx_bytes, onnx_model, speech_model, tmp_path):
        path = tmp_path / "int8.onnx"
        path.write_bytes(quantize(onnx_bytes))
        result = read_onnx(path)
        assert result.token_texts == onnx_model.token_texts
        check_onnx(result, speech_model, path, math.inf)
        with pytest.raises(NumericsError, match="probabilities differ by up to"):
            check_onnx(result, speech_model, path, 1e-6)
        waveforms, lengths = check_signal()
        own, _ = onnx_model.log_probabilities(waveforms[2:], lengths[2:])
        eight, _ = result.log_probabilities(waveforms[2:], lengths[2:])
        assert 0 < float((own.exp() - eight.exp()).abs().mean()) < 0.01
        operators = [node.op_type for node in importlib.import_module("onnx").load(path).graph.node]
        assert "MatMulInteger" in operators or "DynamicQuantizeMatMul" in operators
        assert "ConvInteger" not in operators and "Gemm" not in operators

    def test_nan_output_exceeds_any_tolerance(self, onnx_model, tmp_path):
        broken = speech_model_of_shape(SHAPE)
        with torch.no_grad():
            broken.model.ctc_head.bias[3] = math.nan
        with pytest.raises(NumericsError):
            check_onnx(onnx_model, broken, tmp_path, math.inf)

    def test_missing_package_is_reported_with_install_command(self, monkeypatch):
        require_onnx()
        real = onnx_graph.importlib.util.find_spec
        monkeypatch.setattr(
            onnx_graph.importlib.util, "find_spec", lambda name: None if "script" in name else real(name)
        )
        with pytest.raises(ResourceError, match=re.escape(f"{sys.executable} -m pip install onnxscript")):
            require_onnx()


def test_int8_benchmark_compares_with_single_precision(onnx_bytes):
    waveforms = [spoken(1.0), spoken(2.0, seed=1)]
    ours, *others = measure_ways(onnx_bytes, waveforms)
    assert ours.way == "ours" and len(others) == len(WAYS) == len({other.way for other in others})
    for distance in (ours, *others):
        assert 0 < distance.divergence < 0.1 and 0 <= distance.other_best < 0.5 and distance.size < len(onnx_bytes)
    again = Way(("MatMul",), is_signed=False, is_by_output=True).apply(onnx_bytes)
    assert again == quantize(onnx_bytes)


def test_documentation_example_transcribes_like_the_model(speech_model, onnx_bytes, tmp_path):
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    example = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "onnxruntime" in block)
    (tmp_path / "konkani.onnx").write_bytes(onnx_bytes)
    waveform = spoken(2.0)
    soundfile.write(tmp_path / "recording.flac", waveform.numpy(), 16_000, subtype="PCM_24")
    (tmp_path / "example.py").write_text(example + "\nimport sys; assert 'torch' not in sys.modules\n")
    command, options = [sys.executable, "-I", "example.py"], {"capture_output": True, "text": True}
    done = checked(subprocess.run(command, cwd=tmp_path, timeout=PROCESS_TIMEOUT, **options))
    assert done.stdout.strip() == recognize_with(speech_model)(waveform[None], (len(waveform),))[0] != ""


def test_missing_memory_is_not_reported_as_damage(speech_model, tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bundle_bytes(speech_model))

    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(bundle, "_build", fail)
    with pytest.raises(ResourceError, match="cannot be read: not enough memory. Close"):
        read_bundle(path, torch.device("cpu"))


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_too_long_path_raises_checkpoint_error(tmp_path, suffix):
    with pytest.raises(CheckpointError, match="There is no"):
        load_recognizer(tmp_path / ("x" * 300 + suffix))


def test_failed_atomic_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as partial:
        partial.write_text("first")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "first"
    with pytest.raises(ResourceError, match="could not be written: No such file"), atomic_write(path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "first"


class TestCommandLine:
    def test_export_writes_three_working_files(self, exported, speech_model):
        names = {path.name for path in exported.directory.iterdir()}
        assert names == {exported.checkpoint.name, "m.safetensors", "m.onnx", "m.int8.onnx"}
        check_bundle(read_bundle(exported.directory / "m.safetensors", CPU), speech_model, exported.directory)
        check_onnx(read_onnx(exported.directory / "m.onnx"), speech_model, exported.directory, TOLERANCE)
        check_onnx(read_onnx(exported.directory / "m.int8.onnx"), speech_model, exported.directory, math.inf)
        listed = [line.split(":")[0] for line in exported.lines if line.endswith("MB") and ":" in line]
        assert listed == ["m.safetensors", "m.onnx", "m.int8.onnx"]

    def test_table_shows_equal_rates_for_checkpoint_bundle_and_onnx(self, exported):
        pattern = r"(checkpoint|bundle|ONNX|ONNX, int8) +([\d.]+%) +([\d.]+%) +(\d of 5) +[\d.]+ MB"
        names, *columns = zip(*(re.fullmatch(pattern, line).groups() for line in exported.lines[-4:]), strict=True)
        assert names == ("checkpoint", "bundle", "ONNX", "ONNX, int8")
        assert all(len(set(column[:3])) == 1 for column in columns) and columns[2][0] == "0 of 5"

    @pytest.mark.parametrize(
        ("arguments", "exit_code", "message"),
        [
            (("--checkpoint", "{checkpoint}"), 2, "No output is given"),
            (("--checkpoint", "{checkpoint}", "--onnx", "{checkpoint}"), 2, "must be different files"),
            (("--checkpoint", "{checkpoint}", "--onnx", "x", "--int8", "./x"), 2, "must be different files"),
            (("--checkpoint", "{checkpoint}", "--onxn", "x"), 2, "--onnx"),
            (("--checkpoint", "{checkpoint}", "--bundle", "/nowhere/x"), 6, "/nowhere/x cannot be written"),
            (
                ("--checkpoint", "{checkpoint}", "--bundle", "{script}"),
                2,
                "already exists. Choose another name, or overwrite it with --",
            ),
            (("--checkpoint", "{checkpoint}", "--bundle", "."), 6, ". cannot be written"),
            (("--checkpoint", "{checkpoint}", "--bundle", "/dev/null"), 6, "/dev/null cannot be written"),
            (("--checkpoint", "{checkpoint}", "--bundle", "x", "--manifest", "none.jsonl"), 3, "none.jsonl"),
            (("--checkpoint", "{script}", "--bundle", "x"), 4, "damaged or not a KonkaniVani"),
        ],
    )
    def test_invalid_arguments_give_exit_code_and_one_sentence(self, exported, arguments, exit_code, message, tmp_path):
        known = {"{checkpoint}": str(exported.checkpoint), "{script}": str(ROOT / EXPORT)}
        done = run_script(EXPORT, *(known.get(word, word) for word in arguments), cwd=tmp_path)
        assert done.returncode == exit_code, done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []
