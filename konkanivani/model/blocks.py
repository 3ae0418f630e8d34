"""Blocks of the encoder and the decoder. Every residual branch starts with a LayerNorm (pre-norm).

B batch, T frames or tokens, S encoder frames, D model width.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from konkanivani.base.config import ModelConfig
from konkanivani.model.attention import CrossAttention, Positions, SelfAttention, SequenceLayout
from konkanivani.model.kernels.depthwise import depthwise_conv
from konkanivani.model.kernels.dropout import Dropout
from konkanivani.model.kernels.products import Linear, fused_linear
from konkanivani.model.relative import RelativeSelfAttention


class Block(torch.nn.Module):
    """Base of the parts of a network that a `BlockRunner` runs; the network sets their attributes."""

    number: int
    """Number in a complete network, counted through the encoder and then the decoder."""
    keeps_attention: bool
    """Whether attention's results are kept when the block's activations are recomputed."""


AnyBlock = TypeVar("AnyBlock", bound=Block, covariant=True)


class BlockList(torch.nn.ModuleList, Generic[AnyBlock]):
    """List of blocks of one type, which PyTorch's own list does not tell a type checker."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[AnyBlock]) -> None: ...

        def __iter__(self) -> Iterator[AnyBlock]: ...


class BlockRunner(Protocol):
    """Callable that runs a block: directly, or with its activations recomputed in the backward pass."""

    def __call__(self, block: Block, *inputs: object) -> torch.Tensor: ...


def run_directly(block: Callable[..., torch.Tensor], *inputs: object) -> torch.Tensor:
    """Run the block and keep its activations for the backward pass."""
    return block(*inputs)


class FeedForward(torch.nn.Module):
    """Feed-forward module with its residual: x + weight * contract(SiLU(expand(norm(x)))), x (B, T, D).

    Gulati et al. (2020), section 2.3; `weight` is 1/2 in a Conformer block, 1 elsewhere.
    """

    def __init__(self, d_model: int, inner: int, dropout: float, biases: bool = True) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.expand = Linear(d_model, inner, bias=biases)
        self.contract = Linear(inner, d_model, bias=biases)
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        branch = fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.silu)
        return self.dropout.add_residual(x, branch, weight)


class ConvolutionModule(torch.nn.Module):
    """Convolution module of the Conformer (Gulati et al., 2020, section 2.2) with its residual, x (B, T, D).

    The depthwise convolution is followed by LayerNorm, not BatchNorm. If a BatchNorm was folded into the depthwise
    convolution (`has_depthwise_norm` False), the convolution always has a bias: the norm's. Packed spans are convolved
    separately.
    """

    def __init__(
        self, d_model: int, kernel: int, dropout: float, biases: bool = True, has_depthwise_norm: bool = True
    ) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(d_model)
        self.gate = Linear(d_model, 2 * d_model, bias=biases)
        # A BatchNorm folded into a convolution leaves a shift, which needs a bias.
        reach = kernel // 2
        is_shifted = biases or not has_depthwise_norm
        self.depthwise = torch.nn.Conv1d(d_model, d_model, kernel, padding=reach, groups=d_model, bias=is_shifted)
        self.depthwise_norm = torch.nn.LayerNorm(d_model) if has_depthwise_norm else None
        self.output = Linear(d_model, d_model, bias=biases)
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        # x + dropout(pointwise(SiLU(norm(depthwise(GLU(pointwise(norm(x))))))))
        gated = F.glu(fused_linear(x, self.gate, self.norm), dim=-1)
        # Zero padding before the depthwise convolution, so that a short utterance has the same context in any batch.
        if layout.padding is not None:
            gated = gated.masked_fill(layout.padding[:, :, None], 0.0)
        whole = depthwise_conv(gated, self.depthwise, layout.lengths or (x.shape[1],))
        return self.dropout.add_residual(x, fused_linear(whole, self.output, self.depthwise_norm, activation=F.silu))


