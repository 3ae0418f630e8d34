"""Speech model as a graph of tensor operations, from waveforms to CTC log probabilities, for ONNX.

B batch, S samples, T feature frames, T' encoder frames, D model width, V vocabulary.
"""

import importlib.util
import sys
from typing import Any

import torch
import torch.nn.functional as F

from konkanivani.errors import ResourceError, UsageError
from konkanivani.inference.speech_model import SpeechModel
from konkanivani.lengths import SUBSAMPLING, beyond, subsampled_length
from konkanivani.models.architecture import HybridArchitecture
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.conformer import Encoder, keep_activations
from konkanivani.models.front_end import FrontEnd, LogMel, has_margins, log_power, normalize, with_margins
from konkanivani.models.twin import twin_of

PACKAGES = "onnx", "onnxruntime", "onnxscript"  # the extra `export` of setup.cfg


def require_onnx() -> None:
    """Raise a ResourceError with an install command if a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"ONNX files need {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Install: {sys.executable} -m pip install {' '.join(missing)}"
        )


class MatrixLogMel(torch.nn.Module):
    """`LogMel` with the Fourier transform as a matrix product, and lengths (B,) as tensors.

    Exporters do not support a real FFT of frames. The matrices, windowed cosines and sines (2 K, W) and mel filters (F,
    K), are kernels of convolutions: quantisation, which applies to matrix products, leaves them in full precision.
    """

    waves: torch.Tensor
    filters: torch.Tensor

    def __init__(self, log_mel: LogMel) -> None:
        super().__init__()
        self.config = log_mel.config
        spectrum = log_mel.power.spectrogram
        size = self.config.fft_samples
        window = self.config.window_samples
        before = (size - window) // 2  # the STFT window is centred in the FFT
        times = torch.arange(before, before + window, dtype=torch.float64)
        bins = torch.arange(size // 2 + 1, dtype=torch.float64)
        # Computed in float64 and rounded once: angles exceed a thousand radians.
        angles = 2 * torch.pi / size * bins[:, None] * times[None, :]
        waves = torch.cat([angles.cos(), angles.sin()]) * spectrum.window.double().cpu()
        if self.config.dc_removal == "frame":
            # Every wave becomes orthogonal to a constant: X(f) - X(0) W(f) / W(0).
            waves = waves - waves.sum(dim=1, keepdim=True) * waves[0] / waves[0].sum()
        self.register_buffer("waves", waves.float()[:, None, :])
        self.register_buffer("filters", log_mel.power.mel_scale.fb.cpu().t()[:, :, None].contiguous())
        self.before = before
        self.after = size - window - before

    def forward(self, waveforms: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Return features (B, T, F) for waveforms (B, S) and their numbers of feature frames (B,)."""
        framed = waveforms[:, None, self.before : -self.after or None]
        cosines, sines = F.conv1d(framed, self.waves, stride=self.config.hop_samples).chunk(2, dim=1)
        power = F.conv1d(cosines.square() + sines.square(), self.filters)
        features = log_power(power, self.config).transpose(1, 2)
        # The mean over frames divides by their number, which is 0 for a short waveform.
        padding = beyond(frames, features.shape[1])
        frames = frames.clamp_min(1).to(features.dtype)
        return normalize(features, padding, frames, self.config)


class GraphEncoder(Encoder):
    """Twin of `Encoder` whose lengths are tensors (B,), annotated as Any; it always pads."""

    def encode_tensors(self, features: torch.Tensor, feature_lengths: Any) -> torch.Tensor:
        """Return encoded (B, T', D), all frames in one chunk: a loop would be unrolled for the example's length."""
        encoded, _, _ = self.with_middle(features, feature_lengths, keep_activations, sys.maxsize)
        return encoded

    def feature_padding(self, features: torch.Tensor, feature_lengths: Any) -> torch.Tensor | None:
        return beyond(feature_lengths, features.shape[1]) if self.subsampling.is_padded else None

    def frame_padding(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        # Attention without any key gives NaN: leave one frame unmasked.
        return beyond(lengths.clamp_min(1), x.shape[1])

    def encoded_lengths(self, feature_lengths: Any) -> Any:
        return subsampled_length(feature_lengths, self.config.subsampling)


class RecognitionGraph(torch.nn.Module):
    """Graph from waveforms (B, S) at 16 kHz to log probabilities (B, T', V), with lengths (B,) int64 for both.

    The layers are shared with the speech model; a UsageError is raised if it has no CTC head. A waveform too short for
    one encoder frame has output length 0.
    """

    def __init__(self, speech_model: SpeechModel) -> None:
        super().__init__()
        model = speech_model.model
        front_end = speech_model.front_end
        architecture = speech_model.architecture
        if not (
            isinstance(architecture, HybridArchitecture)
            and isinstance(model, KonkaniVaniASR)
            and isinstance(front_end, FrontEnd)
            and model.ctc_head is not None
        ):
            raise UsageError(
                "ONNX files contain the encoder and the CTC head, but this model has no CTC head. Export it as a "
                "bundle."
            )
        self.log_mel = MatrixLogMel(front_end.log_mel)
        self.framing = architecture.framing
        self.encoder = twin_of(model.encoder, GraphEncoder)
        self.ctc_head = model.ctc_head
        # Zeros for two encoder frames, so that even an empty waveform has a time axis.
        config = architecture.features
        self.subsampling = self.framing.subsampling
        self.zeros_after = config.fft_samples + (3 * SUBSAMPLING[self.subsampling] - 2) * config.hop_samples

    def forward(self, waveforms: torch.Tensor, sample_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frames = self.framing.feature_length(sample_lengths)
        waveforms = F.pad(waveforms, (0, self.zeros_after))
        if has_margins(self.framing.features):
            waveforms = with_margins(waveforms, sample_lengths, self.framing)
        features = self.log_mel(waveforms, frames)
        encoded_lengths = subsampled_length(frames, self.subsampling)
        encoded = self.encoder.encode_tensors(features, frames)
        return self.ctc_head(encoded).log_softmax(dim=-1), encoded_lengths
