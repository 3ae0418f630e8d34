"""NeMo configurations and parameter names, and their conversion to this project's.

H heads, E dimension of a head, D model dimension, K kernel size.

Defaults are taken from NeMo's own classes (ConformerEncoder, AudioToMelSpectrogramPreprocessor, ConvASRDecoder of 3.0).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from konkanivani.config import FeatureConfig, ModelConfig
from konkanivani.lengths import SAMPLE_RATE
from konkanivani.models.nemo.archive import Section, is_number, read_yaml, refused

# --------------------
# Mapping of this project's Conformer tensors to NeMo's tensor names.


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
    table = PARTS | {
        f"subsampling.stages.{own_part}": (f"pre_encode.conv.{nemo_parts}",) for own_part, nemo_parts in stages
    }
    source_by_name = {}
    last = config.encoder_layers - 1
    for own_part, nemo_parts in table.items():
        for n in range(last + 1) if "{n}" in own_part else (0,):
            # The position biases of attention are parameters without a leaf name.
            for leaf in (".weight", ".bias", ""):
                name = "encoder." + own_part.format(n=n) + leaf
                if name in ours:
                    names = tuple(f"encoder.{part.format(n=n, before=n - 1, last=last)}{leaf}" for part in nemo_parts)
                    source_by_name[name] = _source(own_part, leaf, names, tuple(ours[name].shape), config)
    return source_by_name


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


# --------------------
# Conversion of a NeMo configuration to this project's settings; unsupported settings are rejected by name and value.


# Last part of `target`: sections that lead to the CTC head, and the prefix of its tensors.
HEADS = {
    "EncDecCTCModelBPE": (("decoder",), "decoder.decoder_layers.0"),
    "EncDecHybridRNNTCTCBPEModel": (("aux_ctc", "decoder"), "ctc_decoder.decoder_layers.0"),
}
# Since 2.5.0 the STFT pads waveforms with zeros and gives one frame less. Up to 2.4.1 it pads by reflection, although
# the table in NeMo's own documentation differs. Found by comparing the code of the releases.
ZEROS_SINCE = (2, 5)
KNOWN_MAJORS = (1, 2, 3)
GUARDS = {"tiny": 2.0**-126, "eps": 2.0**-23}  # of fp32
NYQUIST = SAMPLE_RATE // 2
# Supported values of each setting, the default first.
FEATURES = {
    **{"sample_rate": (SAMPLE_RATE,), "window": ("hann",), "normalize": ("per_feature",), "log": (True,)},
    **{
        "mel_norm": ("slaney",),
        "lowfreq": (0, 0.0),
        "highfreq": (None, NYQUIST, float(NYQUIST)),
        "mag_power": (2.0, 2),
    },
    **{"frame_splicing": (1,), "pad_value": (0, 0.0), "exact_pad": (False,), "stft_exact_pad": (False,)},
    **{"stft_conv": (False,), "use_torchaudio": (False,)},
}
# `pad_to` adds frames that are masked. Dither and narrow-band augmentation are used in training only.
FEATURES_UNUSED = ("_target_", "dither", "pad_to", "rng", "nb_augmentation_prob", "nb_max_freq")
ENCODER = {
    **{"self_attention_model": ("rel_pos",), "att_context_style": ("regular",), "conv_context_style": ("regular",)},
    **{"att_context_size": (None, [-1, -1], [[-1, -1]]), "att_chunk_context_size": (None,), "reduction": (None,)},
    **{"reduction_position": (None,), "reduction_factor": (1,), "conv_norm_type": ("batch_norm",)},
    **{"causal_downsampling": (False,), "global_tokens": (0,), "global_attn_separate": (False,)},
    **{"untie_biases": (True, False)},  # tied biases are stored once per block
}
SUBSAMPLINGS: dict[tuple[str, int], Literal["striding", "separable"]] = {
    ("striding", 4): "striding",
    ("dw_striding", 8): "separable",
}
ENCODER_UNUSED = (
    *("_target_", "global_tokens_spacing", "pos_emb_max_len", "subsampling_conv_chunking_factor", "use_pytorch_sdpa"),
    *("use_pytorch_sdpa_backends", "sync_max_audio_length", "dropout_pre_encoder", "dropout_emb", "dropout_att"),
    *("att_context_probs", "stochastic_depth_drop_prob", "stochastic_depth_mode", "stochastic_depth_start_layer"),
)


@dataclass(frozen=True)
class NemoSettings:
    """Settings of a NeMo model: network, features, prefix of the CTC head's tensors, and tokenizer files by language.

    A tokenizer for all languages has the key "". `vocabulary` lists the pieces of the head's rows, empty if not in the
    file.
    """

    model: ModelConfig
    features: FeatureConfig
    head: str
    tokenizers: Mapping[str, str]
    vocabulary: tuple[object, ...]
    saved_by: str
    licence: str


def read_settings(text: bytes, path: Path) -> NemoSettings:
    """Return the settings of a configuration's text; raise a CheckpointError that names the first unsupported one."""
    values = read_yaml(text, path)
    config = Section(path, "configuration", values)
    target = str(config.get("target")).rpartition(".")[2]
    version = str(config.get("nemo_version"))
    if target not in HEADS:
        reason = f"its target is {target!r:.80}, but only {' or '.join(HEADS)} is supported"
        raise refused(path, reason, "Use another model")
    names, prefix = HEADS[target]
    features = _features(Section(path, "preprocessor", config.get("preprocessor")), _edges(version, path))
    model = _encoder(Section(path, "encoder", config.get("encoder")), features.mel_bins)
    # A hybrid model may set `multisoftmax` in the section of its RNNT decoder only.
    decoder = config.get("decoder")
    has_masks = isinstance(decoder, dict) and decoder.get("multisoftmax") is True
    for name in names:
        values = Section(path, ".".join(names), values).get(name)
    head = Section(path, ".".join(names), values)
    has_masks |= head.only("multisoftmax", False, True)
    # The number of classes follows from the shapes of the tensors.
    head.ignore("_target_", "init_mode", "num_classes", "language_masks")
    head.only("feat_in", None, -1, model.d_model)
    head.only("add_blank", True)
    vocabulary = head.get("vocabulary")
    head.finish()
    tokenizers = _tokenizers(Section(path, "tokenizer", config.get("tokenizer")), path, has_masks)
    licence = str(config.get("license") or config.get("licence") or "")[:200]
    listed = tuple(vocabulary) if isinstance(vocabulary, list) else ()
    return NemoSettings(model, features, prefix, tokenizers, listed, f"NeMo {version}", licence)


