"""A speech model as an ONNX file that needs nothing of this project, the same in eight bits, and either one run again.

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
from typing import TYPE_CHECKING

import torch

from konkanivani.base.errors import ResourceError, UsageError
from konkanivani.base.lengths import SAMPLE_RATE, Lengths
from konkanivani.data.text import Tokenizer
from konkanivani.decoding.ctc import collapse_repeats
from konkanivani.inference.onnx_graph import RecognitionGraph
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.model.front_end import described
from konkanivani.model.kernels.ctc import BLANK

if TYPE_CHECKING:  # an extra
    import onnx
    import onnxruntime

PACKAGES = "onnx", "onnxruntime", "onnxscript"  # the extra `export` of setup.cfg
OPSET = 18  # the oldest that PyTorch's exporter writes; onnxruntime reads it since 1.14
INPUTS, OUTPUTS = ("waveforms", "sample_lengths"), ("log_probabilities", "encoded_lengths")
MAX_SAMPLES = 2**31 - 1  # in a waveform, so that no product of lengths leaves int64


def require_onnx() -> None:
    """Raises a ResourceError that says how to install what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"ONNX files need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Install: {sys.executable} -m pip install {' '.join(missing)}"
        )


def build_onnx(speech_model: SpeechModel) -> bytes:
    """An ONNX model: waveforms (B, S) of 16 kHz, sample_lengths (B,) -> log_probabilities (B, T', V), encoded_lengths.

    B and S are free. Its metadata holds what else it takes to make text of a recording (docs/export.md).
    """
    import onnx

    if not speech_model.architecture.has_ctc:
        raise UsageError(
            "ONNX files contain the encoder and the CTC head, but this model has no CTC head: export it as a bundle."
        )
    graph = RecognitionGraph(speech_model)
    example = torch.zeros(2, SAMPLE_RATE), torch.tensor([SAMPLE_RATE, SAMPLE_RATE // 2])
    batch, samples = torch.export.Dim("batch"), torch.export.Dim("samples", max=MAX_SAMPLES)
    shapes = {0: batch, 1: samples}, {0: batch}
    with quietly(), torch.no_grad():
        # What the tracer cannot prove of lengths, as that n (n + 1) is a multiple of n, is left open.
        traced = torch.export.export(
            graph, example, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )
        program = torch.onnx.export(
            traced, (), dynamo=True, verbose=False, opset_version=OPSET, input_names=INPUTS, output_names=OUTPUTS
        )
    model = program.model_proto
    _tidy(model)
    onnx.helper.set_model_props(model, _metadata(speech_model))
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def quantize(model: bytes) -> bytes:
    """The ONNX model with the weights of its products in eight bits; activations are quantised as they come.

    Products alone: with the convolutions too, the probabilities were six times as far off (Kullback-Leibler) for 2 %
    of the size (benchmarks/int8.py). Weights are unsigned, since products of unsigned and signed bytes saturate on CPUs
    without VNNI, and have a scale for each output.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, quietly():
        path = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            onnx.load_model_from_string(model),
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QUInt8,
        )
        return path.read_bytes()


def _metadata(speech_model: SpeechModel) -> dict[str, str]:
    tokenizer, provenance = speech_model.tokenizer, speech_model.provenance
    return {
        "sample_rate": str(SAMPLE_RATE),
        "frame_seconds": str(speech_model.architecture.framing.encoder_hop / SAMPLE_RATE),
        "longest_seconds": str(speech_model.longest_seconds),
        "digits": speech_model.digits,
        "blank": str(BLANK),
        "token_texts": json.dumps(token_texts(tokenizer), ensure_ascii=False),
        "sentencepiece_model": base64.b64encode(tokenizer.model).decode(),
        "features": json.dumps(described(speech_model.architecture.features)),
    } | ({"provenance": json.dumps(provenance.state_dict())} if provenance else {})


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """What each token id adds to a text, which is all of them joined, without spaces at its ends."""
    pieces = [tokenizer.piece(token).replace("\u2581", " ") for token in range(tokenizer.size)]
    return ["" if token in tokenizer.special else piece for token, piece in enumerate(pieces)]


def _tidy(model: "onnx.ModelProto") -> None:
    """Takes out what tells of this machine and of the exporter: paths, source lines, shapes of all in between."""
    graph = model.graph
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    axes = graph.input[0].type.tensor_type.shape.dim
    names = {axes[0].dim_param: "batch", axes[1].dim_param: "samples"}
    for value in (*graph.input, *graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.HasField("dim_param"):
                axis.dim_param = names.get(axis.dim_param, "frames")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keeps the exporter's advice to its own developers from the screen."""
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
    """A session on the CPU (docs/export.md has the same without this project), and what each token adds to a text."""

    session: "onnxruntime.InferenceSession"
    token_texts: tuple[str, ...]

    def log_probabilities(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Waveforms (B, S) of 16 kHz with their lengths -> CTC's log probabilities (B, T', V) with theirs."""
        lengths = torch.tensor(sample_lengths, dtype=torch.int64)
        inputs = {"waveforms": waveforms.numpy(), "sample_lengths": lengths.numpy()}
        log_probabilities, encoded_lengths = self.session.run(list(OUTPUTS), inputs)
        return torch.from_numpy(log_probabilities), tuple(encoded_lengths.tolist())

    def recognize(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> list[str]:
        """The text of the best path through each of waveforms (B, S)."""
        log_probabilities, encoded_lengths = self.log_probabilities(waveforms, sample_lengths)
        paths = collapse_repeats(log_probabilities.argmax(dim=-1), encoded_lengths)
        return ["".join(self.token_texts[token] for token in path).strip() for path in paths]


def read_onnx(path: Path) -> OnnxModel:
    """The model of a file that `build_onnx` or `quantize` made, on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    texts = json.loads(session.get_modelmeta().custom_metadata_map["token_texts"])
    return OnnxModel(session, tuple(texts))
