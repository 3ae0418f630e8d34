"""Image of an utterance: spectrogram above CTC posteriors, on one time axis.

Axes: T feature frames, T' encoder frames, F mel bins, V vocabulary. Drawn with torch only, without a plotting library.
"""

import math

import torch
from torch import Tensor

WIDTH = 900
BIN_HEIGHT = 3
ROW_HEIGHT = 10
ROWS = 24
RULER_HEIGHT = 12


def draw_utterance(features: Tensor, posteriors: Tensor | None, seconds: float) -> Tensor:
    """Return an image (height, width, 3), uint8 RGB: spectrogram, ruler with a tick per second, and CTC posteriors.

    Both parts are stretched to the same width, so T' only has to be T divided by the subsampling factor.

    Args:
        features: (T, F) log-mel; low bins are drawn at the bottom.
        posteriors: (T', V) probabilities; None without CTC.
        seconds: duration of both.
    """
    # 900 pixels, but at least one per encoder frame: a posterior's peak is often one frame wide and must stay visible.
    width = max(WIDTH, 0 if posteriors is None else posteriors.shape[0])
    spectrogram = _stretch(_contrast(features.detach().float().cpu()).T.flip(0), BIN_HEIGHT, width)
    if posteriors is None:
        return torch.cat([colour(spectrogram), _ruler(seconds, width)])
    posteriors = posteriors.detach().float().cpu()
    # The square root makes the low probabilities of early training visible, and maps 0 and 1 to themselves.
    rows = posteriors.T[most_active_tokens(posteriors)].clamp(0, 1).sqrt()
    believed = colour(_stretch(rows, ROW_HEIGHT, width))
    believed[ROW_HEIGHT - 1 :: ROW_HEIGHT] = 40  # a grey line under each row separates it from the next
    return torch.cat([colour(spectrogram), _ruler(seconds, width), believed])


def most_active_tokens(posteriors: Tensor) -> Tensor:
    """Return the ids of at most 24 tokens of posteriors (T', V), in the order of their rows.

    The token with the most mass, usually the blank, is on top; the others follow by the time of their peak, so that a
    learned alignment appears as a falling diagonal.
    """
    peaks, times = posteriors.max(dim=0)
    # By peak, not by mass: a token that is certain in a single frame matters.
    chosen = peaks.argsort(descending=True, stable=True)[:ROWS]
    chosen = chosen[times[chosen].argsort(stable=True)]
    top = posteriors.sum(dim=0).argmax()
    return torch.cat([top[None], chosen[chosen != top]])[:ROWS]


def colour(intensity: Tensor) -> Tensor:
    """Map intensities (...) in [0, 1] to uint8 RGB (..., 3), black to white, with the cubehelix color map.

    Its brightness increases evenly, so it is readable in grey (Green 2011, "A colour scheme for the display of
    astronomical intensity images"; start 0.5, 1.5 rotations, hue 1.0, gamma 1.0, opposite direction of rotation).
    """
    angle = 2 * math.pi * (0.5 / 3 + 1 - 1.5 * intensity)
    amplitude = intensity * (1 - intensity) / 2
    red = intensity + amplitude * (-0.14861 * angle.cos() + 1.78277 * angle.sin())
    green = intensity + amplitude * (-0.29227 * angle.cos() - 0.90649 * angle.sin())
    blue = intensity + amplitude * (1.97294 * angle.cos())
    return (torch.stack([red, green, blue], dim=-1).clamp(0, 1) * 255).round().to(torch.uint8)


def _contrast(features: Tensor) -> Tensor:
    """Scale features (T, F) to [0, 1] between their 2nd and 99.5th percentile; non-finite values become 0."""
    finite = features[features.isfinite()]
    if not finite.numel():
        return torch.zeros_like(features)
    ordered = finite.sort().values  # torch.quantile refuses more than 2^24 values
    low = ordered[int(0.02 * (len(ordered) - 1))]
    high = ordered[int(0.995 * (len(ordered) - 1))]
    return ((features - low) / (high - low).clamp(min=1e-6)).nan_to_num(0, 1, 0).clamp(0, 1)


def _stretch(rows: Tensor, height: int, width: int) -> Tensor:
    """Stretch rows (N, time) to (N * height, width), in time by nearest neighbor."""
    columns = (torch.arange(width) + 0.5) * (rows.shape[1] / width)
    return rows[:, columns.long().clamp(max=rows.shape[1] - 1)].repeat_interleave(height, dim=0)


def _ruler(seconds: float, width: int) -> Tensor:
    """Return a dark band (12, width, 3) with a white tick, two pixels wide, at each whole second."""
    ruler = torch.full((RULER_HEIGHT, width, 3), 40, dtype=torch.uint8)
    for second in range(1, math.ceil(seconds)):
        left = int(second / seconds * width)
        ruler[2:-2, left : left + 2] = 255
    return ruler
