"""What every contestant is given, and what is measured of it.

B batch, T feature frames, F mel bins, U tokens.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.measuring.fixed_step import FixedSpeech

CTC_SHARE, LABEL_SMOOTHING = 0.3, 0.1


@dataclass(frozen=True)
class Entry:
    """One way in which one toolkit takes the step: `micro_batches` pieces, `setting` is its own affair.

    Ours alone can be told to keep its peak within `limit_mib`, and to run `at_once` pieces side by side.
    """

    toolkit: str
    setting: str
    micro_batches: int
    limit_mib: int | None = None
    at_once: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        limit = f"within {self.limit_mib} MiB" if self.limit_mib else ""
        side_by_side = f"{self.at_once} side by side" if self.at_once > 1 else ""
        return " ".join(filter(None, (self.toolkit, self.setting, side_by_side, limit)))


class Work(Protocol):
    """What all entries of a race do: a step of so many utterances, on a device."""

    utterances: int
    device: str


@dataclass(frozen=True)
class Terms:
    """The work: utterances in the step, their seconds, the model's width, dropout on its residual branches, where."""

    utterances: int
    shortest: float
    longest: float
    width: int
    dropout: float
    device: str
    mixed_precision: bool


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: features (B, T, F), frames (B,), tokens (B, U) without start and end, token_lengths (B,)."""

    features: torch.Tensor
    frames: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor

    def to(self, device: str) -> "MicroBatch":
        """The same on another device."""
        return MicroBatch(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def cut(speech: FixedSpeech, micro_batches: int) -> list[MicroBatch]:
    """The utterances, longest first, in pieces of as many, each padded to its own longest."""
    size = len(speech.frames) // micro_batches
    pieces = []
    for start in range(0, len(speech.frames), size):
        rows = slice(start, start + size)
        frames, token_lengths = speech.frames[rows], speech.token_lengths[rows]
        features, tokens = speech.features[rows, : int(frames.max())], speech.tokens[rows, : int(token_lengths.max())]
        pieces.append(MicroBatch(features, frames, tokens, token_lengths))
    return pieces


class Contestant(Protocol):
    """A toolkit's model in training."""

    version: str
    parameters: int
    resident_before: float
    """MiB of the process with the toolkit imported, before the model."""

    def step(self) -> float:
        """One optimizer step on the window; its loss."""
        ...

    def peak_bytes(self) -> int:
        """The peak of one more step, everything that training keeps included."""
        ...

    def resident_peak_mib(self) -> float:
        """The largest resident memory since `resident_before` (VmHWM), in MiB."""
        ...
