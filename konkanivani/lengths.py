"""Arithmetic on lengths of waveforms, frames and tokens; no other module does it.

B batch, T feature frames, T' encoder frames, U tokens. The lengths of a batch are Python ints on the host, one per
utterance, so that computing a mask or a CTC alignment never waits for the GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from konkanivani.config import FeatureConfig
from konkanivani.console import duration_words

SAMPLE_RATE = 16_000
SUBSAMPLING = {"valid": 4, "striding": 4, "separable": 8}  # feature frames per encoder frame
SUBSAMPLING_REACH = 7  # receptive field of encoder frame t' without padding: feature frames 4 t' to 4 t' + 6

Lengths = tuple[int, ...]
BatchLengths = Lengths | torch.Tensor
"""Lengths of a batch; in a captured step a tensor (B,) int64 on the device, whose values the host never reads."""
Count = TypeVar("Count", int, np.ndarray, torch.Tensor)
"""One length, or (N,) lengths: an array, or a tensor in an exported graph, whose values are known only at run time."""


@dataclass(frozen=True)
class InputUnit:
    """Unit in which the length, and with it the cost, of an input is counted: seconds of audio, or tokens of text.

    `rate` is the numbers of an input's tensor per unit. On a CPU, micro-batches longer than `cpu_batch` units only add
    padding; lengths up to `typical` units guide the search for a memory plan.
    """

    name: str
    rate: int
    dtype: torch.dtype
    typical: float
    cpu_batch: float

    def total(self, length: float) -> str:
        """Return the length of a whole corpus for messages, such as 1.5 h or 12,000 tokens."""
        return duration_words(length / 3600) if self.dtype.is_floating_point else f"{length:,.0f} {self.name}"

    def text(self, length: float) -> str:
        """Return the length for messages, such as 1.5 s or 196 tokens."""
        return f"{length:.1f} s" if self.dtype.is_floating_point else f"{length:.0f} {self.name}"


# On a CPU, longer micro-batches only add padding (4 x 2 beats 1 x 8: docs/performance.md); a GPU is faster the fuller
# it is.
SECONDS = InputUnit("s", SAMPLE_RATE, torch.float32, typical=20.0, cpu_batch=24.0)
TOKENS = InputUnit("tokens", 1, torch.long, typical=256.0, cpu_batch=2048.0)


def unit_of(inputs: torch.Tensor) -> InputUnit:
    """Return the unit of a batch's input: waveforms are floats, tokens integers."""
    return SECONDS if inputs.is_floating_point() else TOKENS


class FrameLengths(Protocol):
    """Conversion of a number of samples to feature frames and encoder frames, and of frames to times."""

    @property
    def unit(self) -> InputUnit:
        """Unit of an input's length; a text has tokens in place of samples."""

    @property
    def encoder_hop(self) -> int:
        """Samples from one encoder frame to the next."""

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames."""

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames."""

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the centre of an encoder frame's receptive field, in seconds."""