def encoder_attention(config: ModelConfig) -> SelfAttention | RelativeSelfAttention:
    """Build the self-attention of an encoder block, with rotary or relative positions."""
    if config.attention_positions == "relative":
        return RelativeSelfAttention(config.d_model, config.attention_heads, config.biases)
    return SelfAttention(config.d_model, config.attention_heads, causal=False, biases=config.biases)


class ConformerBlock(Block):
    """Conformer block, (B, T, D) -> (B, T, D): x + FFN / 2, x + MHSA, x + Conv, x + FFN / 2, LayerNorm.

    Gulati et al. (2020), equation 1. The paper's final LayerNorm of a block is stored as the entry norm of the next
    one, as in the files of weights; a published model's first block therefore has none.
    """

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__()
        d_model = config.d_model
        inner = config.resolved_feedforward_dim
        self.entry_norm = torch.nn.LayerNorm(d_model) if config.entry_norm or not is_first else None
        self.first_feedforward = FeedForward(d_model, inner, config.dropout, config.biases)
        self.attention_norm = torch.nn.LayerNorm(d_model)
        self.attention = encoder_attention(config)
        self.dropout = Dropout(config.dropout)
        self.convolution = ConvolutionModule(
            d_model, config.convolution_kernel, config.dropout, config.biases, config.convolution_norm == "layer"
        )
        self.second_feedforward = FeedForward(d_model, inner, config.dropout, config.biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = x if self.entry_norm is None else self.entry_norm(x)
        x = self.first_feedforward(x, weight=0.5)
        # x + dropout(attention(norm(x))); the norm is passed on so that it is fused with the projection.
        x = self.dropout.add_residual(x, self.attention(x, self.attention_norm, layout))
        x = self.convolution(x, layout)
        return self.second_feedforward(x, weight=0.5)


class TransformerBlock(Block):
    """Pre-norm Transformer encoder block, (B, T, D) -> (B, T, D): self-attention, feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.resolved_feedforward_dim
        self.attention_norm = torch.nn.LayerNorm(config.d_model)
        self.attention = encoder_attention(config)
        self.dropout = Dropout(config.dropout)
        self.feedforward = FeedForward(config.d_model, inner, config.dropout, config.biases)

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = self.dropout.add_residual(x, self.attention(x, self.attention_norm, layout))
        return self.feedforward(x, weight=1.0)


class DecoderBlock(Block):
    """Decoder block, (B, T, D) -> (B, T, D): causal self-attention, attention over encoded (B, S, D), feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention_norm = torch.nn.LayerNorm(config.d_model)
        self.self_attention = SelfAttention(config.d_model, config.attention_heads, causal=True)
        self.cross_attention_norm = torch.nn.LayerNorm(config.d_model)
        self.cross_attention = CrossAttention(config.d_model, config.attention_heads)
        self.dropout = Dropout(config.dropout)
        self.feedforward = FeedForward(config.d_model, config.resolved_feedforward_dim, config.dropout)

    def forward(
        self, x: torch.Tensor, layout: SequenceLayout, encoded: torch.Tensor, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = self.dropout.add_residual(x, self.self_attention(x, self.self_attention_norm, layout))
        x = self.dropout.add_residual(x, self.cross_attention(x, self.cross_attention_norm, encoded, encoded_mask))
        return self.feedforward(x, weight=1.0)

    def step(
        self,
        x: torch.Tensor,
        position: Positions,
        kept: torch.Tensor,
        length: int,
        cross_kv: tuple[torch.Tensor, torch.Tensor],
        encoded_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the newest tokens (B, K, D) of K hypotheses per utterance -> (B, K, D), without dropout.

        `kept` (2, B, K, H, U, E) holds keys and values of the `length` tokens before.
        """
        # Hypotheses have their own past, so self-attention has B K rows of one token.
        rows = x.flatten(0, 1)[:, None]
        attended = self.self_attention.step(rows, self.self_attention_norm, position, kept.flatten(1, 2), length)
        x = x + attended.view_as(x)
        # All K hypotheses of an utterance attend to the same encoded frames, as K tokens of one sequence would.
        x = x + self.cross_attention.attend(x, self.cross_attention_norm, *cross_kv, encoded_mask)
        return self.feedforward(x, weight=1.0)
