"""Architecture of a model: dimensions, tokens and heads, and the FLOPs and network that follow from them.

A multiply-add is 2 FLOP. The forward pass counts once, the backward pass twice (gradients by the input and by the
weight); only the first convolution's input needs no gradient. Norms, activations, softmax, dropout, CTC and the
optimizer are left out: they are bound by memory, and the time that they take shows up as lost efficiency.

B batch, T feature frames, T' encoder frames, N encoder frames of all utterances, U tokens, D model width.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from konkanivani.config import AugmentConfig, FeatureConfig, LossConfig, ModelConfig, TrainConfig, TuningConfig
from konkanivani.flags import resolved
from konkanivani.lengths import FrameLengths, Framing, subsampled_length
from konkanivani.models.asr import KonkaniVaniASR, LossTerm, Objective, SkipInit, SpeechNetwork
from konkanivani.models.fine_tuning import merged, tune
from konkanivani.models.front_end import FrontEnd

# --------------------
# Arithmetic of a training step, by a formula per layer, and the machine's measured rate to compare it with.


CTC_HEAD = "CTC head"
MAX_TIMING = 1.0  # seconds; a dtype without native instructions takes that for each product
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Forward FLOP of a layer in one micro-batch; the backward pass is `backwards` times that."""

    name: str
    formula: str
    flop: float
    backwards: int = 2
    is_dense: bool = True


def forward_layers(
    config: ModelConfig, vocab_size: int, mel_bins: int, frames: tuple[int, ...], tokens: int
) -> tuple[Layer, ...]:
    """Return every matrix product of a forward pass over utterances of `frames` feature frames, `tokens` tokens each.

    The encoder's blocks process N encoder frames, without padding, as on a CPU; everything else processes B T'.
    """
    width = config.d_model
    inner = config.resolved_feedforward_dim
    kernel = config.convolution_kernel
    kind = config.subsampling
    batch = len(frames)
    lengths = tuple(subsampled_length(length, kind) for length in frames)
    encoded = max(lengths)
    rows = batch * encoded
    packed = sum(lengths)
    targets = batch * (tokens + 1)
    pairs = sum(length**2 for length in lengths)
    blocks = config.encoder_layers
    decoders = config.decoder_layers
    feed_forward = Layer("feed-forward", "L 4 N D I", blocks * 4 * packed * width * inner)
    extra_layers: tuple[Layer, ...] = ()
    if config.encoder_type == "conformer":
        feed_forward = Layer("feed-forward", "L 2 (4 N D I)", blocks * 2 * 4 * packed * width * inner)
        extra_layers = (
            Layer("convolution's gate, output", "L 6 N D^2", blocks * 6 * packed * width**2),
            Layer("depthwise along time", "L 2 N K D", blocks * 2 * packed * kernel * width, is_dense=False),
        )
    if config.attention_positions == "relative":
        by_distance = blocks * 2 * sum(length * (2 * length - 1) for length in lengths) * width
        extra_layers += (
            # Not multiplied by the batch: all utterances share the longest one's table, a constant, hence one backward.
            Layer("distances' projection", "L 2 (2 T' - 1) D^2", blocks * 2 * (2 * encoded - 1) * width**2, 1),
            Layer("attention by distance", "L 2 sum T' (2 T' - 1) D", by_distance, is_dense=False),
        )
    return (
        *_subsampling_layers(config, mel_bins, batch, max(frames)),
        feed_forward,
        Layer("attention's projections", "L 8 N D^2", blocks * 8 * packed * width**2),
        Layer("attention", "L 4 sum T'^2 D", blocks * 4 * pairs * width, is_dense=False),
        *extra_layers,
        Layer(CTC_HEAD, "2 B T' D V", 2 * rows * width * vocab_size),
        Layer("decoder's self-attention", "M 8 B U D^2", decoders * 8 * targets * width**2),
        Layer("its products", "M 4 B U^2 D", decoders * 4 * targets * (tokens + 1) * width, is_dense=False),
        Layer("cross-attention", "M 4 B (U + T') D^2", decoders * 4 * (targets + rows) * width**2),
        Layer("its products over frames", "M 4 B U T' D", decoders * 4 * targets * encoded * width, is_dense=False),
        Layer("decoder's feed-forward", "M 4 B U D I", decoders * 4 * targets * width * inner),
        Layer("decoder's output", "2 B U D V", 2 * targets * width * vocab_size if decoders else 0),
    )


def _subsampling_layers(config: ModelConfig, mel_bins: int, batch: int, frames: int) -> tuple[Layer, ...]:
    """Return the layers before the blocks, for T = `frames` and F = `mel_bins`; each stride halves both."""
    channels = config.subsampling_channels
    kind = config.subsampling
    sizes = []
    shape: tuple[int, ...] = (frames, mel_bins)
    for _ in range(3 if kind == "separable" else 2):
        shape = tuple((size - 3) // 2 + 1 if kind == "valid" else -(-size // 2) for size in shape)
        sizes.append(batch * shape[0] * shape[1])
    # The input needs no gradient: one backward product.
    layers = [Layer("first convolution", "2 B T/2 F/2 9 C", 2 * sizes[0] * 9 * channels, 1)]
    for size in sizes[1:]:
        if kind == "striding":
            layers.append(Layer("second convolution", "2 B T' F' 9 C^2", 2 * size * 9 * channels**2))
            continue
        layers.append(Layer("depthwise convolution", "2 B T' F' 9 C", 2 * size * 9 * channels, is_dense=False))
        layers.append(Layer("pointwise convolution", "2 B T' F' C^2", 2 * size * channels**2))
    output = 2 * sizes[-1] * channels * config.d_model
    return (*layers, Layer("subsampling's output", "2 B T' C F' D", output))


def step_flop(layers: tuple[Layer, ...], recomputes: bool) -> float:
    """Return the FLOP of forward and backward; if every block is recomputed, the forward pass counts twice."""
    return sum(layer.flop * (1 + recomputes + layer.backwards) for layer in layers)


def product_rate(multiply: Multiply, device: torch.device, dtype: torch.dtype, size: int, rounds: int = 20) -> float:
    """Return the FLOP/s of a (size, size) matrix product: the median of up to `rounds` rounds after a warm-up round."""
    own = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=own).to(device, dtype) for _ in range(2))
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        multiply(a, b)
        # CUDA launches asynchronously: without this the launch is timed, not the product.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        if sum(seconds) > MAX_TIMING:
            break
    return 2 * size**3 / statistics.median(seconds[1:] or seconds)


# --------------------
# Description of a speech recognition model before it has weights: shapes, features, tokens and heads.


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
