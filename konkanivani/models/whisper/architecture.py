"""Architecture of Whisper, and its log-mel features.

The padding's frames are not computed: all of them are one constant.

B batch, S samples, T feature frames, F mel bins.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from konkanivani.config import AudioContext, AugmentConfig, LossConfig, TuningConfig
from konkanivani.errors import DataError
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.models.architecture import Layer
from konkanivani.models.asr import LossTerm, Objective, SkipInit
from konkanivani.models.fine_tuning import merged, tune
from konkanivani.models.front_end import SpecAugment
from konkanivani.models.whisper.model import HOP_SAMPLES, SpeechFraming, Whisper, WhisperShape, WindowFraming

# --------------------
# Features of Whisper: log-mel spectrogram over speech, or over a 30 s window padded with silence.


FFT_SAMPLES = 400
MIN_POWER = 1e-10
RANGE = 8.0  # dynamic range in powers of ten, below an utterance's loudest band


class WhisperLogMel(torch.nn.Module):
    """Log-mel spectrogram (B, F, T) of the frames with speech of waveforms (B, S), and a floor (B, 1, 1).

    The floor is the value of every silent frame: 8 powers of ten below the utterance's loudest band, or 1e-10. T is the
    longest utterance's number of frames, at most a window's; frames after a shorter utterance have its floor.
    """

    window: torch.Tensor
    bands: torch.Tensor

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("window", torch.hann_window(FFT_SAMPLES), persistent=False)
        self.register_buffer("bands", mel_bands(shape.mel_bins).to(self.window.dtype), persistent=False)

    def forward(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
        # One spectrum at a time: it is the largest tensor of a small model's step.
        pairs = zip(waveforms, sample_lengths, strict=True)
        rows = [self._logarithms(waveform[:length]) for waveform, length in pairs]
        floor = torch.stack([row.amax() for row in rows])[:, None, None] - RANGE
        floor = floor.clamp_min_(floor.new_full((), MIN_POWER).log10())
        features = floor.expand(-1, self.shape.mel_bins, max(row.shape[1] for row in rows)).contiguous()
        for feature, row, least in zip(features, rows, floor, strict=True):
            torch.maximum(row, least, out=feature[:, : row.shape[1]])
        # As in OpenAI's Whisper: (log10 + 4) / 4.
        return features.add_(4.0).div_(4.0), (floor + 4.0) / 4.0

    def _logarithms(self, waveform: torch.Tensor) -> torch.Tensor:
        """Return log10 bands (F, T) of a waveform (S,), up to its first frame without speech or a window's end."""
        window = self.shape.window_samples
        if len(waveform) > window:
            raise DataError(
                f"An utterance of {len(waveform) / SAMPLE_RATE:.2f} s is longer than the model's window of "
                f"{self.shape.window_seconds:g} s. Exclude it (lower --max_duration), or cut it."
            )
        hops = -(-(len(waveform) + FFT_SAMPLES) // HOP_SAMPLES)
        padded = torch.nn.functional.pad(waveform, (0, min(window, hops * HOP_SAMPLES) - len(waveform)))
        # Whisper drops the last frame of the centred STFT.
        spectrum = torch.stft(padded, FFT_SAMPLES, HOP_SAMPLES, window=self.window, return_complex=True)[:, :-1]
        powers = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        return (self.bands @ powers).clamp_min_(MIN_POWER).log10_()


def mel_bands(count: int) -> torch.Tensor:
    """Return mel filters (count, 201), float64: triangles over the frequency bins, each of area 1 Hz (Slaney, 1998)."""
    # Not torchaudio's: in fp32 its 128 bands differ from OpenAI's table by 1.6e-7, and features by 2e-5.
    octave = 27 / math.log(6.4)  # bands per factor of e above 1000 Hz; below, 15 are evenly spaced
    highest = 15 + octave * math.log(SAMPLE_RATE / 2 / 1000)
    mels = torch.linspace(0, highest, count + 2, dtype=torch.float64)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) / octave))
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FFT_SAMPLES // 2 + 1, dtype=torch.float64)
    low, middle, high = (edges[start : start + count, None] for start in range(3))
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)


class WhisperFrontEnd(torch.nn.Module):
    """Front end: waveforms (B, S) -> features (B, T, F) and their lengths, in fp32.

    T is a window's number of frames or, if the audio context is speech, the longest utterance's: the same features as
    the window's first frames. `augment_seeds` holds one seed per utterance in training and is None in evaluation.
    SpecAugment masks frames with speech, and sets them to the value of the padding.
    """

    def __init__(self, shape: WhisperShape, augment: AugmentConfig, audio_context: AudioContext = "window") -> None:
        super().__init__()
        self.shape = shape
        self.audio_context = audio_context
        self.log_mel = WhisperLogMel(shape)
        self.spec_augment = SpecAugment(augment, shape.mel_bins)

    @torch.no_grad()
    def forward(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]:
        with torch.autocast(waveforms.device.type, enabled=False):
            log_mel, floor = self.log_mel(waveforms, sample_lengths)
        if augment_seeds is not None:
            log_mel = self._mask_features(log_mel, floor, augment_seeds, sample_lengths)
        if self.audio_context == "speech":
            frame_counts = _speech_frames(sample_lengths)
            return log_mel[:, :, : max(frame_counts)].transpose(1, 2), frame_counts
        features = floor.expand(-1, self.shape.mel_bins, self.shape.window_frames).contiguous()
        features[:, :, : log_mel.shape[2]] = log_mel
        return features.transpose(1, 2), (self.shape.window_frames,) * len(sample_lengths)

    def _mask_features(
        self, log_mel: torch.Tensor, floor: torch.Tensor, seeds: tuple[int, ...], sample_lengths: Lengths
    ) -> torch.Tensor:
        time, frequency = self.spec_augment.draw_masks(seeds, _speech_frames(sample_lengths))
        time = torch.nn.functional.pad(time, (0, log_mel.shape[2] - time.shape[1])).to(
            log_mel.device, non_blocking=True
        )
        frequency = frequency.to(log_mel.device, non_blocking=True)
        return torch.where(time[:, None, :] | frequency[:, :, None], floor, log_mel)


