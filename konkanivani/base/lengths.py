"""The only place with arithmetic on lengths of frames and tokens.

B batch, T feature frames, T' encoder frames, U tokens. The lengths of a batch are plain numbers on the host, one an
utterance: whatever is decided by them, from a mask to CTC's alignment, waits for no device.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from konkanivani.base.config import FeatureConfig

SAMPLE_RATE = 16_000
SUBSAMPLING = {"valid": 4, "striding": 4, "separable": 8}  # feature frames an encoder frame, by the kind of it
SUBSAMPLING_REACH = 7  # feature frames that an encoder frame sees without padding: 4 t' to 4 t' + 6

Lengths = tuple[int, ...]
Count = TypeVar("Count", int, np.ndarray, torch.Tensor)
"""A number, or (N,) of them at once: an array, or a tensor in a graph that knows them only when it runs."""


class FrameLengths(Protocol):
    """How many frames a recogniser makes of so many samples, and where they lie."""

    encoder_hop: int

    def feature_length(self, samples: Count) -> Count:
        """Feature frames."""

    def encoded_length(self, samples: Count) -> Count:
        """Encoder frames."""

    def encoder_frame_seconds(self, frame: float) -> float:
        """Where the middle of what an encoder frame sees lies, in seconds."""


@dataclass(frozen=True)
class Framing:
    """How many frames so many samples are in a recogniser of ours, by its features and its kind of subsampling."""

    features: FeatureConfig
    subsampling: str = "valid"

    @property
    def padding(self) -> tuple[int, int]:
        """Samples that are heard before and after the waveform's: half a transform, where edges are not left out.

        With zeros there the last frame is the one that begins a hop before the waveform ends: S // hop frames.
        """
        half, hop = self.features.fft_samples // 2, self.features.hop_samples
        return {"none": (0, 0), "zeros": (half, half - hop), "reflected": (half, half)}[self.features.frame_padding]

    def feature_length(self, samples: Count) -> Count:
        """Feature frames, at least 0: 1 + (samples - 512) // 160 by default."""
        uncovered = self.features.fft_samples - sum(self.padding)
        frames = _at_least_0(1 + (samples - uncovered) // self.features.hop_samples)
        # What is to be reflected has to be there.
        return frames * (samples > self.padding[0]) if self.features.frame_padding == "reflected" else frames

    def encoded_length(self, samples: Count) -> Count:
        """Encoder frames, at least 0."""
        return subsampled_length(self.feature_length(samples), self.subsampling)

    @property
    def encoder_hop(self) -> int:
        """Samples from one encoder frame to the next."""
        return SUBSAMPLING[self.subsampling] * self.features.hop_samples

    def encoder_frame_seconds(self, frame: float) -> float:
        """Where the middle of what an encoder frame sees lies, in seconds: by default 46 ms, then every 40 ms."""
        first_middle = (SUBSAMPLING_REACH - 1) / 2 if self.subsampling == "valid" else 0.0
        middle_feature = SUBSAMPLING[self.subsampling] * frame + first_middle
        first_sample = self.features.fft_samples / 2 - self.padding[0]
        return (self.features.hop_samples * middle_feature + first_sample) / SAMPLE_RATE


def subsampled_length(frames: Count, subsampling: str = "valid") -> Count:
    """Encoder frames after two or three convolutions of kernel 3 and stride 2, at least 0.

    Without padding, where `subsampling` is valid; else padded by 1, so that each one leaves half, rounded up.
    """
    if subsampling == "valid":
        return _at_least_0(((frames - 1) // 2 - 1) // 2)
    return (frames - 1) // SUBSAMPLING[subsampling] + 1


def _at_least_0(count: Count) -> Count:
    return count * (count > 0)


def resampled_samples(samples: int, old: int, new: int) -> int:
    """Samples that `samples` of rate `old` are at rate `new`; ceil, as torchaudio's resampler counts them."""
    return -(-samples * new // old)


def speed_perturbed_samples(samples: int, speed: float) -> int:
    """Samples left after playing `samples` at `speed`."""
    return resampled_samples(samples, round(speed * 100), 100)


def ctc_frames_needed(tokens: list[int]) -> int:
    """Encoder frames that CTC needs for these token ids: one a token, and a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))


def padding_mask(lengths: Lengths, longest: int, device: torch.device) -> torch.Tensor:
    """(B, longest) bool on `device`, True where a position is beyond its row's length."""
    return beyond(torch.tensor(lengths).to(device, non_blocking=True), longest)


def beyond(ends: torch.Tensor, longest: int) -> torch.Tensor:
    """(B, longest) bool, True where a position is at or beyond its row's end, ends (B,) int64."""
    return torch.arange(longest, device=ends.device)[None, :] >= ends[:, None]


CHUNK_FRAMES = 1500  # encoder frames, or tokens: a minute of speech
SMALL_CHUNK_FRAMES = 100  # four seconds: where memory has run out
