"""Export of a speech model to self-contained ONNX files in fp32 or int8, their verification, and their inference.

B batch, S samples, T' encoder frames, V vocabulary.
"""

import base64
import contextlib
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime.quantization
import torch

from konkanivani.config import FeatureConfig
from konkanivani.console import say
from konkanivani.data.text import Vocabulary
from konkanivani.decoding.ctc import collapse_repeats, ctc_head_of
from konkanivani.errors import NumericsError
from konkanivani.files import atomic_write
from konkanivani.inference.onnx_graph import RecognitionGraph
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.inference.write_exports import Exported, check_signal, say_written
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.models.asr import BLANK
from konkanivani.models.front_end import described

OPSET = 18  # the oldest opset of PyTorch's exporter, supported by ONNX Runtime since 1.14
INPUTS = ("waveforms", "sample_lengths")
OUTPUTS = ("log_probabilities", "encoded_lengths")
MAX_SAMPLES = 2**31 - 1  # per waveform, so that products of lengths do not overflow int64


def build_onnx(speech_model: SpeechModel) -> bytes:
    """Return an ONNX model of the encoder and the CTC head.

    Inputs: waveforms (B, S) at 16 kHz, sample_lengths (B,). Outputs: log_probabilities (B, T', V), encoded_lengths
    (B,). B and S are dynamic. The metadata contains all else that is needed to transcribe a recording (docs/export.md).

    Raises a UsageError if the model has no CTC head.
    """
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
    _remove_metadata(model)
    onnx.helper.set_model_props(model, _metadata(speech_model, graph.log_mel.config))
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def quantize(model: bytes) -> bytes:
    """Return the ONNX model with 8-bit weights of matrix products; activations are quantised dynamically."""
    with tempfile.TemporaryDirectory() as folder, quietly():
        path = Path(folder) / "quantized.onnx"
        onnxruntime.quantization.quantize_dynamic(
            onnx.load_model_from_string(model),
            path,
            # Products only: with int8 convolutions too, the Kullback-Leibler divergence of the probabilities was six
            # times as large, for 2 % of the size (benchmarks/accuracy.py int8).
            op_types_to_quantize=["MatMul"],
            # One scale per output.
            per_channel=True,
            # Unsigned: products of unsigned and signed bytes saturate on CPUs without VNNI.
            weight_type=onnxruntime.quantization.QuantType.QUInt8,
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


def _remove_metadata(model: "onnx.ModelProto") -> None:
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
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    texts = json.loads(session.get_modelmeta().custom_metadata_map["token_texts"])
    return OnnxModel(session, tuple(texts))


# --------------------
# Writing of ONNX files, and their verification against the checkpoint.


# Absolute, for fp32 probabilities. Other kernels and summation orders stay within it; another model exceeds it by far.
TOLERANCE = 1e-3


def export_onnx(speech_model: SpeechModel, onnx_path: str | None, int8_path: str | None) -> list[Exported]:
    """Write the requested ONNX files, read them back and verify them."""
    say("Tracing the model for ONNX (up to a minute).")
    model = build_onnx(speech_model)
    forms = []
    # int8 weights change the probabilities, so only the lengths and NaN are checked.
    for name, path, tolerance in (("ONNX", onnx_path, TOLERANCE), ("ONNX, int8", int8_path, math.inf)):
        if path is not None:
            with atomic_write(Path(path)) as partial:
                partial.write_bytes(model if path == onnx_path else quantize(model))
                read = read_onnx(partial)
                check_onnx(read, speech_model, Path(path), tolerance)
            say_written(Path(path))
            forms.append(Exported(name, Path(path), read.recognize))
    return forms


@torch.no_grad()
def check_onnx(onnx_model: OnnxModel, speech_model: SpeechModel, path: Path, tolerance: float) -> None:
    """Raise a NumericsError if a probability differs by more than `tolerance` from the checkpoint's."""
    ctc_head = ctc_head_of(speech_model.model)
    waveforms, lengths = check_signal()
    # One padded batch in ONNX against single waveforms in PyTorch: padding must not change the output.
    together, encoded_lengths = onnx_model.log_probabilities(waveforms, lengths)
    for row, length in enumerate(lengths):
        encoded, expected_lengths = speech_model.encode(waveforms[row : row + 1, :length], (length,))
        expected = ctc_head(encoded).softmax(dim=-1)[0]
        got = together[row, : len(expected)].exp()
        # `not <=` is true for NaN.
        if encoded_lengths[row] != expected_lengths[0] or not _max_difference(got, expected) <= tolerance:
            raise NumericsError(
                f"The ONNX file {path} was deleted: its probabilities differ by up to "
                f"{_max_difference(got, expected):.2g} from the checkpoint's. Update onnx, onnxruntime and onnxscript, "
                "or use a bundle."
            )


def _max_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).abs().max()) if output.shape == expected.shape else math.nan
