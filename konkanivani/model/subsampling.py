"""Features to a quarter of as many frames, by two convolutions.

B batch, T feature frames, T' encoder frames, F mel bins, C channels, D model width.
"""

import torch
import torch.nn.functional as F

from konkanivani.base.lengths import CHUNK_FRAMES, subsampled_length
from konkanivani.model.kernels.first_convolution import FirstConvolution
from konkanivani.model.kernels.linear import Linear, linear_by
from konkanivani.model.kernels.recompute import recomputed


class Subsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T', D) by a convolution and a depthwise-separable one, both 3 x 3 with stride 2.

    Neither pads, so a valid frame never sees padding. Depthwise-separable as in FastConformer (Rekesh et al., 2023):
    two full convolutions cost more than half of the encoder's arithmetic.

    The first convolution makes sixteen numbers of one; beyond `chunk_frames` encoder frames they exist for one chunk of
    as many at a time. Frame t' sees the features 4 t' to 4 t' + 6, so neighbouring chunks share three features.
    """

    by_products = True
    """Whether a CPU trains by matrix products; a trace for a card, whose tensors are a CPU's, says no."""

    def __init__(self, mel_bins: int, channels: int, d_model: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, channels, 3, stride=2)
        self.depthwise = torch.nn.Conv2d(channels, channels, 3, stride=2, groups=channels)
        self.pointwise = torch.nn.Conv2d(channels, channels, 1)
        self.output = Linear(channels * subsampled_length(mel_bins), d_model)

    def forward(self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        if frames <= chunk_frames:
            return self._one_piece(features)
        starts = range(0, frames, chunk_frames)
        spans = [(4 * start, 4 * min(start + chunk_frames, frames) + 3) for start in starts]
        return torch.cat([recomputed(self._one_piece, features[:, first:end]) for first, end in spans], dim=1)

    def _one_piece(self, features: torch.Tensor) -> torch.Tensor:
        if self.by_products and self.training and features.device.type == "cpu":
            return self._by_products(features)
        return self._by_convolutions(features)

    def _by_convolutions(self, features: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(features[:, None]))
        x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))

    def _by_products(self, features: torch.Tensor) -> torch.Tensor:
        """The same with channels innermost, two of the three convolutions being products: twice as fast on a CPU.

        In full precision under autocast too, as is the depthwise convolution of a block.
        """
        channels = self.first.out_channels
        with torch.autocast("cpu", enabled=False):
            taps = torch.cat([self.first.weight.flatten(1), self.first.bias[:, None]], dim=1)
            x = FirstConvolution.apply(features.to(taps.dtype), taps)
            image, separated = x.permute(0, 3, 1, 2), self.depthwise
            x = F.conv2d(image, separated.weight, separated.bias, stride=2, groups=channels).permute(0, 2, 3, 1)
            x = torch.relu_(linear_by(x, self.pointwise.weight.flatten(1), self.pointwise.bias))
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return self.output(x.transpose(2, 3).flatten(2))
