"""Workload and interface of a contestant: a toolkit that takes part in a comparison of steps.

B batch, T feature frames, F mel bins, U tokens.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.measuring.fixed_step import FixedSpeech

CTC_SHARE, LABEL_SMOOTHING = 0.3, 0.1  # of the joint loss in every toolkit


@dataclass(frozen=True)
class Entry:
    """Toolkit, its number of micro-batches, and a setting that the toolkit defines.

    Only this trainer supports a limit of the peak, `limit_mib`, and `at_once` concurrent micro-batches.
    """

    toolkit: str
    setting: str
    micro_batches: int
    limit_mib: int | None = None
    at_once: int = 1

    @property
    def name(self) -> str:
        """Name in the tables."""
        limit = f"within {self.limit_mib} MiB" if self.limit_mib else ""
        side_by_side = f"{self.at_once} side by side" if self.at_once > 1 else ""
        return " ".join(filter(None, (self.toolkit, self.setting, side_by_side, limit)))


class Work(Protocol):
    """Workload of all entries of a race: a step on `utterances` utterances on a device."""

    utterances: int
    device: str


@dataclass(frozen=True)
class Terms:
    """Workload: utterances of the step, their durations in seconds, width, dropout of the residual branches, device."""

    utterances: int
    shortest: float
    longest: float
    width: int
    dropout: float
    device: str
    mixed_precision: bool


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch: features (B, T, F), frames (B,), tokens (B, U) without start and end, token_lengths (B,)."""

    features: torch.Tensor
    frames: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor

    def to(self, device: str) -> "MicroBatch":
        """Return the micro-batch on another device."""
        return MicroBatch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def cut(speech: FixedSpeech, micro_batches: int) -> list[MicroBatch]:
    """Split utterances, longest first, into micro-batches of equal numbers, each padded to its own longest."""
    size = len(speech.frames) // micro_batches
    pieces = []
    for start in range(0, len(speech.frames), size):
        rows = slice(start, start + size)
        frames, token_lengths = speech.frames[rows], speech.token_lengths[rows]
        features, tokens = speech.features[rows, : int(frames.max())], speech.tokens[rows, : int(token_lengths.max())]
        pieces.append(MicroBatch(features, frames, tokens, token_lengths))
    return pieces


class Contestant(Protocol):
    """Model in training by one toolkit."""

    version: str
    parameters: int
    resident_before: float
    """Resident MiB of the process with the toolkit imported, before the model is built."""

    def step(self) -> float:
        """Run one optimizer step on the global batch; return its loss."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of one more step in bytes, with weights, gradients and optimizer state."""
        ...

    def resident_peak_mib(self) -> float:
        """Return the peak resident memory since `resident_before` (VmHWM), in MiB."""
        ...
