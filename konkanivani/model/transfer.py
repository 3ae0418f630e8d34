"""Weights of one model taken over into another: what fits, cut down where it is larger.

D model width, H heads. A checkpoint of 12 layers, width 256 can start a model of 6 layers, width 128: of the layers,
evenly spaced ones are taken, first and last included; of every tensor, the leading part of each axis, and where an axis
holds blocks side by side (query, key and value of each head, the two halves of a gate, the mel bands of each channel),
a part of each block.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from konkanivani.base.lengths import subsampled_length
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.front_end import MEL_BINS

LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Takeover:
    """Names of the model's tensors: taken whole, cut from larger ones, and left as they were initialised."""

    taken: tuple[str, ...]
    cut: tuple[str, ...]
    left_out: tuple[str, ...]

    def summary(self) -> str:
        """One line a kind, for people."""
        lines = [f"taken whole: {len(self.taken)} tensors", f"cut to the asked shape: {len(self.cut)} tensors"]
        names = ", ".join(self.left_out[:6]) + (", …" if len(self.left_out) > 6 else "")
        return "\n".join(
            [*lines, f"left out (begin anew): {len(self.left_out)} tensors" + (f": {names}" if names else "")]
        )


@torch.no_grad()
def take_over(
    model: KonkaniVaniASR, weights: Mapping[str, torch.Tensor], heads: int, is_same_vocabulary: bool
) -> Takeover:
    """Copies what fits of `weights`, a model's of `heads` attention heads, into `model`.

    Tensors over the vocabulary are taken only where it is the same; a smaller tensor never fills a larger one.
    """
    layers = {stack: _layer_count(weights, stack) for stack in ("encoder", "decoder")}
    taken, cut, left_out = [], [], []
    for name, target in model.state_dict().items():
        source = weights.get(_source_name(name, model, layers))
        if source is None or (
            not is_same_vocabulary and name.startswith(("ctc_head", "decoder.embedding", "decoder.output"))
        ):
            left_out.append(name)
        elif source.shape == target.shape and (heads == model.config.attention_heads or "attention" not in name):
            target.copy_(source)
            taken.append(name)
        elif (piece := _cut_to(name, source, target.shape, heads, model.config.attention_heads)) is not None:
            target.copy_(piece)
            cut.append(name)
        else:
            left_out.append(name)
    return Takeover(tuple(taken), tuple(cut), tuple(left_out))


def _layer_count(weights: Mapping[str, torch.Tensor], stack: str) -> int:
    found = [int(m.group(2)) for name in weights if (m := LAYER.fullmatch(name)) and m.group(1) == stack]
    return max(found, default=-1) + 1


def _source_name(name: str, model: KonkaniVaniASR, layers: Mapping[str, int]) -> str:
    """The name of the tensor to take: layer i of n comes from layer i x (N - 1) / (n - 1) of N, where N > n."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    stack, layer, rest = match.group(1), int(match.group(2)), match.group(3)
    asked = len(getattr(model, stack).blocks)
    if layers[stack] > asked:
        layer = round(layer * (layers[stack] - 1) / max(1, asked - 1))
    return f"{stack}.blocks.{layer}.{rest}"


def _factors(name: str, axis: int, length: int, heads: int) -> tuple[int, ...]:
    """How an axis of a tensor is made up of blocks side by side, outermost first; their product is `length`."""
    if "attention" in name and "norm" not in name:
        if "query_key_value" in name and axis == 0:
            return 3, heads, 2, length // (6 * heads)
        if "key_value" in name and axis == 0:
            return 2, heads, 2, length // (4 * heads)
        if ("query" in name and axis == 0) or ("output.weight" in name and axis == 1):
            return heads, 2, length // (2 * heads)
    if "convolution.gate" in name and axis == 0:
        return 2, length // 2
    if name == "encoder.subsampling.output.weight" and axis == 1:
        bands = subsampled_length(MEL_BINS)
        return length // bands, bands
    return (length,)


def _cut_to(
    name: str, source: torch.Tensor, shape: torch.Size, source_heads: int, target_heads: int
) -> torch.Tensor | None:
    """The part of `source` that makes a tensor of `shape`; None where it has too little."""
    if source.dim() != len(shape):
        return None
    for axis, length in enumerate(shape):
        have = _factors(name, axis, source.shape[axis], source_heads)
        want = _factors(name, axis, length, target_heads)
        if any(h < w for h, w in zip(have, want, strict=True)):
            return None
        indices = torch.zeros(1, dtype=torch.long)
        for level, (h, w) in enumerate(zip(have, want, strict=True)):
            # Within a head, evenly spaced components keep the frequencies of the rotary positions.
            is_head = "attention" in name and level == len(have) - 1 and level > 0
            chosen = torch.arange(w) * h // w if is_head else torch.arange(w)
            if name.endswith("convolution.depthwise.weight") and axis == 2:
                chosen = chosen + (h - w) // 2  # the taps around the frame itself
            indices = (indices[:, None] * h + chosen[None, :]).flatten()
        source = source.index_select(axis, indices)
    return source
