"""Outputs of an imported model compared with stored outputs of NeMo (benchmarks/peers/nemo_import.py recreates them).

B batch, T feature frames, T' encoder frames, V tokens.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from konkanivani.decoding.decode import greedy_decode
from konkanivani.inference.speech_model import SpeechModel, build_speech_model
from konkanivani.models.nemo.weights import import_nemo
from tests.nemo.files import FOLDER, NemoParts, write_changed

NEAR = 1e-5
FILES = ("striding", "separable", "parakeet")
Golden = dict[str, torch.Tensor]
Change = Callable[[NemoParts], None]


@dataclass(frozen=True)
class Recognition:
    """Model results for an utterance: features (T, F), encoded (T', D), log probabilities (T', V), tokens and text."""

    features: torch.Tensor
    encoded: torch.Tensor
    log_probabilities: torch.Tensor
    tokens: list[int]
    text: str


def speech_model(path: Path) -> SpeechModel:
    return build_speech_model(import_nemo(path, None, path.parent).checkpoint, torch.device("cpu"))


def golden(name: str, folder: Path = FOLDER) -> Golden:
    return safetensors.torch.load_file(folder / f"{name}.safetensors")


def waveforms_and_lengths(folder: Path = FOLDER) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return two utterances of odd lengths (2, S), the second one shorter."""
    result = golden("sound", folder)
    return result["sound"].float() / 2**15, tuple(result["samples"].tolist())


@torch.no_grad()
def recognize_batch(model: SpeechModel, waveforms: torch.Tensor, lengths: tuple[int, ...]) -> list[Recognition]:
    features, frames = model.front_end(waveforms, lengths, None)
    encoded, encoded_lengths = model.encode(waveforms, lengths)
    log_probabilities = model.model.ctc_head(encoded).log_softmax(dim=-1)
    tokens = greedy_decode(model.architecture, model.tokenizer)(model.model, encoded, encoded_lengths)
    return [
        Recognition(
            features[row, :t],
            encoded[row, :n],
            log_probabilities[row, :n],
            row_tokens,
            model.tokenizer.decode(row_tokens),
        )
        for row, (t, n, row_tokens) in enumerate(zip(frames, encoded_lengths, tokens, strict=True))
    ]


def distances(recognition: Recognition, expected: Golden, row: int) -> dict[str, float]:
    """Return the largest difference of each tensor from NeMo's, or infinity if the numbers of frames differ."""
    values = {"encoded": recognition.encoded, "log_probabilities": in_nemo_order(recognition.log_probabilities)}
    if "features" in expected:
        values["features"] = recognition.features
    counts = {"features": expected["feature_lengths"][row], "encoded": expected["encoded_lengths"][row]}
    counts["log_probabilities"] = counts["encoded"]
    return {
        name: float((tensor - expected[name][row, :count]).abs().max()) if len(tensor) == count else float("inf")
        for name, tensor in values.items()
        for count in [int(counts[name])]
    }


def in_nemo_order(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return (T', V) in NeMo's order: `<unk>`, the pieces, the blank; start and end, never decoded, are absent."""
    assert float(log_probabilities[:, 2:4].max()) < -1000
    return torch.cat([log_probabilities[:, 1:2], log_probabilities[:, 4:], log_probabilities[:, :1]], dim=1)


def texts(expected: Golden) -> list[str]:
    return bytes(expected["texts"].tolist()).decode().split("\n")


def with_version(version: str) -> Change:
    """Return a change that sets the NeMo version of the file."""

    def change(parts: NemoParts) -> None:
        parts.config["nemo_version"] = version

    return change


def file_distances(folder: Path, name: str) -> tuple[dict[str, float], bool]:
    """Return the largest difference of each tensor for a file, and whether the greedy texts equal NeMo's.

    "older" is the first file with the front end of NeMo 1.23 and a batch of one: in that version, the edges of an
    utterance depend on its batch.
    """
    path, rows = folder / f"{name}.nemo", [(golden(name, folder), row) for row in (0, 1)] if name != "older" else []
    with tempfile.TemporaryDirectory() as scratch:
        if name == "older":
            path = write_changed(with_version("1.23.0"), Path(scratch) / "older.nemo", folder=folder)
            rows = [(golden(f"older_{row}", folder), 0) for row in (0, 1)]
        recognition = recognize_batch(speech_model(path), *waveforms_and_lengths(folder))
    values: dict[str, float] = {}
    for each, (expected, row) in zip(recognition, rows, strict=True):
        for part, distance in distances(each, expected, row).items():
            values[part] = max(distance, values.get(part, 0.0))
    return values, all(
        each.text == texts(expected)[row] for each, (expected, row) in zip(recognition, rows, strict=True)
    )
