"""Description of a Whisper model before it has weights, the counterpart of `models/architecture.py`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from konkanivani.config import AudioContext, AugmentConfig, LossConfig, TuningConfig
from konkanivani.models.adapters import merged, tune
from konkanivani.models.asr import SkipInit
from konkanivani.models.flops import Layer
from konkanivani.models.losses import LossTerm, Objective
from konkanivani.models.whisper.features import WhisperFrontEnd
from konkanivani.models.whisper.model import Whisper
from konkanivani.models.whisper.network import SpeechFraming, WhisperShape, WindowFraming


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
        heard = ", context limited to the speech" if self.audio_context == "speech" else ""
        return f"Whisper {self.model.d_model}, {self.model.encoder_layers}+{self.model.decoder_layers} layers{heard}"

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
        spoken = len(samples) * (tokens + 1)
        return (
            Layer("first convolution", "2 B T 3 F D", 2 * len(samples) * features * 3 * shape.mel_bins * width, 1),
            Layer("second convolution", "2 B T' 3 D^2", 2 * rows * 3 * width**2),
            Layer("feed-forward", "L 4 B T' D I", blocks * 4 * rows * width * inner),
            Layer("attention's projections", "L 8 B T' D^2", blocks * 8 * rows * width**2),
            Layer("attention", "L 4 B T'^2 D", blocks * 4 * rows * frames * width, is_dense=False),
            Layer("decoder's self-attention", "M 8 B U D^2", decoders * 8 * spoken * width**2),
            Layer("its products", "M 4 B U^2 D", decoders * 4 * spoken * (tokens + 1) * width, is_dense=False),
            Layer("cross-attention", "M 4 B (U + T') D^2", decoders * 4 * (spoken + rows) * width**2),
            Layer("its products over frames", "M 4 B U T' D", decoders * 4 * spoken * frames * width, is_dense=False),
            Layer("decoder's feed-forward", "M 4 B U D I", decoders * 4 * spoken * width * inner),
            Layer("decoder's output", "2 B U D V", 2 * spoken * width * shape.vocab_size),
        )
