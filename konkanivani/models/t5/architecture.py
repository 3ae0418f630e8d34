"""Architecture of T5, whose input is text: there is no front end beyond the tokens.

B batch, T tokens of an input, U tokens of a target, D model width.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from konkanivani.config import AugmentConfig, LossConfig, TuningConfig
from konkanivani.lengths import TOKENS, Count, Lengths
from konkanivani.models.architecture import Layer
from konkanivani.models.asr import LossTerm, Objective, SkipInit
from konkanivani.models.fine_tuning import merged, tune
from konkanivani.models.t5.model import T5, T5Shape


@dataclass(frozen=True)
class TokenFraming:
    """Lengths of a text: one vector per token."""

    unit = TOKENS
    encoder_hop = 1

    def feature_length(self, samples: Count) -> Count:
        """Return the number of tokens."""
        return samples

    def encoded_length(self, samples: Count) -> Count:
        """Return the number of tokens."""
        return samples

    def encoder_frame_seconds(self, frame: float) -> float:
        """Return the token's position."""
        return frame


class TokenFrontEnd(torch.nn.Module):
    """Front end of a text: the tokens (B, T) themselves, and their lengths."""

    def forward(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]:
        return waveforms, sample_lengths


@dataclass(frozen=True)
class T5Architecture:
    """T5 of any variant; inputs and targets may have any number of tokens."""

    model: T5Shape
    tuning: TuningConfig = TuningConfig()
    has_ctc = False
    has_decoder = True
    longest_seconds = most_tokens = math.inf
    framing = TokenFraming()

    @property
    def has_base(self) -> bool:
        """Whether frozen weights are read from the base model's folder; checkpoints then hold the trained ones only."""
        return self.tuning.is_used

    @property
    def description(self) -> str:
        """Type and size, for messages."""
        return f"T5 {self.model.d_model}, {self.model.encoder_layers}+{self.model.decoder_layers} layers"

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.vocab_size

    def objective(self, loss: LossConfig) -> Objective:
        """Return the training objective: the mean cross entropy of all target tokens."""
        return Objective((LossTerm("attention", 1.0, has_end=True),), loss.label_smoothing)

    def build(self) -> T5:
        """Build the network, initialised from torch's default generator; parameters that are not trained are frozen.

        The embedding is the input of both stacks: with --freeze or --train_layers it is frozen too, and so are the
        encoder's position biases.
        """
        model = T5(self.model)
        tune(model, self.tuning)
        if self.tuning.freeze not in ("none", 0) or self.tuning.train_layers is not None:
            model.decoder.embedding.requires_grad_(False)
            model.encoder.positions.requires_grad_(False)
        return model

    def build_without_values(self) -> T5:
        """Build the network on the `meta` device, for its shapes or to assign existing weights."""
        with torch.device("meta"), SkipInit():
            return self.build()

    def plain(self, weights: Mapping[str, torch.Tensor]) -> tuple["T5Architecture", Mapping[str, torch.Tensor]]:
        """Return the architecture without tuning, and `weights` for it, with low-rank products merged."""
        return dataclasses.replace(self, tuning=TuningConfig()), merged(weights, self.tuning.scale)

    def build_front_end(self, augment: AugmentConfig) -> TokenFrontEnd:
        """Build the module that hands the tokens on."""
        return TokenFrontEnd()

    def forward_layers(self, samples: tuple[int, ...], tokens: int) -> tuple[Layer, ...]:
        """Return every matrix product of a forward pass over inputs of `samples` tokens, targets of `tokens` each."""
        shape = self.model
        width = shape.d_model
        heads = shape.attention_heads * shape.head_width
        products = 3 if shape.variant.is_gated else 2
        blocks = shape.encoder_layers
        decoders = shape.decoder_layers
        # + 1: the start token
        longest = max(samples)
        rows = len(samples) * longest
        written = len(samples) * (tokens + 1)
        inner = 2 * products * width * shape.feedforward_dim
        return (
            Layer("feed-forward", "L 2 p B T D I", blocks * rows * inner),
            Layer("attention's projections", "L 8 B T D H E", blocks * 8 * rows * width * heads),
            Layer("attention", "L 4 B T^2 H E", blocks * 4 * rows * longest * heads, is_dense=False),
            Layer("decoder's self-attention", "M 8 B U D H E", decoders * 8 * written * width * heads),
            Layer("its products", "M 4 B U^2 H E", decoders * 4 * written * (tokens + 1) * heads, is_dense=False),
            Layer("cross-attention", "M 4 B (U + T) D H E", decoders * 4 * (written + rows) * width * heads),
            Layer(
                "its products over tokens", "M 4 B U T H E", decoders * 4 * written * longest * heads, is_dense=False
            ),
            Layer("decoder's feed-forward", "M 2 p B U D I", decoders * written * inner),
            Layer("decoder's output", "2 B U D V", 2 * written * width * shape.vocab_size),
        )
