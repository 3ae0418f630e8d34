"""The only place with arithmetic on lengths of frames and tokens.

B batch, T feature frames, T' encoder frames, U tokens. The lengths of a batch are plain numbers on the host, one an
utterance: whatever is decided by them, from a mask to CTC's alignment, waits for no device.
"""

import torch

SAMPLE_RATE = 16_000
HOP_SAMPLES = 160  # 10 ms
WINDOW_SAMPLES = 400  # 25 ms
FFT_SAMPLES = 512
SUBSAMPLING = 4  # feature frames an encoder frame
SUBSAMPLING_REACH = 7  # feature frames that an encoder frame sees: 4 t' to 4 t' + 6

Lengths = tuple[int, ...]


def feature_length(samples: int) -> int:
    """Feature frames of a waveform, without any padding at its edges: 1 + (samples - 512) // 160, at least 0."""
    return max(0, 1 + (samples - FFT_SAMPLES) // HOP_SAMPLES)


def subsampled_length(frames: int) -> int:
    """Encoder frames after two convolutions of kernel 3 and stride 2 without padding, at least 0."""
    return max(0, ((frames - 1) // 2 - 1) // 2)


def feature_lengths(samples: torch.Tensor) -> torch.Tensor:
    """`feature_length` of each of (B,) int64, for a graph that is exported: there lengths are known when it runs."""
    return (1 + (samples - FFT_SAMPLES) // HOP_SAMPLES).clamp_min(0)


def subsampled_lengths(frames: torch.Tensor) -> torch.Tensor:
    """`subsampled_length` of each of (B,) int64, likewise."""
    return (((frames - 1) // 2 - 1) // 2).clamp_min(0)


def encoder_frame_seconds(frame: float) -> float:
    """Where the middle of what encoder frame `frame` sees lies in the waveform, in seconds: 46 ms, then every 40 ms."""
    middle_feature = SUBSAMPLING * frame + (SUBSAMPLING_REACH - 1) / 2
    return (HOP_SAMPLES * middle_feature + FFT_SAMPLES / 2) / SAMPLE_RATE


def encoded_length(samples: int) -> int:
    """Encoder frames of a waveform, at least 0."""
    return subsampled_length(feature_length(samples))


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