@dataclass(frozen=True)
class Framing:
    """Frame lengths of a native recognizer, from its feature settings and its kind of subsampling."""

    features: FeatureConfig
    subsampling: str = "valid"
    unit = SECONDS

    @property
    def padding(self) -> tuple[int, int]:
        """Samples of padding before and after the waveform: half an FFT, unless `frame_padding` is none.

        With zeros, the last frame starts one hop before the end of the waveform: S // hop frames.
        """
        half = self.features.fft_samples // 2
        hop = self.features.hop_samples
        return {"none": (0, 0), "zeros": (half, half - hop), "reflected": (half, half)}[self.features.frame_padding]

    def feature_length(self, samples: Count) -> Count:
        """Return the number of feature frames, at least 0: by default 1 + (samples - 512) // 160."""
        uncovered = self.features.fft_samples - sum(self.padding)
        frames = _at_least_0(1 + (samples - uncovered) // self.features.hop_samples)
        # Reflection needs more samples than it pads; a shorter waveform has no frames.
        return frames * (samples > self.padding[0]) if self.features.frame_padding == "reflected" else frames

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of encoder frames, at least 0."""
        return subsampled_length(self.feature_length(samples), self.subsampling)

    @property
    def encoder_hop(self) -> int:
        """Samples from one encoder frame to the next."""
        return SUBSAMPLING[self.subsampling] * self.features.hop_samples

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the centre of an encoder frame's receptive field, in seconds: by default 46 ms, then every 40 ms."""
        first_middle = (SUBSAMPLING_REACH - 1) / 2 if self.subsampling == "valid" else 0.0
        middle_feature = SUBSAMPLING[self.subsampling] * frame + first_middle
        first_sample = self.features.fft_samples / 2 - self.padding[0]
        return (self.features.hop_samples * middle_feature + first_sample) / SAMPLE_RATE


def subsampled_length(frames: Count, subsampling: str = "valid") -> Count:
    """Return the number of encoder frames after two or three convolutions of kernel 3 and stride 2, at least 0.

    Unpadded if `subsampling` is valid; else padded by 1, so that each convolution halves the length, rounded up.
    """
    if subsampling == "valid":
        return _at_least_0(((frames - 1) // 2 - 1) // 2)
    return (frames - 1) // SUBSAMPLING[subsampling] + 1


def _at_least_0(count: Count) -> Count:
    # Not max(): the count may be an array, or a tensor of an exported graph.
    return count * (count > 0)


def resampled_samples(samples: Count, old: int, new: int) -> Count:
    """Return the length after resampling from rate `old` to `new`, rounded up as torchaudio does."""
    # Ceiling in integers, exact for any length.
    return -(-samples * new // old)


def speed_perturbed_samples(samples: Count, speed: float) -> Count:
    """Return the length after speed perturbation by the factor `speed`."""
    # The factor is rounded to two decimals, so that the resampler gets a ratio of integers.
    return resampled_samples(samples, round(speed * 100), 100)


def ctc_frames_needed(tokens: list[int]) -> int:
    """Return the minimum number of encoder frames for CTC: one per token, and a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))


def is_padded(lengths: BatchLengths, longest: int) -> bool:
    """Return whether a mask is needed: some length is less than `longest`, or the host does not know the lengths."""
    # A captured step launches the same kernels for all lengths, so it always masks.
    return isinstance(lengths, torch.Tensor) or min(lengths) < longest


def map_lengths(function: Callable[[Any], Any], lengths: BatchLengths) -> BatchLengths:
    """Return `function` of each length, on the host or on the device."""
    return function(lengths) if isinstance(lengths, torch.Tensor) else tuple(map(function, lengths))


def on_host(lengths: BatchLengths) -> Lengths:
    """Return the lengths, or raise TypeError in a captured step, whose lengths are on the device only."""
    if isinstance(lengths, torch.Tensor):
        raise TypeError("the lengths of a captured step are not on the host")
    return lengths


def padding_mask(lengths: BatchLengths, longest: int, device: torch.device) -> torch.Tensor:
    """Return a bool mask (B, longest) on `device`, True at padding, that is at or after the row's length."""
    if isinstance(lengths, torch.Tensor):
        return beyond(lengths, longest)
    # non_blocking: the host does not wait for the copy.
    return beyond(torch.tensor(lengths).to(device, non_blocking=True), longest)


def padding_or_none(lengths: BatchLengths, longest: int, device: torch.device) -> torch.Tensor | None:
    """Return `padding_mask`, or None if no utterance is padded."""
    return padding_mask(lengths, longest, device) if is_padded(lengths, longest) else None


def beyond(ends: torch.Tensor, longest: int) -> torch.Tensor:
    """Return a bool mask (B, longest), True at or after the row's end; `ends` is (B,) int64."""
    # True is padding, as in the key padding masks of torch.nn.MultiheadAttention.
    return torch.arange(longest, device=ends.device)[None, :] >= ends[:, None]


CHUNK_FRAMES = 1500  # encoder frames, or tokens: one minute of audio
SMALL_CHUNK_FRAMES = 100  # four seconds of audio, after an out-of-memory error
