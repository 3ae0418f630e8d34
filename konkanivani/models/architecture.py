"""Description of a speech recognition model before it has weights: shapes, features, tokens and heads."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from konkanivani.auto_defaults import resolved
from konkanivani.config import AugmentConfig, FeatureConfig, LossConfig, ModelConfig, TrainConfig, TuningConfig
from konkanivani.lengths import FrameLengths, Framing
from konkanivani.models.adapters import merged, tune
from konkanivani.models.asr import KonkaniVaniASR, SkipInit, SpeechNetwork
from konkanivani.models.flops import CTC_HEAD, Layer, forward_layers
from konkanivani.models.front_end import FrontEnd
from konkanivani.models.losses import LossTerm, Objective

# Bounds for untrusted files, checked before any allocation.
MAX_LAYERS = 256
MAX_DIMENSION = 2**16


class Dimensions(Protocol):
    """Size of a network."""

    @property
    def d_model(self) -> int:
        """Width."""

    @property
    def encoder_layers(self) -> int:
        """Number of encoder blocks."""

    @property
    def decoder_layers(self) -> int:
        """Number of decoder blocks."""


def is_within_bounds(model: Dimensions) -> bool:
    """Return whether the dimensions are plausible for a model of this project."""
    numbers = [value for value in vars(model).values() if isinstance(value, int)]
    return max(numbers) <= MAX_DIMENSION and model.encoder_layers + model.decoder_layers <= MAX_LAYERS


class Architecture(Protocol):
    """Model without weights: a frozen dataclass; equal values build equal networks."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""

    @property
    def model(self) -> Dimensions:
        """Dimensions of the network."""

    @property
    def tuning(self) -> TuningConfig:
        """Part of the network that is trained."""

    @property
    def has_ctc(self) -> bool:
        """Whether there is a CTC head."""

    @property
    def has_decoder(self) -> bool:
        """Whether there is an attention decoder."""

    @property
    def has_base(self) -> bool:
        """Whether frozen weights are read from another project's files; checkpoints do not store them."""

    @property
    def longest_seconds(self) -> float:
        """Maximal duration of an utterance in seconds."""

    @property
    def most_tokens(self) -> float:
        """Maximal number of tokens of a transcript."""

    @property
    def framing(self) -> FrameLengths:
        """Conversion of samples to frames."""

    @property
    def description(self) -> str:
        """Type and size, for messages."""

    def objective(self, loss: LossConfig) -> Objective:
        """Return the training objective."""

    def build(self) -> SpeechNetwork:
        """Build the network, initialised from torch's default generator."""

    def build_without_values(self) -> SpeechNetwork:
        """Build the network on the `meta` device, for its shapes or to assign existing weights."""

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["Architecture", Mapping[str, torch.Tensor]]:
        """Return the architecture without tuning, and `weights` for it, with low-rank products merged."""

    def build_front_end(self, augment: AugmentConfig) -> torch.nn.Module:
        """Build the `FeatureExtractor`, a module, that turns waveforms into the network's input features."""

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Return every matrix product of a forward pass over utterances of `samples` samples, `tokens` tokens each."""


@dataclass(frozen=True)
class HybridArchitecture:
    """Architecture of KonkaniVani's own Conformer or Transformer: dimensions, features, vocabulary and heads.

    Networks built of equal values have the same shapes and need the same memory and arithmetic.
    """

    model: ModelConfig
    features: FeatureConfig
    vocab_size: int
    has_ctc: bool = True
    tuning: TuningConfig = TuningConfig()
    longest_seconds = most_tokens = math.inf  # positions are computed on demand
    has_base = False

    @property
    def has_decoder(self) -> bool:
        """Whether there is an attention decoder."""
        return self.model.decoder_layers > 0

    @property
    def description(self) -> str:
        """Type and size, for messages."""
        model = self.model
        return f"{model.encoder_type} {model.d_model}, {model.encoder_layers}+{model.decoder_layers} layers"

    def objective(self, loss: LossConfig) -> Objective:
        """Return the training objective: one term per head."""
        weight = resolved(loss.ctc_weight)
        terms = []
        if self.has_ctc:
            terms.append(LossTerm("ctc", weight, has_end=False))
        if self.has_decoder:
            terms.append(LossTerm("attention", 1 - weight, has_end=True))
        return Objective(tuple(terms), loss.label_smoothing, loss.intermediate_ctc_weight)

    @property
    def framing(self) -> Framing:
        """Conversion of samples to frames."""
        return Framing(self.features, self.model.subsampling)

    def build(self) -> KonkaniVaniASR:
        """Build the network, initialised from torch's default generator; parameters that are not trained are frozen."""
        model = KonkaniVaniASR(self.model, self.vocab_size, self.features.mel_bins, self.has_ctc)
        tune(model, self.tuning)
        return model

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["HybridArchitecture", Mapping[str, torch.Tensor]]:
        """Return the architecture without tuning, and `weights` for it, with low-rank products merged."""
        return dataclasses.replace(self, tuning=TuningConfig()), merged(weights, self.tuning.scale)

    def build_without_values(self) -> KonkaniVaniASR:
        """Build the network on the `meta` device, for its shapes or to assign existing weights."""
        with torch.device("meta"), SkipInit():
            return self.build()

    def build_front_end(self, augment: AugmentConfig) -> FrontEnd:
        """Build the module that turns waveforms into the network's input features."""
        return FrontEnd(self.features, augment)

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Return every matrix product of a forward pass over utterances of `samples` samples, `tokens` tokens each."""
        frames = tuple(map(self.framing.feature_length, samples))
        layers = forward_layers(self.model, self.vocab_size, self.features.mel_bins, frames, tokens)
        return tuple(layer for layer in layers if self.has_ctc or layer.name != CTC_HEAD)


def architecture_of(config: TrainConfig, vocab_size: int) -> HybridArchitecture:
    """Return the architecture of these settings, for a vocabulary of `vocab_size` tokens."""
    has_ctc = config.loss.ctc_weight != 0  # a head without a loss would never be trained
    return HybridArchitecture(config.model, config.features, vocab_size, has_ctc, config.tuning)
