"""Which recogniser: everything about one that is known before it has weights, as one value."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.base.config import AugmentConfig, FeatureConfig, LossConfig, ModelConfig, TrainConfig, TuningConfig
from konkanivani.base.lengths import FrameLengths, Framing
from konkanivani.model.adapters import merged, tune
from konkanivani.model.asr import KonkaniVaniASR, SkipInit
from konkanivani.model.flops import CTC_HEAD, Layer, forward_layers
from konkanivani.model.front_end import FeatureExtractor, FrontEnd
from konkanivani.model.losses import LossTerm, Objective


class Dimensions(Protocol):
    """The shape of a network; `d_model` is its width."""

    d_model: int
    encoder_layers: int
    decoder_layers: int


class Architecture(Protocol):
    """A recogniser before it has weights; a frozen value, so that equal ones build the same.

    No utterance may be longer than `longest_seconds`, no transcript have more than `most_tokens`.
    """

    vocab_size: int
    model: Dimensions
    has_ctc: bool
    has_decoder: bool
    longest_seconds: float
    most_tokens: float
    framing: FrameLengths
    tuning: TuningConfig
    has_base: bool  # what is not trained lies in files of others: no checkpoint holds it
    description: str

    def objective(self, loss: LossConfig) -> Objective:
        """What is minimised."""

    def build(self) -> torch.nn.Module:
        """The network, initialised from torch's generator."""

    def build_without_values(self) -> torch.nn.Module:
        """The network on the device `meta`, for its shapes, or for weights that are there already to be assigned."""

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["Architecture", Mapping[str, torch.Tensor]]:
        """The same recogniser with nothing frozen or added, and `weights` as its own, low-rank products merged."""

    def build_front_end(self, augment: AugmentConfig) -> FeatureExtractor:
        """Waveforms to the features that the network hears."""

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Every product of a forward pass over utterances of so many samples, `tokens` tokens each."""


@dataclass(frozen=True)
class HybridArchitecture:
    """A Conformer or Transformer of ours: its dimensions, the features that it hears, its tokens, its heads.

    What is built of equal values has the same shapes, takes the same memory and the same arithmetic.
    """

    model: ModelConfig
    features: FeatureConfig
    vocab_size: int
    has_ctc: bool = True
    tuning: TuningConfig = TuningConfig()
    longest_seconds = most_tokens = math.inf  # its positions are computed
    has_base = False

    @property
    def has_decoder(self) -> bool:
        """Whether there is an attention decoder."""
        return self.model.decoder_layers > 0

    @property
    def description(self) -> str:
        """Its kind and size for a person."""
        model = self.model
        return f"{model.encoder_type} {model.d_model}, {model.encoder_layers}+{model.decoder_layers} layers"

    def objective(self, loss: LossConfig) -> Objective:
        """What is minimised: a term of each head."""
        terms = []
        if self.has_ctc:
            terms.append(LossTerm("ctc", loss.ctc_weight, has_end=False))
        if self.has_decoder:
            terms.append(LossTerm("attention", 1 - loss.ctc_weight, has_end=True))
        return Objective(tuple(terms), loss.label_smoothing, loss.intermediate_ctc_weight)

    @property
    def framing(self) -> Framing:
        """How many frames so many samples are."""
        return Framing(self.features, self.model.subsampling)

    def build(self) -> KonkaniVaniASR:
        """The network, initialised from torch's generator; what is not to be trained is frozen."""
        model = KonkaniVaniASR(self.model, self.vocab_size, self.features.mel_bins, self.has_ctc)
        tune(model, self.tuning)
        return model

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["HybridArchitecture", Mapping[str, torch.Tensor]]:
        """The same recogniser with nothing frozen or added, and `weights` as its own, low-rank products merged."""
        return dataclasses.replace(self, tuning=TuningConfig()), merged(weights, self.tuning.scale)

    def build_without_values(self) -> KonkaniVaniASR:
        """The network on the device `meta`, for its shapes, or for weights that are there already to be assigned."""
        with torch.device("meta"), SkipInit():
            return self.build()

    def build_front_end(self, augment: AugmentConfig) -> FrontEnd:
        """Waveforms to the features that the network hears."""
        return FrontEnd(self.features, augment)

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Every product of a forward pass over utterances of so many samples, `tokens` tokens each."""
        frames = tuple(map(self.framing.feature_length, samples))
        layers = forward_layers(self.model, self.vocab_size, self.features.mel_bins, frames, tokens)
        return tuple(layer for layer in layers if self.has_ctc or layer.name != CTC_HEAD)


def architecture_of(config: TrainConfig, vocab_size: int) -> HybridArchitecture:
    """The recogniser that these settings describe, for a tokenizer of so many tokens."""
    has_ctc = config.loss.ctc_weight != 0
    return HybridArchitecture(config.model, config.features, vocab_size, has_ctc, config.tuning)
