"""Blocks whose norms, activations and residual additions are computed with the neighbouring operation.

By default, autograd keeps the input and the output of a LayerNorm and of an activation, although either is cheap to
compute from the other: two fifths of a Conformer block's activations. `fused_linear` keeps the input only. Of dropout,
autograd keeps the mask as floats, a tenth of a step's activations; here it takes one byte per number. The twins share
the plain blocks' parameters and names and compute the same numbers.

B batch, T frames or tokens, S encoder frames, D model width.
"""

import torch
import torch.nn.functional as F

from konkanivani.models.attention import SequenceLayout
from konkanivani.models.conformer import (
    ConformerBlock,
    ConvolutionModule,
    Dropout,
    FeedForward,
    TransformerBlock,
    draw_mask,
)
from konkanivani.models.decoder import DecoderBlock
from konkanivani.models.twin import replace_modules
from konkanivani.models.whisper import network as whisper
from konkanivani.ops.products import fused_linear


class MaskedDropout(Dropout):
    """Twin of `Dropout` that draws the same masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)  # one fused kernel, which keeps one byte per number as well
        return _Masked.apply(x, draw_mask(x, self.p), 1 / (1 - self.p))

    def add_residual(self, x: torch.Tensor, branch: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return x + weight * dropout(branch), on a CPU in fewer passes over memory than the separate operations."""
        if self.training and self.p and x.device.type == "cpu":
            mask = draw_mask(branch, self.p)
            return _MaskedSum.apply(x, branch, mask, weight / (1 - self.p))
        return torch.add(x, self(branch), alpha=weight)


def add_residual(x: torch.Tensor, branch: torch.Tensor, dropout: Dropout, weight: float = 1.0) -> torch.Tensor:
    """Return x + weight * dropout(branch), in one pass if the dropout is a `MaskedDropout`."""
    if isinstance(dropout, MaskedDropout):
        return dropout.add_residual(x, branch, weight)
    return torch.add(x, dropout(branch), alpha=weight)


class FusedFeedForward(FeedForward):
    """Twin of `FeedForward` that keeps its input and one product for the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.silu)


class FusedConvolutionModule(ConvolutionModule):
    """Twin of `ConvolutionModule` with fused norms and activation."""

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        x = F.glu(fused_linear(x, self.gate, self.norm), dim=-1)
        x = self.depthwise(x, layout)
        return fused_linear(x, self.output, self.depthwise_norm, activation=F.silu)


class FusedConformerBlock(ConformerBlock):
    """Twin of `ConformerBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        if self.entry_norm is not None:
            x = self.entry_norm(x)
        x = add_residual(x, self.first_feedforward(x), self.dropout, 0.5)
        projected = project(x, self.attention_norm, self.attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.attention.attend(projected, layout), self.dropout)
        x = add_residual(x, self.convolution(x, layout), self.dropout)
        return add_residual(x, self.second_feedforward(x), self.dropout, 0.5)


class FusedTransformerBlock(TransformerBlock):
    """Twin of `TransformerBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        projected = project(x, self.attention_norm, self.attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.attention.attend(projected, layout), self.dropout)
        return add_residual(x, self.feedforward(x), self.dropout)


class FusedDecoderBlock(DecoderBlock):
    """Twin of `DecoderBlock`; without `fuses_norms` only the residual additions are fused."""

    fuses_norms: bool

    def forward(
        self, x: torch.Tensor, layout: SequenceLayout, encoded: torch.Tensor, encoded_mask: torch.Tensor | None
    ) -> torch.Tensor:
        projected = project(x, self.self_attention_norm, self.self_attention.query_key_value, self.fuses_norms)
        x = add_residual(x, self.self_attention.attend(projected, layout), self.dropout)
        query = project(x, self.cross_attention_norm, self.cross_attention.query, self.fuses_norms)
        cross_kv = self.cross_attention.keys_and_values(encoded)
        x = add_residual(x, self.cross_attention.attend(query, *cross_kv, encoded_mask), self.dropout)
        return add_residual(x, self.feedforward(x), self.dropout)


class FusedWhisperFeedForward(whisper.FeedForward):
    """Twin of Whisper's feed-forward module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_linear(fused_linear(x, self.expand, self.norm), self.contract, activation=F.gelu)


class FusedWhisperEncoderBlock(whisper.EncoderBlock):
    """Twin of Whisper's encoder block."""

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + attend_to_itself(self.self_attention, self.self_attention_norm, x, False, key_mask)
        return x + self.feedforward(x)


class FusedWhisperDecoderBlock(whisper.DecoderBlock):
    """Twin of Whisper's decoder block."""

    def forward(self, x: torch.Tensor, encoded: torch.Tensor, encoded_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + attend_to_itself(self.self_attention, self.self_attention_norm, x, True, None)
        query = fused_linear(x, self.cross_attention.query, self.cross_attention_norm)
        x = x + self.cross_attention.attend(query, *self.cross_attention.keys_and_values(encoded), encoded_mask)
        return x + self.feedforward(x)


def attend_to_itself(
    attention: whisper.Attention,
    norm: torch.nn.LayerNorm,
    x: torch.Tensor,
    is_causal: bool,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return Whisper's self-attention of norm(x), with the norm fused with the three products."""
    query = fused_linear(x, attention.query, norm)
    key = attention.split_heads(fused_linear(x, attention.key, norm))
    value = attention.split_heads(fused_linear(x, attention.value, norm))
    return attention.attend(query, key, value, key_mask, is_causal)


def project(x: torch.Tensor, norm: torch.nn.LayerNorm, linear: torch.nn.Linear, fuses_norm: bool) -> torch.Tensor:
    """Return linear(norm(x)), which keeps only x if the norm is fused."""
    return fused_linear(x, linear, norm) if fuses_norm else linear(norm(x))


def fuse_norms(model: torch.nn.Module) -> None:
    """Replace feed-forward, convolution and Whisper's blocks by twins that fuse norms and activations with products."""
    replace_modules(
        model,
        {
            FeedForward: FusedFeedForward,
            ConvolutionModule: FusedConvolutionModule,
            whisper.FeedForward: FusedWhisperFeedForward,
            whisper.EncoderBlock: FusedWhisperEncoderBlock,
            whisper.DecoderBlock: FusedWhisperDecoderBlock,
        },
    )


def fuse_blocks(model: torch.nn.Module, fuses_norms: bool) -> None:
    """Replace blocks by twins that fuse residual additions with dropout and, if asked, norms with projections."""
    kinds = {
        ConformerBlock: FusedConformerBlock,
        TransformerBlock: FusedTransformerBlock,
        DecoderBlock: FusedDecoderBlock,
    }
    replace_modules(model, kinds)
    for block in model.modules():
        if isinstance(block, FusedConformerBlock | FusedTransformerBlock | FusedDecoderBlock):
            block.fuses_norms = fuses_norms


class _Masked(torch.autograd.Function):
    """x * mask * scale; keeps only the mask."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _masked(gradient, mask, ctx.scale), None, None


class _MaskedSum(torch.autograd.Function):
    """x + branch * mask * scale; keeps only the mask."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, branch: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        ctx.dtype = branch.dtype
        return torch.addcmul(x, branch, _as_numbers(mask, branch.dtype), value=scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return gradient, _masked(gradient, mask, ctx.scale).to(ctx.dtype), None, None


def _masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return _as_numbers(mask, x.dtype).mul_(x).mul_(scale)


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as zeros and ones of `dtype`."""
    # Converting from int8 takes half the time of converting from bool.
    return mask.view(torch.int8).to(dtype)
