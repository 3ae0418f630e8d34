"""Folder of a T5 model in Hugging Face format, as a pretrained model and as the base of trained models.

It is validated before anything of the claimed size is allocated.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.config import PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.errors import CheckpointError, DataError, ResourceError, UsageError, explained
from konkanivani.models.hub import BYTE_TOKENIZER, PIECES, TOKENIZER_CONFIG
from konkanivani.models.model_files import (
    CONFIG,
    ModelFolder,
    PretrainedFolder,
    checked_dimensions,
    files_of,
    first_rows,
    read_dimension,
    read_json,
    read_tensors,
    refused,
    write_adapter,
)
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.model import T5Shape, T5Variant
from konkanivani.models.t5.vocabulary import Pieces, T5Tokens, T5Vocabulary, Utf8Bytes, limits_of
from konkanivani.models.whisper.export import WrittenFolder, locate_base, named_as_in_files, other_base, write_copy

MODEL_TYPES = ("t5", "mt5")
HEAD = "lm_head.weight"
EMBEDDING = "shared.weight"
# The embedding a second and a third time, in some files.
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In files converted from Mesh TensorFlow: no program reads it.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# Each dimension by its name in config.json: the project's name, and an upper bound beyond any existing model.
DIMENSIONS = {
    "d_model": ("d_model", 2**14),
    "d_kv": ("head_width", 2**10),
    "num_heads": ("attention_heads", 2**10),
    "num_layers": ("encoder_layers", 2**8),
    "num_decoder_layers": ("decoder_layers", 2**8),
    "d_ff": ("feedforward_dim", 2**17),
    "vocab_size": ("vocab_size", 2**20),
    "relative_attention_num_buckets": ("position_buckets", 2**10),
    "relative_attention_max_distance": ("max_distance", 2**16),
}
MOST = {ours: most for ours, most in DIMENSIONS.values()}
DEFAULTS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
MIN_BUCKETS = 4
COMPARED_ROWS = 64
ACTIVATIONS = {"relu": False, "gated-gelu": True}
# Parts of tensor names: the project's, and the files'. The number is a block's.
NAMES = {
    "decoder.embedding.weight": EMBEDDING,
    "decoder.head.weight": HEAD,
    r"(\w+)\.norm\.weight": r"\1.final_layer_norm.weight",
    r"(\w+)\.positions\.weight": r"\1.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    r"(\w+)\.blocks\.(\d+)\.self_attention_norm\.weight": r"\1.block.\2.layer.0.layer_norm.weight",
    r"(\w+)\.blocks\.(\d+)\.self_attention\.(\w)\w+(.*)": r"\1.block.\2.layer.0.SelfAttention.\3\4",
    r"(\w+)\.blocks\.(\d+)\.cross_attention_norm\.weight": r"\1.block.\2.layer.1.layer_norm.weight",
    r"(\w+)\.blocks\.(\d+)\.cross_attention\.(\w)\w+(.*)": r"\1.block.\2.layer.1.EncDecAttention.\3\4",
    r"encoder\.blocks\.(\d+)\.feedforward\.norm\.weight": r"encoder.block.\1.layer.1.layer_norm.weight",
    r"decoder\.blocks\.(\d+)\.feedforward\.norm\.weight": r"decoder.block.\1.layer.2.layer_norm.weight",
    r"encoder\.blocks\.(\d+)\.feedforward\.(\w+)(.*)": r"encoder.block.\1.layer.1.DenseReluDense.<\2>\3",
    r"decoder\.blocks\.(\d+)\.feedforward\.(\w+)(.*)": r"decoder.block.\1.layer.2.DenseReluDense.<\2>\3",
}
GATED_NAMES = {"<gate>": "wi_0", "<expand>": "wi_1", "<contract>": "wo"}
PLAIN_NAMES = {"<expand>": "wi", "<contract>": "wo"}


def name_in_file(name: str, is_gated: bool) -> str:
    """Return the name in the files of the network's tensor or layer `name`."""
    for pattern, template in NAMES.items():
        match = re.fullmatch(pattern, name)
        if match:
            expanded = match.expand(template)
            for part, layer_name in (GATED_NAMES if is_gated else PLAIN_NAMES).items():
                expanded = expanded.replace(part, layer_name)
            return expanded
    raise ValueError(f"T5 has no tensor {name}")


