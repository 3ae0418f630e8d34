"""The first convolution of the subsampling as one matrix product.

B batch, T feature frames, F mel bins, C channels.
"""

import torch
import torch.nn.functional as F

from konkanivani.model.kernels.precision import in_own_precision


class FirstConvolution(torch.autograd.Function):
    """(B, T / 2, F / 2, C), activated, of features (B, T, F) by taps (C, 10), each channel's nine weights and its bias.

    What the product sees, ten numbers for each of the features' four, is made again in the backward pass.
    """

    @staticmethod
    def forward(ctx, features: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        made = torch.relu_(F.linear(_neighbourhoods(features), taps))
        ctx.save_for_backward(features, taps, made)
        return made

    @staticmethod
    @in_own_precision
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        features, taps, made = ctx.saved_tensors
        by_sum = torch.ops.aten.threshold_backward(gradient, made, 0)
        by_taps = by_sum.flatten(0, 2).t() @ _neighbourhoods(features).flatten(0, 2)
        if not ctx.needs_input_grad[0]:
            return None, by_taps
        by_features = torch.zeros_like(features)
        for tap, by_seen in enumerate((by_sum @ taps).unbind(3)[:9]):
            _seen_by(tap, by_features).add_(by_seen)
        return by_features, by_taps


def _neighbourhoods(features: torch.Tensor) -> torch.Tensor:
    """What a 3 x 3 convolution of stride 2 sees of (B, T, F), and a one for its bias: (B, T / 2, F / 2, 10)."""
    seen = features.new_ones(10, *_seen_by(0, features).shape)
    for tap in range(9):
        seen[tap] = _seen_by(tap, features)
    return seen.permute(1, 2, 3, 0)


def _seen_by(tap: int, features: torch.Tensor) -> torch.Tensor:
    """What one of the nine weights sees of (B, T, F): (B, T / 2, F / 2), a view."""
    down, along = divmod(tap, 3)
    last, last_along = ((size - 3) // 2 * 2 for size in features.shape[1:])
    return features[:, down : down + last + 1 : 2, along : along + last_along + 1 : 2]
