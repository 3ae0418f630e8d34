"""Transfer of one model's weights into another of other dimensions; larger tensors are cut.

D model width, H heads. A checkpoint of 12 layers, width 256 can start a model of 6 layers, width 128. Layers are taken
at even spacing, first and last included. Of each tensor's axis the leading part is taken; if an axis is a concatenation
of blocks (query, key and value of each head, the two halves of a gate, the mel bands of each channel), the leading part
of each block.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from konkanivani.config import ModelConfig
from konkanivani.models.adapters import VOCAB_DEPENDENT_PREFIXES
from konkanivani.models.asr import KonkaniVaniASR

POSITIONS = "attention.position.weight"  # projects sines and cosines of distances
LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.*)")


class Layers(NamedTuple):
    """Block counts of concatenated tensor axes: attention heads, and channels of the subsampling."""

    heads: int
    channels: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Layers":
        """Return the counts of a model of these dimensions."""
        return cls(config.attention_heads, config.subsampling_channels)


@dataclass(frozen=True)
class WeightTransfer:
    """Names of a model's tensors: copied whole, cut from larger ones, and left as initialised."""

    taken: tuple[str, ...]
    cut: tuple[str, ...]
    left_out: tuple[str, ...]

    def summary(self) -> str:
        """Return one line per kind of transfer, for messages."""
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
    """Copy the fitting part of `weights`, of a model of dimensions `config`, into `model`.

    Tensors over the vocabulary are copied only if the vocabulary is the same. A tensor never fills a larger one.
    """
    matches = [match for name in weights if (match := LAYER.fullmatch(name))]
    counts = {match[1]: 1 + max(int(one[2]) for one in matches if one[1] == match[1]) for match in matches}
    whole = Layers.of(config)
    part = Layers.of(model.config)
    taken = []
    cut = []
    left_out = []
    for name, target in model.state_dict().items():
        source = weights.get(_source_name(name, model, counts))
        if source is None or (not is_same_vocabulary and name.startswith(VOCAB_DEPENDENT_PREFIXES)):
            left_out.append(name)
        # With other heads, even a tensor of equal shape is divided differently, so it is cut head by head.
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
    """Return the source tensor's name: layer i of n comes from layer i (N - 1) / (n - 1) of N, if N > n."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    stack = match.group(1)
    layer = int(match.group(2))
    rest = match.group(3)
    asked = len(getattr(model, stack).blocks)
    if counts.get(stack, 0) > asked:
        layer = round(layer * (counts[stack] - 1) / max(1, asked - 1))
    return f"{stack}.blocks.{layer}.{rest}"


def _factors(name: str, axis: int, length: int, layers: Layers) -> tuple[int, ...]:
    """Return the sizes of an axis' nested blocks, outermost first; their product is `length`."""
    if "attention" in name and "norm" not in name:
        # The factor 2 is the two halves of a head, which rotary positions pair (attention.rotated).
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
    """Cut `source` to a tensor of `shape`; return None if it is too small."""
    if source.dim() != len(shape):
        return None
    for axis, length in enumerate(shape):
        have = _factors(name, axis, source.shape[axis], whole)
        want = _factors(name, axis, length, part)
        if any(h < w for h, w in zip(have, want, strict=True)):
            return None
        indices = torch.zeros(1, dtype=torch.long)
        for level, (h, w) in enumerate(zip(have, want, strict=True)):
            # Within a head, evenly spaced components keep the range of rotary frequencies, and evenly spaced
            # sine-cosine pairs the range of relative ones.
            spread = len(have) - 1 if "attention" in name and len(have) > 1 else None
            if POSITIONS in name and axis == 1:
                spread = 0
            chosen = torch.arange(w) * h // w if level == spread else torch.arange(w)
            if name.endswith("convolution.depthwise.weight") and axis == 2:
                chosen = chosen + (h - w) // 2  # the central taps of the kernel
            indices = (indices[:, None] * h + chosen[None, :]).flatten()
        source = source.index_select(axis, indices)
    return source
