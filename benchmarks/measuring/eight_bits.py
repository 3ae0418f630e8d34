"""Quantised ONNX models, each compared with the same model in single precision.

S samples, T' encoder frames, V vocabulary.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from konkanivani.inference.onnx_export import OnnxModel, quantize, quietly, read_onnx


@dataclass(frozen=True)
class Way:
    """Method of quantisation: the operators, and the storage of their weights."""

    operators: tuple[str, ...]
    is_signed: bool
    is_by_output: bool
    bits: int = 8

    def __str__(self) -> str:
        scales = "a scale an output" if self.is_by_output else "one scale"
        return (
            f"{' and '.join(self.operators)}, {'signed' if self.is_signed else 'unsigned'} {self.bits} bits, {scales}"
        )

    def apply(self, model: bytes) -> bytes:
        """Return the quantised model; the convolutions of the front end stay in single precision."""
        graph = onnx.load_model_from_string(model)
        # In the exported graph, only the front end (STFT and mel filters) has kernels with three axes.
        kernels = {tensor.name for tensor in graph.graph.initializer if len(tensor.dims) == 3}
        front_end = [node.name for node in graph.graph.node if node.op_type == "Conv" and node.input[1] in kernels]
        with tempfile.TemporaryDirectory() as folder, quietly():
            quantize_dynamic(
                graph,
                Path(folder) / "model.onnx",
                op_types_to_quantize=list(self.operators),
                weight_type=QuantType.QInt8 if self.is_signed else QuantType.QUInt8,
                per_channel=self.is_by_output,
                reduce_range=self.bits == 7,  # against saturation of 16-bit sums on x86 without VNNI
                nodes_to_exclude=front_end,
            )
            return (Path(folder) / "model.onnx").read_bytes()


WAYS = (
    Way(("MatMul",), is_signed=True, is_by_output=True),
    Way(("MatMul",), is_signed=False, is_by_output=False),
    Way(("MatMul",), is_signed=True, is_by_output=False),
    Way(("MatMul",), is_signed=True, is_by_output=True, bits=7),
    Way(("MatMul", "Conv"), is_signed=False, is_by_output=True),
)


@dataclass(frozen=True)
class Distance:
    """Distance of a quantised model from the one in single precision, averaged over frames; `size` is in bytes."""

    way: str
    divergence: float
    """Kullback-Leibler divergence of its distribution from the one in single precision, in nats per frame."""
    other_best: float
    """Share of the frames with a different most likely token."""
    size: int

    def sentence(self) -> str:
        """Return the result as one line of text."""
        return f"{self.way}: {self.divergence:.5f} nats, {self.other_best:.2%} of the frames, {self.size / 1e6:.2f} MB"


def measure_ways(model: bytes, waveforms: Iterable[torch.Tensor]) -> list[Distance]:
    """Return the distances of the project's own quantisation and of WAYS, over waveforms (S,) one at a time."""
    waveforms = list(waveforms)
    wanted = _log_probabilities(model, waveforms)
    made = [("ours", quantize(model)), *((str(way), way.apply(model)) for way in WAYS)]
    return [_distance(name, made_model, waveforms, wanted) for name, made_model in made]


def _distance(name: str, model: bytes, waveforms: list[torch.Tensor], wanted: torch.Tensor) -> Distance:
    found = _log_probabilities(model, waveforms)
    divergence = (wanted.exp() * (wanted - found)).sum(dim=-1).mean()
    other_best = (wanted.argmax(dim=-1) != found.argmax(dim=-1)).double().mean()
    return Distance(name, float(divergence), float(other_best), len(model))


def _log_probabilities(model: bytes, waveforms: list[torch.Tensor]) -> torch.Tensor:
    """Return the log probabilities of all waveforms, concatenated: (sum of T', V), float64."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model)
        read: OnnxModel = read_onnx(path)
    pieces = []
    # One at a time: dynamic quantisation scales each activation as a whole, padding included.
    for waveform in waveforms:
        found, lengths = read.log_probabilities(waveform[None], (len(waveform),))
        pieces.append(found[0, : lengths[0]])
    return torch.cat(pieces).double()
