"""Conformer (Gulati et al., 2020) and Transformer encoder, as the paper reads.

Plain modules, without anything that makes them faster or smaller: ops/passes.py replaces parts of a built model by
twins that compute the same, with the same parameters and names.

B batch, T feature frames or frames of a block, T' encoder frames, F mel bins, C channels, D model width.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.nn.functional as F

from konkanivani.config import ModelConfig
from konkanivani.lengths import CHUNK_FRAMES, SUBSAMPLING, BatchLengths, map_lengths, padding_or_none, subsampled_length
from konkanivani.models.attention import (
    UNPADDED,
    RelativePositions,
    RelativeSelfAttention,
    RotaryPositions,
    SelfAttention,
    SequenceLayout,
)
from konkanivani.randomness import block_dropout, dropout_generator

DROPOUT_LEVELS = 2**16

AnyBlock = TypeVar("AnyBlock", bound=torch.nn.Module, covariant=True)
RunBlock = Callable[..., torch.Tensor]
"""Block, or a function that runs it with the same inputs."""
WrapBlock = Callable[[int, RunBlock], RunBlock]
"""Function of a number and a block that returns a callable with the block's inputs and outputs.

The callable may recompute activations or fetch weights: `wrap_block(number, block)(*inputs)`.

Blocks have numbers from 0, the subsampling, through the encoder and then the decoder.
"""


class BlockList(torch.nn.ModuleList, Generic[AnyBlock]):
    """ModuleList whose blocks have one type, known to a type checker."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[AnyBlock]) -> None: ...

        def __iter__(self) -> Iterator[AnyBlock]: ...


def keep_activations(_number: int, block: RunBlock) -> RunBlock:
    """Return the block as it is: its activations are kept for the backward pass."""
    return block


class Dropout(torch.nn.Module):
    """Dropout (Srivastava et al., 2014): in training each number is 0 with probability `p`, else divided by 1 - p.

    On a CPU the masks are drawn by `draw_mask`.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        return x * draw_mask(x, self.p) * (1 / (1 - self.p))


def draw_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """Return a bool tensor of `like`'s shape, False with probability `p`, drawn from `dropout_generator`.

    64 random bits serve four numbers, so that `p` is rounded to 1 / 65,536: torch draws a float per number, which takes
    a fifteenth of a step's time on a CPU.
    """
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    # From -2^63 up to the largest int64 inclusive (None): all 64 bits are random.
    bits.random_(-(2**63), None, generator=dropout_generator())
    numbers = bits.view(torch.int16)[: like.numel()].view(like.shape)
    return numbers >= round(p * DROPOUT_LEVELS) - DROPOUT_LEVELS // 2


class FeedForward(torch.nn.Module):
    """Feed-forward module, (B, T, D) -> (B, T, D), with its norm (Gulati et al., 2020, section 2.3)."""

    def __init__(self, d_model: int, inner: int, biases: bool = True) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = torch.nn.Linear(d_model, inner, bias=biases)
        self.contract = torch.nn.Linear(inner, d_model, bias=biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.silu(self.expand(self.norm(x))))


class DepthwiseConv(torch.nn.Conv1d):
    """Depthwise convolution along frames, (B, T, D) -> (B, T, D); frames after an utterance's end count as zeros."""

    def __init__(self, d_model: int, kernel: int, bias: bool = True) -> None:
        super().__init__(d_model, d_model, kernel, padding=kernel // 2, groups=d_model, bias=bias)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:  # type: ignore[override]
        # Zeros, so that a short utterance has the same context in any batch.
        if layout.padding is not None:
            x = x.masked_fill(layout.padding[:, :, None], 0.0)
        return self.convolve(x)

    def convolve(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve x (B, T, D) along T, on a CPU in the precision of the weights."""
        # In bf16, oneDNN 3.10 never finishes creating such a kernel if a thread's share is 16 channels or fewer; full
        # precision takes no longer.
        if x.device.type == "cpu" and x.dtype != self.weight.dtype:
            with torch.autocast("cpu", enabled=False):
                return self.convolve(x.to(self.weight.dtype)).to(x.dtype)
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class ConvolutionModule(torch.nn.Module):
    """Convolution module of the Conformer (Gulati et al., 2020, section 2.2), (B, T, D) -> (B, T, D), with its norm.

    The depthwise convolution is followed by LayerNorm, not BatchNorm. If a BatchNorm was folded into the depthwise
    convolution (`has_depthwise_norm` False), the convolution always has a bias: the norm's.
    """

    def __init__(self, d_model: int, kernel: int, biases: bool = True, has_depthwise_norm: bool = True) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.gate = torch.nn.Linear(d_model, 2 * d_model, bias=biases)
        # A BatchNorm folded into a convolution leaves a shift, which needs a bias.
        self.depthwise = DepthwiseConv(d_model, kernel, bias=biases or not has_depthwise_norm)
        self.depthwise_norm = torch.nn.LayerNorm(d_model) if has_depthwise_norm else None
        self.output = torch.nn.Linear(d_model, d_model, bias=biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = F.glu(self.gate(self.norm(x)), dim=-1)
        x = self.depthwise(x, layout)
        if self.depthwise_norm is not None:
            x = self.depthwise_norm(x)
        return self.output(F.silu(x))


def build_self_attention(config: ModelConfig) -> SelfAttention | RelativeSelfAttention:
    """Build the self-attention of an encoder block, with rotary or relative positions."""
    if config.attention_positions == "relative":
        return RelativeSelfAttention(config.d_model, config.attention_heads, config.biases)
    return SelfAttention(config.d_model, config.attention_heads, causal=False, biases=config.biases)


class ConformerBlock(torch.nn.Module):
    """Conformer block, (B, T, D) -> (B, T, D): x + FFN / 2, x + MHSA, x + Conv, x + FFN / 2, LayerNorm.

    Gulati et al. (2020), equation 1. The paper's final LayerNorm of a block is stored as the entry norm of the next
    one, as in the files of weights; a published model's first block therefore has none.
    """

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__()
        d_model = config.d_model
        inner = config.resolved_feedforward_dim
        has_depthwise_norm = config.convolution_norm == "layer"
        self.entry_norm = torch.nn.LayerNorm(d_model) if config.entry_norm or not is_first else None
        self.first_feedforward = FeedForward(d_model, inner, config.biases)
        self.attention_norm = torch.nn.LayerNorm(d_model)
        self.attention = build_self_attention(config)
        self.dropout = Dropout(config.dropout)
        self.convolution = ConvolutionModule(d_model, config.convolution_kernel, config.biases, has_depthwise_norm)
        self.second_feedforward = FeedForward(d_model, inner, config.biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        x = x + 0.5 * self.dropout(self.first_feedforward(x))
        x = x + self.dropout(self.attention(self.attention_norm(x), layout))
        x = x + self.dropout(self.convolution(x, layout))
        x = x + 0.5 * self.dropout(self.second_feedforward(x))
        return x


class TransformerBlock(torch.nn.Module):
    """Pre-norm Transformer encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(config.d_model)
        self.attention = build_self_attention(config)
        self.dropout = Dropout(config.dropout)
        self.feedforward = FeedForward(config.d_model, config.resolved_feedforward_dim, config.biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), layout))
        x = x + self.dropout(self.feedforward(x))
        return x


