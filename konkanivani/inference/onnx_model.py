"""An ONNX file of a speech model, run by onnxruntime; docs/export.md shows the same without this project.

B batch, S samples, T' encoder frames, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from konkanivani.base.lengths import Lengths
from konkanivani.decoding.ctc import merged_paths

if TYPE_CHECKING:  # an extra
    import onnxruntime


@dataclass(frozen=True)
class OnnxModel:
    """A session on the CPU, and what each of the model's tokens adds to a text."""

    session: "onnxruntime.InferenceSession"
    token_texts: tuple[str, ...]

    def log_probabilities(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Waveforms (B, S) of 16 kHz with their lengths -> CTC's log probabilities (B, T', V) with theirs."""
        lengths = torch.tensor(sample_lengths, dtype=torch.int64)
        inputs = {"waveforms": waveforms.numpy(), "sample_lengths": lengths.numpy()}
        log_probabilities, encoded_lengths = self.session.run(["log_probabilities", "encoded_lengths"], inputs)
        return torch.from_numpy(log_probabilities), tuple(encoded_lengths.tolist())

    def hear(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> list[str]:
        """The text of the best path through each of waveforms (B, S)."""
        log_probabilities, encoded_lengths = self.log_probabilities(waveforms, sample_lengths)
        paths = merged_paths(log_probabilities.argmax(dim=-1), encoded_lengths)
        return ["".join(self.token_texts[token] for token in path).strip() for path in paths]


def read_onnx(path: Path) -> OnnxModel:
    """The model of a file that `build_onnx` or `quantized` made, on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    texts = json.loads(session.get_modelmeta().custom_metadata_map["token_texts"])
    return OnnxModel(session, tuple(texts))
