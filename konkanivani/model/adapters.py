"""Trained part of an initialised model: everything, everything that is not frozen, or low-rank additions (LoRA).

LoRA (Hu et al., 2021): a layer's product is W x + (alpha / r) B A x with W frozen, A (r, D) random and B (D', r) zero,
so that training starts from the original model, bit for bit. D and D' are the layer's widths, r is the rank.
"""

from collections.abc import Mapping

import torch

from konkanivani.base.config import TuningConfig
from konkanivani.base.errors import UsageError
from konkanivani.model.asr import KonkaniVaniASR, SpeechNetwork
from konkanivani.model.encoder import SpeechEncoder
from konkanivani.model.kernels.products import Linear, LowRank

LOW_RANK_TENSORS = ("low_rank.down", "low_rank.up")  # A and B; the layer's name comes first
VOCAB_DEPENDENT_PREFIXES = ("ctc_head.", "decoder.embedding.", "decoder.output.")  # useless with another tokenizer


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
    kept = (0 if freeze == "none" else freeze) if train is None else blocks - train
    return [encoder.subsampling, *encoder.blocks[:kept]] if kept or train is not None else []


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
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
        chosen = [layer for name, layer in layers.items() if name.rpartition(".")[2] in config.lora_targets]
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise UsageError(f"--lora_targets matches no layer of this model: choose from {', '.join(known)}.")
        for layer in chosen:
            layer.low_rank = LowRank(layer, config.lora_rank, config.scale)
        # A new tokenizer's heads and embedding are not pretrained, so they are trained in full.
        for name, weight in model.named_parameters():
            weight.requires_grad_(
                weight.requires_grad or (config.new_tokenizer and name.startswith(VOCAB_DEPENDENT_PREFIXES))
            )
        # Frozen weights have no moments and no updates to lose to rounding, so half precision halves their memory.
    if config.frozen_dtype == "half":
        for block in model.blocks:
            for part in block.modules():
                if isinstance(part, Linear) and not part.weight.requires_grad:
                    part.weight = torch.nn.Parameter(part.weight.detach().half(), requires_grad=False)


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
        # that emits only blanks learns slowly. exp(-2) makes it seven times rarer than a token, which delays that.
        model.ctc_head.bias[0] = -2.0  # the blank is token 0


def merged(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Merge low-rank products into their layers' weights: W + scale B A, in at least fp32."""
    down, up = LOW_RANK_TENSORS
    found = {name: _in_full(weight) for name, weight in weights.items() if not name.endswith(LOW_RANK_TENSORS)}
    for name in weights:
        if name.endswith(down):
            layer = name.removesuffix(down)
            found[layer + "weight"] = weights[layer + "weight"] + scale * weights[layer + up] @ weights[name]
    return found


def _in_full(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() if weight.dtype == torch.float16 else weight