class Subsampling(torch.nn.Module):
    """Subsampling by 4 without padding: a 3 x 3 convolution and a depthwise-separable one, each with stride 2.

    Features (B, T, F) -> (B, T', D). Without padding, a valid frame never sees the zeros after an utterance.
    Depthwise-separable as in FastConformer (Rekesh et al., 2023): two full convolutions cost more than half of the
    encoder's arithmetic.
    """

    is_padded = False
    """Whether a valid frame may see frames after an utterance's end, which then have to be zeros."""

    def __init__(self, mel_bins: int, channels: int, d_model: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, stride=2)
        self.depthwise = torch.nn.Conv2d(channels, channels, 3, stride=2, groups=channels)
        self.pointwise = torch.nn.Conv2d(channels, channels, 1)
        self.output = torch.nn.Linear(channels * subsampled_length(mel_bins), d_model)

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        # Not in half precision on a CPU: oneDNN's bf16 depthwise kernel may never terminate (DepthwiseConv).
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.first(features[:, None]))
            x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))


class PaddedSubsampling(torch.nn.Module):
    """Subsampling by 4 or 8 with padding: 3 x 3 convolutions with stride 2 and padding 1, each followed by a ReLU.

    Features (B, T, F) -> (B, T', D). Two full convolutions, as in the first Conformers, or one full and two
    depthwise-separable ones, as in FastConformer (Rekesh et al., 2023).
    """

    is_padded = True

    def __init__(self, mel_bins: int, channels: int, d_model: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stride = SUBSAMPLING[kind]
        stages = [[torch.nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)]]
        if kind == "striding":
            stages.append([torch.nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)])
        else:
            for _ in range(2):
                depthwise = torch.nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1, groups=channels)
                stages.append([depthwise, torch.nn.Conv2d(channels, channels, 1)])
        self.stages = torch.nn.ModuleList(torch.nn.Sequential(*stage) for stage in stages)
        self.output = torch.nn.Linear(channels * subsampled_length(mel_bins, kind), d_model)

    def forward(self, features: torch.Tensor, layout: SequenceLayout = UNPADDED) -> torch.Tensor:
        x = self.convolve(features, layout.padding)
        return self.output(x.transpose(1, 2).flatten(2))

    def convolve(self, features: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Return the last convolution's output (B, C, T', F') of features (B, T, F) with `padding` (B, T)."""
        x = features[:, None]
        step = 1
        with torch.autocast("cpu", enabled=False):  # bf16 may never terminate, see Subsampling
            for stage in self.stages:
                x = stage(x)
                step = 2 * step
                # Zero padding before the next convolution, so that an utterance ends with the same zeros in any batch.
                # A frame is valid if the first of the frames that it subsamples is.
                if padding is not None:
                    x = x.masked_fill_(padding[:, None, ::step, None], 0.0)
                x = torch.relu(x)
        return x


def build_subsampling(config: ModelConfig, mel_bins: int) -> Subsampling | PaddedSubsampling:
    """Build the subsampling that `config.subsampling` names."""
    sizes = mel_bins, config.subsampling_channels, config.d_model
    return Subsampling(*sizes) if config.subsampling == "valid" else PaddedSubsampling(*sizes, config.subsampling)


def build_positions(config: ModelConfig) -> RotaryPositions | RelativePositions:
    """Build the position tables of the encoder's attention."""
    if config.attention_positions == "relative":
        return RelativePositions(config.d_model)
    return RotaryPositions(config.d_model // config.attention_heads)


class SpeechEncoder(torch.nn.Module):
    """Base of encoders: features (B, T, F) with their lengths -> encoded (B, T', D) with their lengths."""

    subsampling: torch.nn.Module
    blocks: BlockList[torch.nn.Module]

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, BatchLengths]:
        raise NotImplementedError


class Encoder(SpeechEncoder):
    """Conformer or Transformer encoder."""

    subsampling: Subsampling | PaddedSubsampling

    def __init__(self, config: ModelConfig, mel_bins: int) -> None:
        super().__init__()
        is_conformer = config.encoder_type == "conformer"
        self.config = config
        self.subsampling = build_subsampling(config, mel_bins)
        self.dropout = Dropout(config.dropout)
        self.positions = build_positions(config)
        blocks = (
            ConformerBlock(config, number == 0) if is_conformer else TransformerBlock(config)
            for number in range(config.encoder_layers)
        )
        self.blocks = BlockList(blocks)
        self.norm = torch.nn.LayerNorm(config.d_model)

    def forward(
        self,
        features: torch.Tensor,
        feature_lengths: BatchLengths,
        wrap_block: WrapBlock = keep_activations,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> tuple[torch.Tensor, BatchLengths]:
        encoded, _, encoded_lengths = self.with_middle(features, feature_lengths, wrap_block, chunk_frames)
        return encoded, encoded_lengths

    def with_middle(
        self, features: torch.Tensor, feature_lengths: BatchLengths, wrap_block: WrapBlock, chunk_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor, BatchLengths]:
        """Return encoded (B, T', D), the middle block's output (B, T', D) for intermediate CTC, and their lengths."""
        layout = SequenceLayout((), self.feature_padding(features, feature_lengths), chunk_frames)
        x = wrap_block(0, self.subsampling)(features, layout)
        if self.config.scaled_input:
            x = x * self.config.d_model**0.5
        lengths = self.encoded_lengths(feature_lengths)
        x, layout = self.arrange(x, lengths, chunk_frames)
        middle = x
        for number, block in enumerate(self.blocks, start=1):
            # A generator per block: the recomputation of a block then restores its own masks only.
            with block_dropout(number):
                x = wrap_block(number, block)(x, layout)
            if number == len(self.blocks) // 2:
                middle = x
        return self.restore(self.norm(x), layout, lengths), self.restore(middle, layout, lengths), lengths

    def arrange(self, x: torch.Tensor, lengths: BatchLengths, chunk_frames: int) -> tuple[torch.Tensor, SequenceLayout]:
        """Return the input of the blocks, after dropout, and its layout, for x (B, T', D)."""
        x = self.dropout(x)
        return x, SequenceLayout(self.positions(x.shape[1], x), self.frame_padding(x, lengths), chunk_frames)

    def restore(self, x: torch.Tensor, layout: SequenceLayout, lengths: BatchLengths) -> torch.Tensor:
        """Return a block's output as (B, T', D); the inverse of `arrange`."""
        return x

    def feature_padding(self, features: torch.Tensor, feature_lengths: BatchLengths) -> torch.Tensor | None:
        """Return the padding mask (B, T) of features if the subsampling needs it."""
        frames = features.shape[1]
        return padding_or_none(feature_lengths, frames, features.device) if self.subsampling.is_padded else None

    def frame_padding(self, x: torch.Tensor, lengths: BatchLengths) -> torch.Tensor | None:
        """Return the padding mask (B, T') of frames x (B, T', D); without one, attention uses its fastest kernel."""
        return padding_or_none(lengths, x.shape[1], x.device)

    def encoded_lengths(self, feature_lengths: BatchLengths) -> BatchLengths:
        """Return the numbers of encoder frames of utterances with these numbers of feature frames."""
        return map_lengths(partial(subsampled_length, subsampling=self.config.subsampling), feature_lengths)
