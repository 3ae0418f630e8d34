"""Packing: the encoder's blocks see the utterances of a batch one after another, without padding, on a CPU.

Padding then costs neither arithmetic nor activations. Spans, one per utterance, do not see each other: attention and
depthwise convolution are computed per span, everything else is the same for all frames.

B batch, T frames, N frames of all spans, D model width, H heads, E = D / H.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from konkanivani.lengths import BatchLengths, Lengths, on_host
from konkanivani.models.attention import RelativeSelfAttention, SelfAttention, SequenceLayout
from konkanivani.models.conformer import DepthwiseConv, Encoder
from konkanivani.models.twin import replace_modules

MAX_PACKED = 8  # utterances: each needs its own attention and convolution calls, slow for many short ones
# PyTorch's own operator, not part of its public API; its backward operator's name has the same prefix.
HAS_OPERATOR = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def has_varlen_attention(device: torch.device) -> bool:
    """Return whether attention within spans runs on this device; otherwise a batch must be padded."""
    return HAS_OPERATOR and device.type == "cpu"


@dataclass(frozen=True)
class PackedLayout(SequenceLayout):
    """Layout of x (1, N, D): spans of these `lengths`, which add up to N, one per utterance."""

    lengths: Lengths = ()


class PackedEncoder(Encoder):
    """Twin of `Encoder` that packs padded batches of up to `MAX_PACKED` utterances on a CPU."""

    packs = True
    """Whether to pack; off in a trace for a GPU, whose tensors are placed on `cpu`."""
    packs_as_one = False
    """Whether blocks see a packed batch as one utterance: the same memory in fewer operators, for a trace."""

    def arrange(self, x: torch.Tensor, lengths: BatchLengths, chunk_frames: int) -> tuple[torch.Tensor, SequenceLayout]:
        is_possible = self.packs and has_varlen_attention(x.device) and len(lengths) <= MAX_PACKED
        if not is_possible or isinstance(lengths, torch.Tensor) or min(lengths) == x.shape[1]:
            return super().arrange(x, lengths, chunk_frames)
        positions = self.positions.of_spans(lengths, x)
        packed = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None]
        # Relative attention holds a number per pair of frames: more for one long sequence than for several short ones.
        is_one = self.packs_as_one and self.config.attention_positions == "rotary"
        spans = (sum(lengths),) if is_one else lengths
        return self.dropout(packed), PackedLayout(positions, None, chunk_frames, spans)

    def restore(self, x: torch.Tensor, layout: SequenceLayout, lengths: BatchLengths) -> torch.Tensor:
        return unpack(x, on_host(lengths)) if isinstance(layout, PackedLayout) else x


class PackedSelfAttention(SelfAttention):
    """Twin of `SelfAttention`; in a packed batch spans do not see each other."""

    def attend(self, projected: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        if not isinstance(layout, PackedLayout):
            return super().attend(projected, layout)
        # One kernel call per span, without a mask and without padding.
        heads = projected.unflatten(-1, (3, self.heads, -1))
        return self.output(VarlenAttention.apply(heads, *layout.positions, layout.lengths))


class PackedRelativeSelfAttention(RelativeSelfAttention):
    """Twin of `RelativeSelfAttention`; in a packed batch spans do not see each other."""

    def attend(self, projected: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        if not isinstance(layout, PackedLayout):
            return super().attend(projected, layout)
        queries, keys, values = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        distances = self.position(*layout.positions)
        attended = []
        longest = max(layout.lengths)
        spans = (vectors.split(layout.lengths, dim=2) for vectors in (queries, keys, values))
        for query, key, value in zip(*spans, strict=True):
            length = query.shape[2]
            # Distances length - 1, ..., -(length - 1): the middle of the longest span's table.
            near = distances[longest - length : longest + length - 1]
            attended.append(self.attend_heads(query, key, value, near, layout))
        return self.output(torch.cat(attended, dim=2).transpose(1, 2).flatten(2))


class SpanwiseDepthwiseConv(DepthwiseConv):
    """Twin of `DepthwiseConv`; in a packed batch each span is convolved separately."""

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:  # type: ignore[override]
        if not isinstance(layout, PackedLayout):
            return super().forward(x, layout)
        return torch.cat([self.convolve(span) for span in x.split(layout.lengths, dim=1)], dim=1)


def pack_encoder(model: torch.nn.Module) -> None:
    """Replace an encoder and those of its modules that mix frames by twins that pack a batch."""
    replace_modules(
        model,
        {
            Encoder: PackedEncoder,
            SelfAttention: PackedSelfAttention,
            RelativeSelfAttention: PackedRelativeSelfAttention,
            DepthwiseConv: SpanwiseDepthwiseConv,
        },
    )


def unpack(x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Return the spans of x (1, N, D) as a batch (B, T, D), with zeros after an utterance's end."""
    return torch.nn.utils.rnn.pad_sequence(x[0].split(lengths), batch_first=True)


