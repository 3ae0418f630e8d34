"""A speech model as one graph of plain tensor operations, from waveforms to CTC's log probabilities, to be exported.

B batch, S samples, T feature frames, T' encoder frames, F mel bins, K DFT bins, V vocabulary.
"""

import sys

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import (
    FFT_SAMPLES,
    HOP_SAMPLES,
    SUBSAMPLING,
    WINDOW_SAMPLES,
    beyond,
    feature_lengths,
    subsampled_length,
    subsampled_lengths,
)
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.model.blocks import run_directly
from konkanivani.model.front_end import SMALLEST_POWER, LogMel, normalized

# Two frames of the encoder: with as many zeros after it a waveform of any length, none included, has an axis of time.
ZEROS_AFTER = FFT_SAMPLES + (3 * SUBSAMPLING - 2) * HOP_SAMPLES


class MatrixLogMel(torch.nn.Module):
    """`LogMel` with the Fourier transform as a product with its matrix, and lengths (B,) as tensors.

    Exporters know no real FFT of frames. The two matrices, windowed cosines and sines (2 K, 400) and the mel filters
    (F, K), are the kernels of convolutions: quantisation, which takes products, leaves them in full precision.
    """

    def __init__(self, log_mel: LogMel) -> None:
        super().__init__()
        spectrum = log_mel.power.spectrogram
        before = (FFT_SAMPLES - WINDOW_SAMPLES) // 2  # the window stands in the middle of the transform
        times = torch.arange(before, before + WINDOW_SAMPLES, dtype=torch.float64)
        bins = torch.arange(FFT_SAMPLES // 2 + 1, dtype=torch.float64)
        angles = 2 * torch.pi / FFT_SAMPLES * bins[:, None] * times[None, :]
        waves = torch.cat([angles.cos(), angles.sin()]) * spectrum.window.double().cpu()
        self.register_buffer("waves", waves.float()[:, None, :])
        self.register_buffer("filters", log_mel.power.mel_scale.fb.cpu().t()[:, :, None].contiguous())
        self.before = before

    def forward(self, waveforms: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Waveforms (B, S), their feature frames (B,) -> features (B, T, F)."""
        framed = waveforms[:, None, self.before : -self.before]
        cosines, sines = F.conv1d(framed, self.waves, stride=HOP_SAMPLES).chunk(2, dim=1)
        power = F.conv1d(cosines.square() + sines.square(), self.filters)
        features = power.clamp_min(SMALLEST_POWER).log().transpose(1, 2)
        padding = beyond(frames, features.shape[1])
        return normalized(features, padding, frames.clamp_min(1).to(features.dtype))


class RecognitionGraph(torch.nn.Module):
    """Waveforms (B, S) of 16 kHz, sample_lengths (B,) int64 -> log probabilities (B, T', V), their lengths (B,) int64.

    The layers are the speech model's own. A waveform too short for a frame of the encoder has length 0.
    """

    def __init__(self, speech_model: SpeechModel) -> None:
        super().__init__()
        self.log_mel = MatrixLogMel(speech_model.front_end.log_mel)
        self.encoder = speech_model.model.encoder
        self.ctc_head = speech_model.model.ctc_head

    def forward(self, waveforms: torch.Tensor, sample_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frames = feature_lengths(sample_lengths)
        features = self.log_mel(F.pad(waveforms, (0, ZEROS_AFTER)), frames)
        encoded_lengths = subsampled_lengths(frames)
        # Attention over no frame at all would not be a number, so that one stays in sight.
        padding = beyond(encoded_lengths.clamp_min(1), subsampled_length(features.shape[1]))
        encoded, _ = self.encoder.encode(features, padding, run_directly, chunk_frames=sys.maxsize)
        return self.ctc_head(encoded).log_softmax(dim=-1), encoded_lengths
