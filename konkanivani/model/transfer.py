"""Weights of one model transferred into another: what fits, cut down where it is larger.

D model width, H heads. A checkpoint of 12 layers, width 256 can start a model of 6 layers, width 128: of the layers,
evenly spaced ones are taken, first and last included; of every tensor, the leading part of each axis, and where an axis
holds blocks side by side (query, key and value of each head, the two halves of a gate, the mel bands of each channel),
a part of each block.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from konkanivani.base.config import ModelConfig
from konkanivani.model.adapters import VOCAB_DEPENDENT_PREFIXES
from konkanivani.model.asr import KonkaniVaniASR

POSITIONS = "attention.position.weight"  # over sines and cosines of distances
LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.*)")


class Layers(NamedTuple):
    """What makes blocks side by side of a tensor's axis: attention heads, and channels of the subsampling."""

    heads: int
    channels: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Layers":
        """Those of a model of these dimensions."""
        return cls(config.attention_heads, config.subsampling_channels)


@dataclass(frozen=True)
class WeightTransfer:
    """Names of the model's tensors: taken whole, cut from larger ones, and left as they were initialised."""

    taken: tuple[str, ...]
    cut: tuple[str, ...]
    left_out: tuple[str, ...]

    def summary(self) -> str:
        """One line a kind, for people."""
        lines = [f"loaded: {len(self.taken)} tensors", f"truncated to the new shape: {len(self.cut)} tensors"]
        names = ", ".join(self.left_out[:6]) + (", …" if len(self.left_out) > 6 else "")
        return "\n".join(
            [
                *lines,
                f"not loaded (randomly initialised): {len(self.left_out)} tensors" + (f": {names}" if names else ""),
            ]
        )


@torch.no_grad()
def transfer_weights(
    model: KonkaniVaniASR, weights: Mapping[str, torch.Tensor], config: ModelConfig, is_same_vocabulary: bool
) -> WeightTransfer:
    """Copies what fits of `weights`, a model's of these dimensions, into `model`.

    Tensors over the vocabulary are taken only where it is the same; a smaller tensor never fills a larger one.
    """
    matches = [match for name in weights if (match := LAYER.fullmatch(name))]
    counts = {match[1]: 1 + max(int(one[2]) for one in matches if one[1] == match[1]) for match in matches}
    whole, part = Layers.of(config), Layers.of(model.config)
    taken, cut, left_out = [], [], []
    for name, target in model.state_dict().items():
        source = weights.get(_source_name(name, model, counts))
        if source is None or (not is_same_vocabulary and name.startswith(VOCAB_DEPENDENT_PREFIXES)):
            left_out.append(name)
        elif source.shape == target.shape and (whole.heads == part.heads or "attention" not in name):
            target.copy_(source)
            taken.append(name)
        elif (piece := _cut_to(name, source, target.shape, whole, part)) is not None:
            target.copy_(piece)
            cut.append(name)
        else:
            left_out.append(name)
    return WeightTransfer(tuple(taken), tuple(cut), tuple(left_out))


def _source_name(name: str, model: KonkaniVaniASR, counts: Mapping[str, int]) -> str:
    """The name of the tensor to take: layer i of n comes from layer i x (N - 1) / (n - 1) of N, where N > n."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    stack, layer, rest = match.group(1), int(match.group(2)), match.group(3)
    asked = len(getattr(model, stack).blocks)
    if counts.get(stack, 0) > asked:
        layer = round(layer * (counts[stack] - 1) / max(1, asked - 1))
    return f"{stack}.blocks.{layer}.{rest}"


def _factors(name: str, axis: int, length: int, layers: Layers) -> tuple[int, ...]:
    """How an axis of a tensor is made up of blocks side by side, outermost first; their product is `length`."""
    if "attention" in name and "norm" not in name:
        if "query_key_value" in name and axis == 0:
            return 3, layers.heads, 2, length // (6 * layers.heads)
        if "key_value" in name and axis == 0:
            return 2, layers.heads, 2, length // (4 * layers.heads)
        is_of_heads = "query" in name or POSITIONS in name or "_bias" in name
        if (is_of_heads and axis == 0) or ("output.weight" in name and axis == 1):
            return layers.heads, 2, length // (2 * layers.heads)
        if POSITIONS in name:
            return length // 2, 2
    if "convolution.gate" in name and axis == 0:
        return 2, length // 2
    if name == "encoder.subsampling.output.weight" and axis == 1:
        return layers.channels, length // layers.channels
    return (length,)


def _cut_to(name: str, source: torch.Tensor, shape: torch.Size, whole: Layers, part: Layers) -> torch.Tensor | None:
    """The part of `source` that makes a tensor of `shape`; None where it has too little."""
    if source.dim() != len(shape):
        return None
    for axis, length in enumerate(shape):
        have = _factors(name, axis, source.shape[axis], whole)
        want = _factors(name, axis, length, part)
        if any(h < w for h, w in zip(have, want, strict=True)):
            return None
        indices = torch.zeros(1, dtype=torch.long)
        for level, (h, w) in enumerate(zip(have, want, strict=True)):
            # Within a head, evenly spaced components keep the frequencies of the rotary positions, and evenly spaced
            # pairs of a sine and a cosine those of distances.
            spread = len(have) - 1 if "attention" in name and len(have) > 1 else None
            if POSITIONS in name and axis == 1:
                spread = 0
            chosen = torch.arange(w) * h // w if level == spread else torch.arange(w)
            if name.endswith("convolution.depthwise.weight") and axis == 2:
                chosen = chosen + (h - w) // 2  # the taps around the frame itself
            indices = (indices[:, None] * h + chosen[None, :]).flatten()
        source = source.index_select(axis, indices)
    return source
