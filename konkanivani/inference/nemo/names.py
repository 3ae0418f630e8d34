"""Mapping of this project's Conformer tensors to NeMo's tensor names.

H heads, E dimension of a head, D model dimension, K kernel size.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from konkanivani.base.config import ModelConfig

# This project's module: NeMo's modules, concatenated along dim 0. {n} is the block number.
PARTS = {
    "subsampling.output": ("pre_encode.out",),
    "blocks.{n}.first_feedforward.norm": ("layers.{n}.norm_feed_forward1",),
    "blocks.{n}.first_feedforward.expand": ("layers.{n}.feed_forward1.linear1",),
    "blocks.{n}.first_feedforward.contract": ("layers.{n}.feed_forward1.linear2",),
    "blocks.{n}.attention_norm": ("layers.{n}.norm_self_att",),
    "blocks.{n}.attention.query_key_value": tuple(f"layers.{{n}}.self_attn.linear_{part}" for part in "qkv"),
    "blocks.{n}.attention.position": ("layers.{n}.self_attn.linear_pos",),
    "blocks.{n}.attention.content_bias": ("layers.{n}.self_attn.pos_bias_u",),
    "blocks.{n}.attention.position_bias": ("layers.{n}.self_attn.pos_bias_v",),
    "blocks.{n}.attention.output": ("layers.{n}.self_attn.linear_out",),
    "blocks.{n}.convolution.norm": ("layers.{n}.norm_conv",),
    "blocks.{n}.convolution.gate": ("layers.{n}.conv.pointwise_conv1",),
    "blocks.{n}.convolution.depthwise": ("layers.{n}.conv.depthwise_conv",),
    "blocks.{n}.convolution.output": ("layers.{n}.conv.pointwise_conv2",),
    "blocks.{n}.second_feedforward.norm": ("layers.{n}.norm_feed_forward2",),
    "blocks.{n}.second_feedforward.expand": ("layers.{n}.feed_forward2.linear1",),
    "blocks.{n}.second_feedforward.contract": ("layers.{n}.feed_forward2.linear2",),
    # NeMo's block ends with a LayerNorm; here it is the first operation of the next block.
    "blocks.{n}.entry_norm": ("layers.{before}.norm_out",),
    "norm": ("layers.{last}.norm_out",),
}
# Indices of the subsampling convolutions: NeMo's `nn.Sequential` counts activations too.
STAGES = {
    "striding": {"0.0": "0", "1.0": "2"},
    "separable": {"0.0": "0", "1.0": "2", "1.1": "3", "2.0": "5", "2.1": "6"},
}
OF_HEADS = ("content_bias", "position_bias")
KERNELS_OF_1 = ("gate", "convolution.output")
NORMED = ("depthwise",)
BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
# Tensors that are not imported: RNNT decoder and joint network, feature extraction, loss, metrics, position table and
# BatchNorm's batch counters.
LEFT = re.compile(
    r"(decoder\.prediction|joint|preprocessor|spec_augmentation|loss|(ctc_|_)?wer)\..*|"
    r"encoder\.pos_enc\.pe|encoder\.layers\.\d+\.conv\.batch_norm\.num_batches_tracked"
)
RNNT = re.compile(r"(decoder\.prediction|joint)\.")


@dataclass(frozen=True)
class Source:
    """Tensors of the NeMo file that one tensor is made of, each of shape `shape`, and the BatchNorm that follows."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    norm: str | None = None


def sources(ours: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, Source]:
    """Return the source of every encoder tensor by its name in this project.

    Args:
        ours: state dict of the model, without values.
    """
    stages = STAGES[config.subsampling].items()
    table = PARTS | {f"subsampling.stages.{mine}": (f"pre_encode.conv.{theirs}",) for mine, theirs in stages}
    found = {}
    last = config.encoder_layers - 1
    for mine, theirs in table.items():
        for n in range(last + 1) if "{n}" in mine else (0,):
            # The position biases of attention are parameters without a leaf name.
            for leaf in (".weight", ".bias", ""):
                name = "encoder." + mine.format(n=n) + leaf
                if name in ours:
                    names = tuple(f"encoder.{part.format(n=n, before=n - 1, last=last)}{leaf}" for part in theirs)
                    found[name] = _source(mine, leaf, names, tuple(ours[name].shape), config)
    return found


def _source(part: str, leaf: str, names: tuple[str, ...], shape: tuple[int, ...], config: ModelConfig) -> Source:
    if part.endswith(OF_HEADS):  # stored as (H, E), here (D,)
        return Source(names, (config.attention_heads, config.d_model // config.attention_heads))
    if part.endswith(NORMED):
        # Without biases in the file, the folded BatchNorm still needs one: it is made from the statistics alone.
        is_there = leaf == ".weight" or config.biases
        return Source(names if is_there else (), shape, names[0].replace(f"depthwise_conv{leaf}", "batch_norm"))
    # NeMo stores pointwise convolutions as (D_out, D_in, K = 1), here they are linear layers.
    kernel = (1,) if leaf == ".weight" and part.endswith(KERNELS_OF_1) else ()
    return Source(names, (shape[0] // len(names), *shape[1:], *kernel))
