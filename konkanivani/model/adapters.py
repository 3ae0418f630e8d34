"""What of a model that begins with weights is trained: all, what is not frozen, or low-rank additions to frozen layers.

LoRA (Hu et al., 2021): the product of a layer is W x + (alpha / r) B A x with W frozen, A (r, D) random and B (D', r)
zero, so that the model begins as the one that it was, bit for bit. D, D' are the layer's widths, r the rank.
"""

from collections.abc import Mapping

import torch

from konkanivani.base.config import TuningConfig
from konkanivani.base.errors import UsageError
from konkanivani.model.kernels.products import Linear, LowRank

LOW_RANK_TENSORS = ("low_rank.down", "low_rank.up")  # A and B, behind their layer's name
VOCAB_DEPENDENT_PREFIXES = (
    "ctc_head.",
    "decoder.embedding.",
    "decoder.output.",
)  # what another tokenizer has no use for


def frozen_modules(encoder: torch.nn.Module, config: TuningConfig) -> list[torch.nn.Module]:
    """What --freeze or --train_layers leave as it is: the encoder, or what is before its blocks and the first of them.

    A UsageError where it has not so many.
    """
    freeze, train, blocks = config.freeze, config.train_layers, len(encoder.blocks)
    if freeze == "encoder":
        return [encoder]
    name, number = ("freeze", freeze) if train is None else ("train_layers", train)
    if isinstance(number, int) and number > blocks:
        raise UsageError(f"--{name} {number}: the encoder has only {blocks} blocks. Use fewer, or --freeze encoder.")
    kept = (0 if freeze == "none" else freeze) if train is None else blocks - train
    return [encoder.subsampling, *encoder.blocks[:kept]] if kept or train is not None else []


def tune(model: torch.nn.Module, config: TuningConfig) -> None:
    """Freezes what the settings say, in place, and adds the low-rank products that they ask for.

    What --freeze and --train_layers leave is run without gradient then, and nothing of it is kept. A new head is
    trained whatever is frozen. A UsageError where no layer has a name that the settings ask low-rank products for.
    """
    for part in frozen_modules(model.encoder, config):
        part.requires_grad_(False)
    if config.lora_rank:
        model.requires_grad_(False)
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
        chosen = [layer for name, layer in layers.items() if name.rpartition(".")[2] in config.lora_targets]
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(f"--lora_targets matches no layer of this model: choose from {', '.join(known)}.")
        for layer in chosen:
            layer.low_rank = LowRank(layer, config.lora_rank, config.scale)
        for name, weight in model.named_parameters():
            weight.requires_grad_(
                weight.requires_grad or (config.new_tokenizer and name.startswith(VOCAB_DEPENDENT_PREFIXES))
            )
    if config.frozen_dtype == "half":
        for block in model.blocks:
            for layer in block.modules():
                if isinstance(layer, Linear) and not layer.weight.requires_grad:
                    layer.weight = torch.nn.Parameter(layer.weight.detach().half(), requires_grad=False)


@torch.no_grad()
def reset_output_heads(model: torch.nn.Module) -> None:
    """Gives the heads of a new tokenizer the values to begin with: zeros, but -2 for CTC's blank.

    With zero weights every token is as likely in every frame, and no noise of a random head goes down into an encoder
    that has learnt already. Of equally likely tokens CTC finds the blank first, since nearly every path goes through
    it, and a head that says nothing but blanks learns slowly: begun seven times rarer than a token, it comes later.
    """
    for head in filter(None, (model.ctc_head, model.decoder and model.decoder.output)):
        head.weight.zero_()
        if head.bias is not None:
            head.bias.zero_()
    if model.ctc_head is not None:
        model.ctc_head.bias[0] = -2.0  # the blank is token 0


def merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights of a model with low-rank products as those of one without: W + scale B A, in fp32 at least."""
    down, up = LOW_RANK_TENSORS
    found = {name: _in_full(weight) for name, weight in weights.items() if not name.endswith(LOW_RANK_TENSORS)}
    for name in weights:
        if name.endswith(down):
            layer = name.removesuffix(down)
            found[layer + "weight"] = weights[layer + "weight"] + scale * weights[layer + up] @ weights[name]
    return found


def _in_full(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() if weight.dtype == torch.float16 else weight