def _edges(version: str, path: Path) -> Literal["zeros", "reflected"]:
    """Return the padding of waveforms in the NeMo version that saved the file."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or int(match[1]) not in KNOWN_MAJORS:
        reason = f"its nemo_version is {version!r:.80}, and the features of that version are unknown"
        raise refused(path, reason, "Use a newer version, or save it with NeMo 1, 2 or 3")
    return "zeros" if (int(match[1]), int(match[2])) >= ZEROS_SINCE else "reflected"


def _features(section: Section, frame_padding: Literal["zeros", "reflected"]) -> FeatureConfig:
    section.ignore(*FEATURES_UNUSED)
    section.only_all(FEATURES)
    window = _samples(section, "window_size", 0.02)
    transform = section.get("n_fft")
    # NeMo's default FFT size is the next power of 2.
    transform = 2 ** math.ceil(math.log2(window)) if transform is None else transform
    if type(transform) is not int or not window <= transform <= 2**16:
        raise section.unbuilt("n_fft", transform, f"a number from {window} to {2**16}")
    preemphasis = section.get("preemph", 0.97)
    if preemphasis is None:
        preemphasis = 0
    if not is_number(preemphasis) or not 0 <= preemphasis < 1:
        raise section.unbuilt("preemph", preemphasis, "a number from 0 to below 1")
    guard = section.only("log_zero_guard_type", "add", "clamp")
    smallest = section.get("log_zero_guard_value", 2.0**-24)
    smallest = GUARDS.get(smallest) if isinstance(smallest, str) else smallest
    # PyYAML reads 1e-5, without a decimal point, as a string; it is rejected too.
    if type(smallest) is not float or not 0 < smallest < 1:
        raise section.unbuilt("log_zero_guard_value", smallest, "a number between 0 and 1, tiny or eps")
    features = FeatureConfig(
        mel_bins=section.count("features", 64),
        fft_samples=transform,
        window_samples=window,
        hop_samples=_samples(section, "window_stride", 0.01),
        smallest_power=smallest,
        log_floor_mode="added" if guard == "add" else "floor",
        preemphasis=float(preemphasis),
        window="symmetric",
        frame_padding=frame_padding,
        mel_scale="slaney",
        std_ddof="sample",
        dynamic_range=0.0,
        dc_removal="none",
        normalization="utterance",
    )
    section.finish()
    return features


def _samples(section: Section, key: str, default: float) -> int:
    """Return a length in samples, which the configuration may give in seconds."""
    seconds = section.get(key, default)
    samples = section.get(f"n_{key}")
    if samples is None and is_number(seconds) and 0 < seconds < 1:
        # Truncated, as in NeMo.
        samples = int(seconds * SAMPLE_RATE)
    if type(samples) is not int or not 0 < samples < SAMPLE_RATE:
        raise section.unbuilt(key, seconds if samples is None else samples, "a length below a second")
    return samples


def _encoder(section: Section, mel_bins: int) -> ModelConfig:
    section.ignore(*ENCODER_UNUSED)
    section.only_all(ENCODER)
    section.only("feat_in", mel_bins)
    width = section.count("d_model", None)
    kernel = section.count("conv_kernel_size", 31)
    section.only("feat_out", -1, 0, None, width)
    # Only symmetric, non-causal convolutions are supported.
    section.only("conv_context_size", None, [kernel // 2, kernel // 2])
    kind = section.get("subsampling", "striding")
    factor = section.get("subsampling_factor", 4)
    if not isinstance(kind, str) or not isinstance(factor, int) or (kind, factor) not in SUBSAMPLINGS:
        built = " or ".join(f"{kind} by {factor}" for kind, factor in SUBSAMPLINGS)
        raise section.unbuilt("subsampling", f"{kind} by {factor}", built)
    channels = section.count("subsampling_conv_channels", -1, least=-1)
    model_config = ModelConfig(
        d_model=width,
        encoder_layers=section.count("n_layers", None),
        decoder_layers=0,
        attention_heads=section.count("n_heads", 4),
        feedforward_dim=width * section.count("ff_expansion_factor", 4),
        convolution_kernel=kernel,
        # -1 stands for d_model.
        subsampling_channels=width if channels == -1 else channels,
        dropout=float(section.number("dropout", 0.1, 0, 0.999)),
        attention_positions="relative",
        # BatchNorm is folded into the depthwise convolution (see weights.py).
        convolution_norm="none",
        subsampling=SUBSAMPLINGS[kind, factor],
        scaled_input=section.only("xscaling", True, False),
        entry_norm=False,
        biases=section.only("use_bias", True, False),
    )
    section.finish()
    return model_config


def _tokenizers(section: Section, path: Path, has_masks: bool) -> dict[str, str]:
    """Return the tokenizer file of each language, in the order of the head's rows."""
    section.ignore("dir", "update_tokenizer", "hf_kwargs")
    kind = str(section.get("type")).lower()
    languages = section.get("langs")
    if not languages:
        return {"": _tokenizer(section, path, kind)}
    if kind not in ("multilingual", "agg") or not has_masks:
        # Without one softmax per language, probabilities would be normalised over the tokens of all languages.
        reason = f"its tokenizer.type is {kind!r:.80} with tokens of several languages"
        raise refused(path, f"{reason}, but only one softmax per language is supported", "Use another model")
    section.finish()
    files = {}
    for language, values in Section(path, "tokenizer.langs", languages).unread.items():
        tokenizer = Section(path, f"tokenizer.langs.{language}", values)
        tokenizer.ignore("dir", "hf_kwargs")
        files[str(language)] = _tokenizer(tokenizer, path, str(tokenizer.get("type", "bpe")).lower())
    return files


def _tokenizer(section: Section, path: Path, kind: str) -> str:
    if kind != "bpe":
        raise section.unbuilt("type", kind, "bpe, a SentencePiece model,")
    section.ignore("vocab_path", "spe_tokenizer_vocab", "special_tokens")
    model_path = section.get("model_path")
    section.finish()
    if not isinstance(model_path, str):
        raise refused(path, "its configuration has no tokenizer", "Use a file saved by NeMo")
    return model_path.removeprefix("nemo:").rpartition("/")[2]