class VarlenAttention(torch.autograd.Function):
    """Attention within each span of `lengths` frames of projected (1, N, 3, H, E) -> (1, N, D).

    Queries and keys are rotated in place. It calls PyTorch's own CPU kernels, which scaled_dot_product_attention
    without a mask calls as well.
    """

    @staticmethod
    def forward(
        ctx, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, lengths: Lengths
    ) -> torch.Tensor:
        rotate_in_place(projected, cosines, sines)
        # Each span's output is copied into its slice of one tensor, and in backward its gradients too: autograd would
        # keep every output twice, once for attention and once for the concatenation.
        attended = projected.new_empty(1, projected.shape[1], projected[0, 0, 0].numel())
        ctx.lengths = lengths
        ctx.normalizers = []
        for span, out in zip(projected.split(lengths, dim=1), attended.split(lengths, dim=1), strict=True):
            # The logsumexp of each row is all that the backward kernel needs besides inputs and outputs.
            attn_out, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_by_heads(span))
            out.copy_(attn_out.transpose(1, 2).flatten(2))
            ctx.normalizers.append(normalizer)
        ctx.save_for_backward(projected, attended, cosines, sines)
        return attended

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, attended, cosines, sines = ctx.saved_tensors
        grad_projected = torch.empty_like(projected)
        tensors = projected, attended, gradient, cosines[None], sines[None], grad_projected
        spans = zip(*(tensor.split(ctx.lengths, dim=1) for tensor in tensors), strict=True)
        for number, (span, attn_out, grad_out, cos, sin, out) in enumerate(spans):
            grad_out, attn_out = (
                part.unflatten(2, (span.shape[3], -1)).transpose(1, 2) for part in (grad_out, attn_out)
            )
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, *_by_heads(span), attn_out, ctx.normalizers[number], 0.0, False
            )
            _rotate_back_into(out, gradients, cos[0], sin[0])
        return grad_projected, None, None, None


def _by_heads(projected: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values (3, B, H, T, E), a view of projected (B, T, 3, H, E)."""
    return projected.permute(2, 0, 3, 1, 4)


def _rotate_back_into(
    out: torch.Tensor, gradients: Sequence[torch.Tensor], cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Write gradients (B, H, T, E) of queries and keys, rotated back, and of values into `out` (B, T, 3, H, E)."""
    # A rotation's inverse is the rotation by the negative angle.
    grad_query, grad_key, grad_value = (gradient.transpose(1, 2) for gradient in gradients)
    _rotate_into(out[:, :, 0], grad_query, cosines, -sines)
    _rotate_into(out[:, :, 1], grad_key, cosines, -sines)
    out[:, :, 2].copy_(grad_value)


def _rotate_into(out: torch.Tensor, vectors: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Write vectors (B, T, H, E), rotated by their positions' angles, into `out` of the same shape."""
    cosines, sines = (table.to(vectors.dtype)[:, None, :] for table in (cosines, sines))
    (first, second), (to_first, to_second) = vectors.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines)


def rotate_in_place(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate the queries and keys of projected (B, T, 3, H, E) in place, as `rotate` of attention.py does."""
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    first, second = projected[:, :, :2].chunk(2, dim=-1)
    rotated = (first * cosines).addcmul_(second, sines, value=-1)  # before `second`, its input, is overwritten
    second.mul_(cosines).addcmul_(first, sines)
    first.copy_(rotated)
