"""Fine-tuning: LoRA adapters, frozen layers, and weights taken from another model.

D model width, H heads, r rank of an adapter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from konkanivani.config import ModelConfig, TuningConfig
from konkanivani.errors import UsageError
from konkanivani.models.asr import KonkaniVaniASR, SpeechNetwork
from konkanivani.models.conformer import SpeechEncoder
from konkanivani.models.twin import twin_of

# --------------------
# Trained part of an initialised model: everything, everything that is not frozen, or low-rank additions (LoRA).
#
# LoRA (Hu et al., 2021): a layer's product is W x + (alpha / r) B A x with W frozen, A (r, D) random and B (D', r)
# zero, so that training starts from the original model, bit for bit. D and D' are the widths of the layer.


LOW_RANK_TENSORS = ("low_rank.down", "low_rank.up")  # A and B; the layer's name comes first
# Of this project's own models; useless with another tokenizer.
VOCAB_DEPENDENT_PREFIXES = ("ctc_head.", "decoder.embedding.", "decoder.output.")


class LowRank(torch.nn.Module):
    """Low-rank product scale B A x of x (..., D), added to a frozen layer (LoRA; Hu et al., 2021).

    A (r, D) is initialised at random and B (D', r) with zeros, so that training starts from the frozen layer's output.
    """

    def __init__(self, layer: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.up = torch.nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
        self.scale = scale
        torch.nn.init.kaiming_uniform_(self.down, a=5**0.5)
        torch.nn.init.zeros_(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * F.linear(F.linear(x, self.down), self.up)


class AdaptedLinear(torch.nn.Linear):
    """Linear layer with a low-rank product, or None, whose own weight may be frozen in half precision."""

    low_rank: LowRank | None

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, low_rank: LowRank | None) -> "AdaptedLinear":
        """Return a layer with the weights of `linear`."""
        adapted = twin_of(linear, cls)
        adapted.low_rank = low_rank
        return adapted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Autocast casts weights itself.
        weight = self.weight if torch.is_autocast_enabled(x.device.type) else self.weight.to(x.dtype)
        out = F.linear(x, weight, self.bias)
        return out if self.low_rank is None else out + self.low_rank(x)


def frozen_modules(encoder: SpeechEncoder, config: TuningConfig) -> list[torch.nn.Module]:
    """Return the modules that --freeze or --train_layers freezes: the encoder, or the subsampling and first blocks.

    Raises:
        UsageError: The encoder has fewer blocks.
    """
    freeze = config.freeze
    train = config.train_layers
    blocks = len(encoder.blocks)
    if freeze == "encoder":
        return [encoder]
    name, number = ("freeze", freeze) if train is None else ("train_layers", train)
    if isinstance(number, int) and number > blocks:
        raise UsageError(f"--{name} {number}: the encoder has only {blocks} blocks. Use fewer, or --freeze encoder.")
    if train is not None:
        return [encoder.subsampling, *encoder.blocks[: blocks - train]]
    if freeze in ("none", 0):
        return []
    return [encoder.subsampling, *encoder.blocks[:freeze]]


def tune(model: SpeechNetwork, config: TuningConfig) -> None:
    """Freeze parameters and add low-rank products in place, as the settings say.

    Modules frozen by --freeze and --train_layers then run without gradients and keep no activations. A new output head
    is trained whatever is frozen.

    Raises:
        UsageError: No layer has a name in `lora_targets`.
    """
    for part in frozen_modules(model.encoder, config):
        part.requires_grad_(False)
    if config.lora_rank:
        model.requires_grad_(False)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
        chosen = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in config.lora_targets}
        if not chosen:
            layer_names = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(f"--lora_targets matches no layer of this model: choose from {', '.join(layer_names)}.")
        for name, layer in chosen.items():
            low_rank = LowRank(layer, config.lora_rank, config.scale)
            model.set_submodule(name, AdaptedLinear.from_linear(layer, low_rank))
        # A new tokenizer's heads and embedding are not pretrained, so they are trained in full.
        for name, weight in model.named_parameters():
            weight.requires_grad_(
                weight.requires_grad or (config.new_tokenizer and name.startswith(VOCAB_DEPENDENT_PREFIXES))
            )
    # Frozen weights are never updated, so rounding loses no update.
    if config.frozen_dtype == "half":
        for block in model.blocks:
            halve_frozen_layers(block)


def halve_frozen_layers(block: torch.nn.Module) -> None:
    """Store the frozen weights of linear layers in half precision."""
    for name, layer in list(block.named_modules()):
        if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad:
            adapted = layer
            if not isinstance(layer, AdaptedLinear):
                adapted = AdaptedLinear.from_linear(layer, low_rank=None)
                block.set_submodule(name, adapted)
            adapted.weight = torch.nn.Parameter(layer.weight.detach().half(), requires_grad=False)


@torch.no_grad()
def reset_output_heads(model: KonkaniVaniASR) -> None:
    """Initialise the output heads of a new tokenizer: zeros, but a bias of -2 for CTC's blank.

    With zero weights every token is equally likely in every frame, and no noise of a random head is backpropagated into
    an encoder that is already trained.
    """
    heads = []
    if model.ctc_head is not None:
        heads.append(model.ctc_head)
    if model.decoder is not None:
        heads.append(model.decoder.output)
    for head in heads:
        head.weight.zero_()
        if head.bias is not None:
            head.bias.zero_()
    if model.ctc_head is not None:
        # Of equally likely tokens CTC learns the blank first, since nearly every path passes through it, and a head
        # that emits only blanks learns slowly. exp(-2) makes it seven times rarer than a token, which delays that. A
        # new model starts with the opposite bias (models/asr.py): its encoder is random too.
        model.ctc_head.bias[0] = -2.0  # the blank is token 0


def merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Merge low-rank products into their layers' weights: W + scale B A; weights in fp16 become fp32."""
    down, up = LOW_RANK_TENSORS
    full = {name: _to_fp32(weight) for name, weight in weights.items() if not name.endswith(LOW_RANK_TENSORS)}
    for name in weights:
        if name.endswith(down):
            layer = name.removesuffix(down)
            full[layer + "weight"] = weights[layer + "weight"] + scale * weights[layer + up] @ weights[name]
    return full


def _to_fp32(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() if weight.dtype == torch.float16 else weight


# --------------------
# Transfer of one model's weights into another of other dimensions; larger tensors are cut.
#
# A checkpoint of 12 layers, width 256 can start a model of 6 layers, width 128. Layers are taken at even spacing, first
# and last included. Of each tensor's axis the leading part is taken; if an axis is a concatenation of blocks (query,
# key and value of each head, the two halves of a gate, the mel bands of each channel), the leading part of each block.


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

    copied: tuple[str, ...]
    cut: tuple[str, ...]
    left_out: tuple[str, ...]

    def summary(self) -> str:
        """Return one line per kind of transfer, for messages."""
        lines = [f"loaded: {len(self.copied)} tensors", f"truncated to the new shape: {len(self.cut)} tensors"]
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
    counts = {match[1]: 1 + max(int(other[2]) for other in matches if other[1] == match[1]) for match in matches}
    source_layers = Layers.of(config)
    target_layers = Layers.of(model.config)
    copied = []
    cut = []
    left_out = []
    for name, target in model.state_dict().items():
        source = weights.get(_source_name(name, model, counts))
        if source is None or (not is_same_vocabulary and name.startswith(VOCAB_DEPENDENT_PREFIXES)):
            left_out.append(name)
        # With other heads, even a tensor of equal shape is divided differently, so it is cut head by head.
        elif source.shape == target.shape and (source_layers.heads == target_layers.heads or "attention" not in name):
            target.copy_(source)
            copied.append(name)
        elif (piece := _cut_to(name, source, target.shape, source_layers, target_layers)) is not None:
            target.copy_(piece)
            cut.append(name)
        else:
            left_out.append(name)
    return WeightTransfer(tuple(copied), tuple(cut), tuple(left_out))


def _source_name(name: str, model: KonkaniVaniASR, counts: Mapping[str, int]) -> str:
    """Return the source tensor's name: layer i of n comes from layer i (N - 1) / (n - 1) of N, if N > n."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    stack = match.group(1)
    layer = int(match.group(2))
    rest = match.group(3)
    blocks = len(getattr(model, stack).blocks)
    if counts.get(stack, 0) > blocks:
        layer = round(layer * (counts[stack] - 1) / max(1, blocks - 1))
    return f"{stack}.blocks.{layer}.{rest}"


def _factors(name: str, axis: int, length: int, layers: Layers) -> tuple[int, ...]:
    """Return the sizes of an axis' nested blocks, outermost first; their product is `length`."""
    if "attention" in name and "norm" not in name:
        # The factor 2 is the two halves of a head, which rotary positions pair (`rotate` in attention.py).
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


def _cut_to(
    name: str, source: torch.Tensor, shape: torch.Size, source_layers: Layers, target_layers: Layers
) -> torch.Tensor | None:
    """Cut `source` to a tensor of `shape`; return None if it is too small."""
    if source.dim() != len(shape):
        return None
    for axis, length in enumerate(shape):
        have = _factors(name, axis, source.shape[axis], source_layers)
        want = _factors(name, axis, length, target_layers)
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
