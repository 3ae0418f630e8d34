"""ONNX graph of a speech model, its files in fp32 and int8, and their inference.

B batch, S samples, T feature frames, T' encoder frames, F mel bins, K DFT bins, W STFT window samples, V vocabulary.

B batch, S samples, T' encoder frames, V vocabulary.
"""

import base64
import contextlib
import importlib.util
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from konkanivani.config import FeatureConfig
from konkanivani.data.text import Vocabulary
from konkanivani.decoding.ctc import collapse_repeats
from konkanivani.errors import ResourceError, UsageError
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.lengths import SAMPLE_RATE, SUBSAMPLING, Lengths, beyond, subsampled_length
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.asr import BLANK, KonkaniVaniASR
from konkanivani.models.conformer import Encoder, keep_activations
from konkanivani.models.front_end import (
    FrontEnd,
    LogMel,
    described,
    has_margins,
    log_power,
    normalize_features,
    with_margins,
)
from konkanivani.models.twin import twin_of

if TYPE_CHECKING:
    import onnx
    import onnxruntime


# --------------------
# Speech model as a graph of tensor operations, from waveforms to CTC log probabilities, for ONNX export.


class MatrixLogMel(torch.nn.Module):
    """`LogMel` with the Fourier transform as a matrix product, and lengths (B,) as tensors.

    Exporters do not support a real FFT of frames. The matrices, windowed cosines and sines (2 K, W) and mel filters (F,
    K), are kernels of convolutions: quantisation, which applies to matrix products, leaves them in full precision.
    """

    waves: torch.Tensor
    filters: torch.Tensor

    def __init__(self, log_mel: LogMel) -> None:
        super().__init__()
        self.config = log_mel.config
        spectrum = log_mel.power.spectrogram
        size = self.config.fft_samples
        window = self.config.window_samples
        before = (size - window) // 2  # the STFT window is centred in the FFT
        times = torch.arange(before, before + window, dtype=torch.float64)
        bins = torch.arange(size // 2 + 1, dtype=torch.float64)
        # Computed in float64 and rounded once: angles exceed a thousand radians.
        angles = 2 * torch.pi / size * bins[:, None] * times[None, :]
        waves = torch.cat([angles.cos(), angles.sin()]) * spectrum.window.double().cpu()
        self.register_buffer("waves", waves.float()[:, None, :])
        self.register_buffer("filters", log_mel.power.mel_scale.fb.cpu().t()[:, :, None].contiguous())
        self.before = before
        self.after = size - window - before

    def forward(self, waveforms: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Return features (B, T, F) for waveforms (B, S) and their numbers of feature frames (B,)."""
        framed = waveforms[:, None, self.before : -self.after or None]
        cosines, sines = F.conv1d(framed, self.waves, stride=self.config.hop_samples).chunk(2, dim=1)
        power = F.conv1d(cosines.square() + sines.square(), self.filters)
        features = log_power(power, self.config).transpose(1, 2)
        # The mean over frames divides by their number, which is 0 for a short waveform.
        padding = beyond(frames, features.shape[1])
        frames = frames.clamp_min(1).to(features.dtype)
        return normalize_features(features, padding, frames, self.config.std_ddof)


class GraphEncoder(Encoder):
    """Twin of `Encoder` whose lengths are tensors (B,), annotated as Any; it always pads."""

    def encode_tensors(self, features: torch.Tensor, feature_lengths: Any) -> torch.Tensor:
        """Return encoded (B, T', D), all frames in one chunk: a loop would be unrolled for the example's length."""
        encoded, _, _ = self.with_middle(features, feature_lengths, keep_activations, sys.maxsize)
        return encoded

    def feature_padding(self, features: torch.Tensor, feature_lengths: Any) -> torch.Tensor | None:
        return beyond(feature_lengths, features.shape[1]) if self.subsampling.is_padded else None

    def frame_padding(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        # Attention without any key gives NaN: leave one frame unmasked.
        return beyond(lengths.clamp_min(1), x.shape[1])

    def encoded_lengths(self, feature_lengths: Any) -> Any:
        return subsampled_length(feature_lengths, self.config.subsampling)


class RecognitionGraph(torch.nn.Module):
    """Graph from waveforms (B, S) at 16 kHz to log probabilities (B, T', V), with lengths (B,) int64 for both.

    The layers are shared with the speech model; a UsageError is raised if it has no CTC head. A waveform too short for
    one encoder frame has output length 0.
    """

    def __init__(self, speech_model: SpeechModel) -> None:
        super().__init__()
        model = speech_model.model
        front_end = speech_model.front_end
        architecture = speech_model.architecture
        if not (
            isinstance(architecture, HybridArchitecture)
            and isinstance(model, KonkaniVaniASR)
            and isinstance(front_end, FrontEnd)
            and model.ctc_head is not None
        ):
            raise UsageError(
                "ONNX files contain the encoder and the CTC head, but this model has no CTC head. Export it as a "
                "bundle."
            )
        self.log_mel = MatrixLogMel(front_end.log_mel)
        self.framing = architecture.framing
        self.encoder = twin_of(model.encoder, GraphEncoder)
        self.ctc_head = model.ctc_head
        # Zeros for two encoder frames, so that even an empty waveform has a time axis.
        config = architecture.features
        self.subsampling = self.framing.subsampling
        self.zeros_after = config.fft_samples + (3 * SUBSAMPLING[self.subsampling] - 2) * config.hop_samples

    def forward(self, waveforms: torch.Tensor, sample_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frames = self.framing.feature_length(sample_lengths)
        waveforms = F.pad(waveforms, (0, self.zeros_after))
        if has_margins(self.framing.features):
            waveforms = with_margins(waveforms, sample_lengths, self.framing)
        features = self.log_mel(waveforms, frames)
        encoded_lengths = subsampled_length(frames, self.subsampling)
        encoded = self.encoder.encode_tensors(features, frames)
        return self.ctc_head(encoded).log_softmax(dim=-1), encoded_lengths


# --------------------
# Export of a speech model to self-contained ONNX files in fp32 or int8, and their inference.


PACKAGES = "onnx", "onnxruntime", "onnxscript"  # the extra `export` of setup.cfg
OPSET = 18  # the oldest opset of PyTorch's exporter, supported by ONNX Runtime since 1.14
INPUTS = ("waveforms", "sample_lengths")
OUTPUTS = ("log_probabilities", "encoded_lengths")
MAX_SAMPLES = 2**31 - 1  # per waveform, so that products of lengths do not overflow int64


def require_onnx() -> None:
    """Raise a ResourceError with an install command if a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"ONNX files need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Install: {sys.executable} -m pip install {' '.join(missing)}"
        )


def build_onnx(speech_model: SpeechModel) -> bytes:
    """Return an ONNX model of the encoder and the CTC head.

    Inputs: waveforms (B, S) at 16 kHz, sample_lengths (B,). Outputs: log_probabilities (B, T', V), encoded_lengths
    (B,). B and S are dynamic. The metadata contains all else that is needed to transcribe a recording (docs/export.md).

    Raises a UsageError if the model has no CTC head.
    """
    import onnx

    graph = RecognitionGraph(speech_model)
    # A batch of 1 would be specialised to a constant dimension.
    example = torch.zeros(2, SAMPLE_RATE), torch.tensor([SAMPLE_RATE, SAMPLE_RATE // 2])
    batch = torch.export.Dim("batch")
    samples = torch.export.Dim("samples", max=MAX_SAMPLES)
    shapes = {0: batch, 1: samples}, {0: batch}
    with quietly(), torch.no_grad():
        # The tracer cannot prove properties of lengths, such as that n (n + 1) is a multiple of n: check them at run
        # time.
        traced = torch.export.export(
            graph, example, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        program = torch.onnx.export(
            traced, (), dynamo=True, verbose=False, opset_version=OPSET, input_names=INPUTS, output_names=OUTPUTS
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    model = program.model_proto
    _tidy(model)
    onnx.helper.set_model_props(model, _metadata(speech_model, graph.log_mel.config))
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def quantize(model: bytes) -> bytes:
    """Return the ONNX model with 8-bit weights of matrix products; activations are quantised dynamically."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, quietly():
        path = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            onnx.load_model_from_string(model),
            path,
            # Products only: with int8 convolutions too, the Kullback-Leibler divergence of the probabilities was six
            # times as large, for 2 % of the size (benchmarks/accuracy.py int8).
            op_types_to_quantize=["MatMul"],
            # One scale per output.
            per_channel=True,
            # Unsigned: products of unsigned and signed bytes saturate on CPUs without VNNI.
            weight_type=QuantType.QUInt8,
        )
        return path.read_bytes()


def _metadata(speech_model: SpeechModel, features: FeatureConfig) -> dict[str, str]:
    tokenizer = speech_model.tokenizer
    provenance = speech_model.provenance
    return {
        "sample_rate": str(SAMPLE_RATE),
        "frame_seconds": str(speech_model.architecture.framing.encoder_hop / SAMPLE_RATE),
        "longest_seconds": str(speech_model.longest_seconds),
        "digits": speech_model.digits,
        "blank": str(BLANK),
        "token_texts": json.dumps(token_texts(tokenizer), ensure_ascii=False),
        "sentencepiece_model": base64.b64encode(tokenizer.model).decode(),
        "features": json.dumps(described(features)),
    } | ({"provenance": json.dumps(provenance.state_dict())} if provenance else {})


def token_texts(tokenizer: Vocabulary) -> list[str]:
    """Return the text of each token id. A transcript is their concatenation, stripped."""
    pieces = [tokenizer.piece(token).replace("\u2581", " ") for token in range(tokenizer.size)]
    return ["" if token in tokenizer.special else piece for token, piece in enumerate(pieces)]


def _tidy(model: "onnx.ModelProto") -> None:
    """Remove information on this machine and the exporter: paths, source lines, shapes of intermediate values."""
    graph = model.graph
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    # The exporter names dynamic axes after its internal symbols.
    axes = graph.input[0].type.tensor_type.shape.dim
    names = {axes[0].dim_param: "batch", axes[1].dim_param: "samples"}
    for value in (*graph.input, *graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.HasField("dim_param"):
                axis.dim_param = names.get(axis.dim_param, "frames")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings and log messages of the exporter, which are for its own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class OnnxModel:
    """ONNX Runtime session on the CPU, and the text of each token; docs/export.md shows one without this project."""

    session: "onnxruntime.InferenceSession"
    token_texts: tuple[str, ...]

    def log_probabilities(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Return CTC log probabilities (B, T', V) and lengths, for waveforms (B, S) at 16 kHz and their lengths."""
        lengths = torch.tensor(sample_lengths, dtype=torch.int64)
        inputs = {"waveforms": waveforms.numpy(), "sample_lengths": lengths.numpy()}
        log_probabilities, encoded_lengths = self.session.run(list(OUTPUTS), inputs)
        return torch.from_numpy(log_probabilities), tuple(encoded_lengths.tolist())

    def recognize(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> list[str]:
        """Return the texts of greedy CTC decoding of waveforms (B, S)."""
        log_probabilities, encoded_lengths = self.log_probabilities(waveforms, sample_lengths)
        paths = collapse_repeats(log_probabilities.argmax(dim=-1), encoded_lengths)
        return ["".join(self.token_texts[token] for token in path).strip() for path in paths]


def read_onnx(path: Path) -> OnnxModel:
    """Load a file written with `build_onnx` or `quantize`, with the number of threads of torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    texts = json.loads(session.get_modelmeta().custom_metadata_map["token_texts"])
    return OnnxModel(session, tuple(texts))
