"""Features to a quarter of as many frames, by two convolutions.

B batch, T feature frames, T' encoder frames, F mel bins, C channels, D model width.
"""

import torch

from konkanivani.base.lengths import CHUNK_FRAMES, subsampled_length
from konkanivani.model.kernels.linear import Linear
from konkanivani.model.kernels.recompute import run_recomputed


class Subsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T', D) by a convolution and a depthwise-separable one, both 3 x 3 with stride 2.

    Neither pads, so a valid frame never sees padding. Depthwise-separable as in FastConformer (Rekesh et al., 2023):
    two full convolutions cost more than half of the encoder's arithmetic.

    The first convolution makes sixteen numbers of one; beyond `chunk_frames` encoder frames they exist for one chunk of
    as many at a time. Frame t' sees the features 4 t' to 4 t' + 6, so neighbouring chunks share three features.
    """

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
        return torch.cat([run_recomputed(self._one_piece, features[:, first:end]) for first, end in spans], dim=1)

    def _one_piece(self, features: torch.Tensor) -> torch.Tensor:
        # Not in half precision on a CPU: there oneDNN's depthwise convolution may never end (kernels/depthwise.py).
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.first(features[:, None]))
            x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))