@dataclass(frozen=True)
class T5Folder(ModelFolder):
    """Folder of a T5 model."""

    shape: T5Shape

    @property
    def architecture(self) -> T5Architecture:
        """Architecture that the folder describes."""
        return T5Architecture(self.shape)

    @property
    def tokens(self) -> T5Tokens:
        """Size of the vocabulary, and its special tokens."""
        padding, end, start = _special_ids(self.path, self.config, self.shape)
        return T5Tokens(self.shape.vocab_size, padding, end, start)

    @property
    def is_of_bytes(self) -> bool:
        """Whether the tokens are bytes."""
        settings = read_json(self.path / TOKENIZER_CONFIG) if (self.path / TOKENIZER_CONFIG).exists() else {}
        return BYTE_TOKENIZER in (settings.get("tokenizer_class"), self.config.get("tokenizer_class"))

    @property
    def peft_model(self) -> Mapping[str, str]:
        """Class of the model in transformers, as PEFT's adapter_config.json names it."""
        kind = str(self.config.get("model_type"))
        name = {"t5": "T5", "mt5": "MT5"}[kind]
        return {
            "base_model_class": f"{name}ForConditionalGeneration",
            "parent_library": f"transformers.models.{kind}.modeling_{kind}",
        }

    def name_in_file(self, name: str) -> str:
        """Return the name in the files of the network's tensor or layer `name`."""
        return name_in_file(name, self.shape.variant.is_gated)

    def copies(self) -> dict[str, str]:
        """Return the names in the files that repeat another tensor, with that tensor's name in the files."""
        repeated = COPIES if self.shape.variant.has_head else (*COPIES, HEAD)
        return {name: EMBEDDING for names in self.files.values() for name in names if name in repeated}

    def unused(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the files, by their names, that the network does not have and exports keep."""
        for file, names in self.files.items():
            if UNUSED in names:
                return {UNUSED: read_tensors(self.path / file)[UNUSED]}
        return {}


def read_t5_folder(path: Path) -> T5Folder:
    """Read the folder's settings and list of tensors, but no weights.

    Raises:
        UsageError: There is no such folder.
        CheckpointError: The folder is invalid; the message says why.
        ResourceError: A file may not be read.
    """
    described = _read_folder(path)
    files = files_of(path)
    # Newer versions of transformers write tie_word_embeddings for every model: as they do, compare the weights.
    variant = dataclasses.replace(described.shape.variant, has_head=_has_own_head(path, files))
    shape = dataclasses.replace(described.shape, variant=variant)
    folder = dataclasses.replace(described, shape=shape, files=files)
    folder.check_tensors("T5", {UNUSED: (shape.position_buckets, shape.attention_heads)})
    if not folder.is_of_bytes and not (path / PIECES).is_file():
        raise refused(
            path,
            f"it has no {PIECES}",
            "Copy that file of the original model into it; tokenizer.json is not read. A ByT5 model needs the "
            f"tokenizer_class {BYTE_TOKENIZER} in its {TOKENIZER_CONFIG}",
        )
    return folder


def read_t5_architecture(path: Path) -> T5Architecture:
    """Return the architecture of a folder's config.json, the only file needed: enough for a memory plan."""
    return _read_folder(path).architecture


def _read_folder(path: Path) -> T5Folder:
    """Return the folder with its settings, without its list of tensors."""
    if not path.is_dir():
        raise UsageError(f"There is no folder {path}. Use the folder of a T5 model in Hugging Face format.")
    config = read_json(path / CONFIG)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise refused(path, f"its {CONFIG} is of a model of type {kind!r:.40}", "Use the folder of a T5 model")
    dimensions = {}
    for name, (ours, max_value) in DIMENSIONS.items():
        default: object = DEFAULTS.get(name)
        settings = config
        if name == "num_decoder_layers" and config.get(name) is None:
            # As in transformers, null is a missing value.
            settings = {name: config.get("num_layers")}
        dimensions[ours] = read_dimension(path, settings, name, max_value, default)
    shape = T5Shape(**dimensions, variant=_variant_of(path, config))
    if shape.position_buckets < MIN_BUCKETS or shape.max_distance <= shape.position_buckets // 2:
        raise refused(path, f"its {CONFIG} has invalid relative positions")
    _special_ids(path, config, shape)
    return T5Folder(path, config, {}, shape)


def _variant_of(path: Path, config: Mapping[str, object]) -> T5Variant:
    activation = config.get("feed_forward_proj", "relu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise refused(
            path, f"feed_forward_proj in its {CONFIG} is {activation!r:.40} but must be {' or '.join(ACTIVATIONS)}"
        )
    epsilon = config.get("layer_norm_epsilon", 1e-6)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise refused(path, f"layer_norm_epsilon in its {CONFIG} is {epsilon!r:.40} but must be between 0 and 1")
    # T5 1.0 ties its output to the embedding and scales it; its successors do neither. Files without the newer key
    # `scale_decoder_outputs` state both by `tie_word_embeddings`. mT5 never scales, whatever its files say.
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    if not isinstance(is_scaled, bool):
        raise refused(path, f"scale_decoder_outputs in its {CONFIG} is {is_scaled!r:.40} but must be true or false")
    is_scaled = is_scaled and config.get("model_type") == "t5"
    return T5Variant(ACTIVATIONS[activation], has_head=not is_scaled, scales_output=is_scaled, epsilon=epsilon)


def _has_own_head(path: Path, files: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether the output layer's first rows differ from the embedding's; `check_weights` compares all."""
    rows = {}
    for name in (HEAD, EMBEDDING):
        for file, names in files.items():
            if name in names:
                rows[name] = first_rows(path / file, name, COMPARED_ROWS)
    return HEAD in rows and (EMBEDDING not in rows or not torch.equal(rows[HEAD], rows[EMBEDDING]))


def _special_ids(path: Path, config: Mapping[str, object], shape: T5Shape) -> tuple[int, int, int]:
    """Return the ids of padding, end and start."""
    padding = config.get("pad_token_id", 0)
    end = config.get("eos_token_id", 1)
    start = config.get("decoder_start_token_id", padding)
    ids = []
    for name, value in (("pad_token_id", padding), ("eos_token_id", end), ("decoder_start_token_id", start)):
        if type(value) is not int or not 0 <= value < shape.vocab_size:
            raise refused(path, f"{name} in its {CONFIG} is {value!r:.40}, which is not one of its tokens")
        ids.append(value)
    return ids[0], ids[1], ids[2]


# --------------------
# T5 folders as pretrained models, and trained models as a copy of their folder.

KIND = "t5"
RATE = 1e-4
LORA_RATE = 1e-3  # high, since LoRA's products start at zero
# The embedding may have some rows more than there are pieces: 100 sentinels, and padding to a multiple of 128.
MAX_SPARE_ROWS = 256


@dataclass(frozen=True)
class PretrainedT5(PretrainedFolder[T5Folder]):
    """T5 model in a folder; implements `Pretrained`."""

    def complete_settings(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the settings with default limits for unset ones."""
        limits = limits_of(config)
        return dataclasses.replace(config, max_input_tokens=limits.input_tokens, max_target_tokens=limits.target_tokens)

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> T5Architecture:
        """Return the architecture with the layers to train."""
        return T5Architecture(self.folder.shape, tuning)

    def vocabulary(self, config: PretrainedConfig) -> T5Vocabulary:
        """Return the tokenizer with the limits of `config`; raise a CheckpointError if it does not fit the model."""
        codec: Pieces | Utf8Bytes = Utf8Bytes()
        tokens = self.folder.tokens
        try:
            if not self.folder.is_of_bytes:
                path = self.path / PIECES
                with explained(ResourceError, f"{path} cannot be read", "Fix that and start again."):
                    pieces = path.read_bytes()
                codec = Pieces(pieces, tokens)
                if codec.size + MAX_SPARE_ROWS < tokens.size:
                    raise DataError(f"{PIECES} has {codec.size} tokens, but its model has {tokens.size}. Use its own.")
            return T5Vocabulary(codec, tokens, limits_of(config))
        except DataError as error:
            raise refused(self.path, f"its tokenizer does not fit: {error}".removesuffix(".")) from None

    def learning_rate(self, tuning: TuningConfig) -> float:
        """Return a peak learning rate, with one of its own for LoRA weights."""
        return LORA_RATE if tuning.lora_rank else RATE

    def description(self) -> Mapping[str, object]:
        """Return the model's kind and dimensions."""
        shape = dataclasses.asdict(self.folder.shape)
        variant = shape.pop("variant")
        return {"kind": KIND, **shape, **variant}


def read_pretrained_t5(path: Path) -> PretrainedT5:
    """Return the T5 model in a folder, with its settings and list of tensors checked."""
    return PretrainedT5(read_t5_folder(path))


def restored_t5(state: Mapping[str, object], tuning: TuningConfig) -> T5Architecture:
    """Return the architecture stored in `description`; raise a CheckpointError if its dimensions are invalid."""
    dimensions = checked_dimensions(state, MOST)
    match state:
        case {
            "is_gated": bool(is_gated),
            "has_head": bool(has_head),
            "scales_output": bool(scales_output),
            "epsilon": float(epsilon),
        } if 0 < epsilon < 1 and dimensions["position_buckets"] >= MIN_BUCKETS:
            variant = T5Variant(is_gated, has_head, scales_output, epsilon)
        case _:
            raise CheckpointError("The checkpoint's model is not a known variant of T5. Use another checkpoint.")
    if dimensions["max_distance"] <= dimensions["position_buckets"] // 2:
        raise CheckpointError("The checkpoint's model has invalid relative positions. Use another checkpoint.")
    return T5Architecture(T5Shape(**dimensions, variant=variant), tuning)


@dataclass(frozen=True)
class TunedT5:
    """Settings, architecture, complete weights and serialized tokenizer of a fine-tuned T5 model."""

    config: TrainConfig
    architecture: T5Architecture
    weights: Mapping[str, torch.Tensor]
    tokenizer: bytes


def read_t5_base(tuned: TunedT5, folder: str | None, outputs: Iterable[Path]) -> PretrainedT5:
    """Return the pretrained folder of the run, or `folder` its copy; raise errors as `locate_base` does."""
    path = locate_base(tuned.config.pretrained, folder, outputs)
    base = read_pretrained_t5(path)
    if (base.folder.shape, base.vocabulary(tuned.config.pretrained).model) != (
        tuned.architecture.model,
        tuned.tokenizer,
    ):
        raise other_base(path)
    return base


def export_t5_adapter(tuned: TunedT5, base: PretrainedT5, out: Path) -> None:
    """Write the folder `out` with the LoRA weights only, in PEFT's format."""
    if not tuned.architecture.tuning.lora_rank:
        raise UsageError(
            "--adapter needs a run with --lora_rank, but this run trained the layers themselves: use --folder."
        )
    write_adapter(base.folder, tuned.weights, tuned.architecture.tuning, out)


def export_t5(tuned: TunedT5, base: PretrainedT5, out: Path) -> WrittenFolder:
    """Write the folder `out`: the base's files, with the trained weights in the base's number formats.

    Raises as `write_copy` does, which compares the files with the weights bit for bit.
    """
    folder = base.folder
    # `plain` merges LoRA weights into the layers.
    _, weights = tuned.architecture.plain(tuned.weights)
    named_weights = named_as_in_files(folder, weights)
    for copy, name in folder.copies().items():
        named_weights[copy] = named_weights[name].clone()
    named_weights |= folder.unused()
    return write_copy(folder, named_weights, out)
