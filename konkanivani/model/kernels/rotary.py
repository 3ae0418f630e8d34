"""Variable-length attention of packed spans, with rotary positions applied in place, for training on a CPU.

B batch, T frames, N frames of all spans, D model width, H heads, E = D / H.
"""

from collections.abc import Sequence

import torch

from konkanivani.base.lengths import Lengths

# PyTorch's own operator, not part of its public API; its backward operator's name has the same prefix.
HAS_OPERATOR = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def has_varlen_attention(device: torch.device) -> bool:
    """Return whether attention within spans runs on this device; otherwise a batch must be padded."""
    return HAS_OPERATOR and device.type == "cpu"


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
        wholes = projected, attended, gradient, cosines[None], sines[None], grad_projected
        for number, parts in enumerate(zip(*(whole.split(ctx.lengths, dim=1) for whole in wholes), strict=True)):
            span, attn_out, grad_out, cos, sin, out = parts
            grad_out, attn_out = (
                part.unflatten(2, (span.shape[3], -1)).transpose(1, 2) for part in (grad_out, attn_out)
            )
            by_parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, *_by_heads(span), attn_out, ctx.normalizers[number], 0.0, False
            )
            _rotate_back_into(out, by_parts, cos[0], sin[0])
        return grad_projected, None, None, None


def _by_heads(projected: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values (3, B, H, T, E), a view of projected (B, T, 3, H, E)."""
    return projected.permute(2, 0, 3, 1, 4)


def _rotate_back_into(
    out: torch.Tensor, gradients: Sequence[torch.Tensor], cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Write gradients (B, H, T, E) by queries and keys, rotated back, and by values into `out` (B, T, 3, H, E)."""
    # A rotation's inverse is the rotation by the negative angle.
    by_query, by_key, by_value = (gradient.transpose(1, 2) for gradient in gradients)
    _rotate_into(out[:, :, 0], by_query, cosines, -sines)
    _rotate_into(out[:, :, 1], by_key, cosines, -sines)
    out[:, :, 2].copy_(by_value)


def _rotate_into(out: torch.Tensor, vectors: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Write vectors (B, T, H, E), rotated by their positions' angles, into `out` of the same shape."""
    cosines, sines = (table.to(vectors.dtype)[:, None, :] for table in (cosines, sines))
    (first, second), (to_first, to_second) = vectors.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines)


def rotate_in_place(projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate the queries and keys of projected (B, T, 3, H, E) in place, as `rotated` of attention.py does."""
    cosines, sines = (table.to(projected.dtype)[:, None, None, :] for table in (cosines, sines))
    first, second = projected[:, :, :2].chunk(2, dim=-1)
    turned = (first * cosines).addcmul_(second, sines, value=-1)  # before `second`, its input, is overwritten
    second.mul_(cosines).addcmul_(first, sines)
    first.copy_(turned)
