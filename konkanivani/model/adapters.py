"""What of a model that begins with weights is trained: all, what is not frozen, or low-rank additions to frozen layers.

LoRA (Hu et al., 2021): the product of a layer is W x + (alpha / r) B A x with W frozen, A (r, D) random and B (D', r)
zero, so that the model begins as the one that it was, bit for bit. D, D' are the layer's widths, r the rank.
"""

from collections.abc import Iterable, Mapping

import torch

from konkanivani.base.config import TuningConfig
from konkanivani.base.errors import UsageError
from konkanivani.model.kernels.linear import Linear, LowRank

LOW_RANK_TENSORS = ("low_rank.down", "low_rank.up")  # A and B, behind their layer's name


def lower_parts(encoder: torch.nn.Module, freeze: str | int) -> list[torch.nn.Module]:
    """What --freeze names: the encoder, or what is before its blocks and the first of them.

    A UsageError where it has not so many.
    """
    if freeze == "encoder":
        return [encoder]
    if isinstance(freeze, int) and freeze > len(encoder.blocks):
        raise UsageError(f"--freeze {freeze}: the encoder has {len(encoder.blocks)} blocks. Give fewer, or encoder.")
    return [encoder.subsampling, *encoder.blocks[:freeze]] if isinstance(freeze, int) and freeze > 0 else []


def tune(model: torch.nn.Module, lower: Iterable[torch.nn.Module], config: TuningConfig) -> None:
    """Freezes what the settings say, in place, and adds the low-rank products that they ask for.

    `lower` are the parts that `--freeze` names: they are run without gradient then, and nothing of them is kept. A
    UsageError where no layer has a name that the settings ask low-rank products for.
    """
    for part in lower:
        part.requires_grad_(False)
    if config.lora_rank:
        model.requires_grad_(False)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
        chosen = [layer for name, layer in layers.items() if name.rpartition(".")[2] in config.lora_targets]
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(f"--lora_targets names no layer of this model: give some of {', '.join(known)}.")
        for layer in chosen:
            layer.low_rank = LowRank(layer, config.lora_rank, config.scale)


def merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights of a model with low-rank products as those of one without: W + scale B A, in fp32 at least."""
    down, up = LOW_RANK_TENSORS
    found = {name: weight for name, weight in weights.items() if not name.endswith(LOW_RANK_TENSORS)}
    for name in weights:
        if name.endswith(down):
            layer = name.removesuffix(down)
            found[layer + "weight"] = weights[layer + "weight"] + scale * weights[layer + up] @ weights[name]
    return found