def _speech_frames(sample_lengths: Lengths) -> Lengths:
    """Return the number of feature frames with speech, per utterance."""
    return tuple(map(SpeechFraming().feature_length, sample_lengths))


# --------------------
# Description of a Whisper model before it has weights, the counterpart of `models/architecture.py`.


@dataclass(frozen=True)
class WhisperArchitecture:
    """Whisper: an encoder over 30 s windows, or over speech only, and a decoder; features and tokens are fixed."""

    model: WhisperShape
    tuning: TuningConfig = TuningConfig()
    audio_context: AudioContext = "window"
    has_ctc = False
    has_decoder = True

    @property
    def has_base(self) -> bool:
        """Whether frozen weights are read from the base model's folder; checkpoints then hold the trained ones only."""
        return self.tuning.is_used

    @property
    def description(self) -> str:
        """Type and size, for messages."""
        context = ", context limited to the speech" if self.audio_context == "speech" else ""
        return f"Whisper {self.model.d_model}, {self.model.encoder_layers}+{self.model.decoder_layers} layers{context}"

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.vocab_size

    @property
    def longest_seconds(self) -> float:
        """Duration of a window in seconds."""
        return self.model.window_seconds

    @property
    def most_tokens(self) -> int:
        """Maximal number of tokens of a transcript, its prefix included; the start token takes one more position."""
        return self.model.target_positions - 1

    @property
    def framing(self) -> SpeechFraming:
        """Conversion of samples to frames."""
        return SpeechFraming() if self.audio_context == "speech" else WindowFraming(self.model)

    def objective(self, loss: LossConfig) -> Objective:
        """Return the training objective: the mean cross entropy of all labels."""
        return Objective((LossTerm("attention", 1.0, has_end=True),), loss.label_smoothing)

    def build(self) -> Whisper:
        """Build the network, initialised from torch's default generator; parameters that are not trained are frozen."""
        model = Whisper(self.model, self.audio_context)
        tune(model, self.tuning)
        return model

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["WhisperArchitecture", Mapping[str, torch.Tensor]]:
        """Return the architecture without tuning, and `weights` for it, with low-rank products merged."""
        return dataclasses.replace(self, tuning=TuningConfig()), merged(weights, self.tuning.scale)

    def build_without_values(self) -> Whisper:
        """Build the network on the `meta` device, for its shapes or to assign existing weights."""
        with torch.device("meta"), SkipInit():
            return self.build()

    def build_front_end(self, augment: AugmentConfig) -> WhisperFrontEnd:
        """Build the module that turns waveforms into the network's input features."""
        return WhisperFrontEnd(self.model, augment, self.audio_context)

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Return every matrix product of a forward pass over utterances of `samples` samples, `tokens` tokens each.

        In the formulas: B utterances, padded to the longest or to a window, of T feature and T' encoder frames, U
        tokens, F mel bins, D width, I inner width, V vocabulary, L encoder and M decoder layers.
        """
        shape = self.model
        longest = max(samples)
        features = self.framing.feature_length(longest)
        frames = self.framing.encoded_length(longest)
        width = shape.d_model
        inner = shape.feedforward_dim
        blocks = shape.encoder_layers
        decoders = shape.decoder_layers
        # + 1: the start token
        rows = len(samples) * frames
        targets = len(samples) * (tokens + 1)
        return (
            Layer("first convolution", "2 B T 3 F D", 2 * len(samples) * features * 3 * shape.mel_bins * width, 1),
            Layer("second convolution", "2 B T' 3 D^2", 2 * rows * 3 * width**2),
            Layer("feed-forward", "L 4 B T' D I", blocks * 4 * rows * width * inner),
            Layer("attention's projections", "L 8 B T' D^2", blocks * 8 * rows * width**2),
            Layer("attention", "L 4 B T'^2 D", blocks * 4 * rows * frames * width, is_dense=False),
            Layer("decoder's self-attention", "M 8 B U D^2", decoders * 8 * targets * width**2),
            Layer("its products", "M 4 B U^2 D", decoders * 4 * targets * (tokens + 1) * width, is_dense=False),
            Layer("cross-attention", "M 4 B (U + T') D^2", decoders * 4 * (targets + rows) * width**2),
            Layer("its products over frames", "M 4 B U T' D", decoders * 4 * targets * frames * width, is_dense=False),
            Layer("decoder's feed-forward", "M 4 B U D I", decoders * 4 * targets * width * inner),
            Layer("decoder's output", "2 B U D V", 2 * targets * width * shape.vocab_size),
        )
