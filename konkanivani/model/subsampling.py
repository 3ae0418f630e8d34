"""Features to a quarter or an eighth of as many frames, by two or three convolutions.

B batch, T feature frames, T' encoder frames, F mel bins, C channels, D model width.
"""

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.base.lengths import CHUNK_FRAMES, SUBSAMPLING, subsampled_length
from konkanivani.model.kernels.linear import Linear
from konkanivani.model.kernels.recompute import as_it_is_now, run_recomputed


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

    pads = False
    """Whether a valid frame may see padding, which then has to be known."""

    def forward(
        self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES, _padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        frames = subsampled_length(features.shape[1])
        if frames <= chunk_frames:
            return self._one_piece(features)
        starts = range(0, frames, chunk_frames)
        spans = [(4 * start, 4 * min(start + chunk_frames, frames) + 3) for start in starts]
        one_piece = as_it_is_now(self)._one_piece
        return torch.cat([run_recomputed(one_piece, features[:, first:end]) for first, end in spans], dim=1)

    def _one_piece(self, features: torch.Tensor) -> torch.Tensor:
        # Not in half precision on a CPU: there oneDNN's depthwise convolution may never end (kernels/depthwise.py).
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.first(features[:, None]))
            x = torch.relu(self.pointwise(self.depthwise(x)))
        return self.output(x.transpose(1, 2).flatten(2))


class PaddedSubsampling(torch.nn.Module):
    """Features (B, T, F) -> (B, T', D) by convolutions of 3 x 3 and stride 2, padded by 1, a ReLU behind each.

    Two full ones, as in the first Conformers, or a full one and two depthwise-separable ones, as in FastConformer
    (Rekesh et al., 2023). What they make of padding is zeroed before the next one sees it, so that an utterance ends
    with the same zeros in any batch. `padding` (B, T) is True beyond its features, None where nothing is.

    In chunks each begins a frame earlier, and what it makes of that one is left out: it is the only one that sees the
    zeros before the chunk.
    """

    pads = True

    def __init__(self, mel_bins: int, channels: int, d_model: int, kind: str) -> None:
        super().__init__()
        self.kind, self.stride = kind, SUBSAMPLING[kind]
        full = {"kernel_size": 3, "stride": 2, "padding": 1}
        stages = [[torch.nn.Conv2d(1, channels, **full)]]
        if kind == "striding":
            stages.append([torch.nn.Conv2d(channels, channels, **full)])
        else:
            for _ in range(2):
                depthwise = torch.nn.Conv2d(channels, channels, **full, groups=channels)
                stages.append([depthwise, torch.nn.Conv2d(channels, channels, 1)])
        self.stages = torch.nn.ModuleList(torch.nn.Sequential(*stage) for stage in stages)
        self.output = Linear(channels * subsampled_length(mel_bins, kind), d_model)

    def forward(
        self, features: torch.Tensor, chunk_frames: int = CHUNK_FRAMES, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        frames = subsampled_length(features.shape[1], self.kind)
        if frames <= chunk_frames:
            return self._one_piece(features, padding, 0)
        pieces, one_piece = [], as_it_is_now(self)._one_piece
        for start in range(0, frames, chunk_frames):
            before = min(start, 1)
            span = slice(self.stride * (start - before), self.stride * (start + chunk_frames))
            inputs = features[:, span], None if padding is None else padding[:, span], before
            pieces.append(run_recomputed(one_piece, *inputs))
        return torch.cat(pieces, dim=1)

    def _one_piece(self, features: torch.Tensor, padding: torch.Tensor | None, before: int) -> torch.Tensor:
        x, step = features[:, None], 1
        with torch.autocast("cpu", enabled=False):  # as above
            for stage in self.stages:
                x, step = stage(x), 2 * step
                if padding is not None:  # a frame is valid where the first of those that it halves is
                    x = x.masked_fill_(padding[:, None, ::step, None], 0.0)
                x = torch.relu(x)
        return self.output(x[:, :, before:].transpose(1, 2).flatten(2))


def build_subsampling(config: ModelConfig, mel_bins: int) -> Subsampling | PaddedSubsampling:
    """The kind that the settings name."""
    sizes = mel_bins, config.subsampling_channels, config.d_model
    return Subsampling(*sizes) if config.subsampling == "valid" else PaddedSubsampling(*sizes, config.subsampling)
