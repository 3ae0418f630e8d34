"""Folder of a T5 model in Hugging Face format, validated before anything of the claimed size is allocated."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.errors import UsageError
from konkanivani.models.model_files import (
    CONFIG,
    INDEX,
    NUMBER_FORMATS,
    files_of,
    first_rows,
    header_of,
    read_json,
    read_tensors,
    refused,
)
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.model import T5, T5Shape, T5Variant
from konkanivani.models.t5.vocabulary import T5Tokens

PIECES = "spiece.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
BYTE_TOKENIZER = "ByT5Tokenizer"
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
    for ours, theirs in NAMES.items():
        match = re.fullmatch(ours, name)
        if match:
            found = match.expand(theirs)
            for part, named in (GATED_NAMES if is_gated else PLAIN_NAMES).items():
                found = found.replace(part, named)
            return found
    raise ValueError(f"T5 has no tensor {name}")


@dataclass(frozen=True)
class T5Folder:
    """Folder whose settings and list of tensors have been checked; weights are read on demand.

    `files` maps each file to the names of its tensors.
    """

    path: Path
    shape: T5Shape
    config: Mapping[str, object]
    files: Mapping[str, tuple[str, ...]]

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

    def our_names(self) -> dict[str, str]:
        """Return the network's tensor names, keyed by their names in the files."""
        return {self.name_in_file(name): name for name in self.architecture.build_without_values().state_dict()}

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

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the network's tensors in fp32, by the project's names; raises as `check_weights` does."""
        return dict(self.each_weight())

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors one by one, so that only one is in memory at a time."""
        names = self.our_names()
        for name, tensor in self._tensors():
            if name in names:
                yield names[name], tensor

    def check_weights(self) -> None:
        """Read all weights and keep none.

        Raises:
            CheckpointError: A weight is not finite, or a copy of the embedding differs from it.
        """
        copies = self.copies()
        kept = {*copies, *copies.values()}
        found = {name: tensor for name, tensor in self._tensors() if name in kept}
        for copy, name in copies.items():
            if not torch.equal(found[copy], found[name]):
                raise refused(self.path, f"its {copy} differs from its {name}, to which its {CONFIG} ties it")

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in fp32, by their names in the files."""
        for file in self.files:
            for name, tensor in read_tensors(self.path / file).items():
                copied = tensor.to(torch.float32, copy=True)  # memory-mapped: another program may change the file
                if not copied.isfinite().all():
                    raise refused(self.path, f"its {name} contains values that are not finite")
                yield name, copied

    def build(self) -> T5:
        """Build the network with the folder's weights, on the CPU."""
        model = self.architecture.build_without_values()
        model.load_state_dict(self.weights(), assign=True)
        return model


def read_t5_folder(path: Path) -> T5Folder:
    """Read the folder's settings and list of tensors, but no weights.

    Raises:
        UsageError: There is no such folder.
        CheckpointError: The folder is invalid; the message says why.
        ResourceError: A file may not be read.
    """
    described = _described(path)
    files = files_of(path)
    # Newer versions of transformers write tie_word_embeddings for every model: as they do, compare the weights.
    variant = dataclasses.replace(described.shape.variant, has_head=_has_own_head(path, files))
    shape = dataclasses.replace(described.shape, variant=variant)
    folder = dataclasses.replace(described, shape=shape, files=files)
    _check_tensors(folder)
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
    return _described(path).architecture


def _described(path: Path) -> T5Folder:
    """Return the folder with its settings, without its list of tensors."""
    if not path.is_dir():
        raise UsageError(f"There is no folder {path}. Use the folder of a T5 model in Hugging Face format.")
    config = read_json(path / CONFIG)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise refused(path, f"its {CONFIG} is of a model of type {kind!r:.40}", "Use the folder of a T5 model")
    dimensions = {}
    for name, (ours, most) in DIMENSIONS.items():
        value = config.get(name, DEFAULTS.get(name))
        if name == "num_decoder_layers" and value is None:
            value = config.get("num_layers")
        # `type`, not isinstance: True is an int.
        if type(value) is not int or not 1 <= value <= most:
            raise refused(path, f"{name} in its {CONFIG} is {value!r:.40} but must be a number from 1 to {most}")
        dimensions[ours] = value
    shape = T5Shape(**dimensions, variant=_variant_of(path, config))
    if shape.position_buckets < MIN_BUCKETS or shape.max_distance <= shape.position_buckets // 2:
        raise refused(path, f"its {CONFIG} has invalid relative positions")
    _special_ids(path, config, shape)
    return T5Folder(path, shape, config, {})


def _variant_of(path: Path, config: Mapping[str, object]) -> T5Variant:
    activation = config.get("feed_forward_proj", "relu")
    if activation not in ACTIVATIONS:
        raise refused(
            path, f"feed_forward_proj in its {CONFIG} is {activation!r:.40} but must be {' or '.join(ACTIVATIONS)}"
        )
    epsilon = config.get("layer_norm_epsilon", 1e-6)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise refused(path, f"layer_norm_epsilon in its {CONFIG} is {epsilon!r:.40} but must be between 0 and 1")
    # T5 1.0 ties its output to the embedding and scales it; its successors do neither. Of the newer key for the scale,
    # files of other programs have only the older one for the tie. mT5 never scales, whatever its files say.
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    if not isinstance(is_scaled, bool):
        raise refused(path, f"scale_decoder_outputs in its {CONFIG} is {is_scaled!r:.40} but must be true or false")
    is_scaled = is_scaled and config.get("model_type") == "t5"
    return T5Variant(ACTIVATIONS[str(activation)], has_head=not is_scaled, scales_output=is_scaled, epsilon=epsilon)


def _has_own_head(path: Path, files: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether the output layer's first rows differ from the embedding's; `check_weights` compares all."""
    found = {}
    for name in (HEAD, EMBEDDING):
        for file, names in files.items():
            if name in names:
                found[name] = first_rows(path / file, name, COMPARED_ROWS)
    return HEAD in found and (EMBEDDING not in found or not torch.equal(found[HEAD], found[EMBEDDING]))


def _special_ids(path: Path, config: Mapping[str, object], shape: T5Shape) -> tuple[int, int, int]:
    """Return the ids of padding, end and start."""
    padding = config.get("pad_token_id", 0)
    end = config.get("eos_token_id", 1)
    start = config.get("decoder_start_token_id", padding)
    found = []
    for name, value in (("pad_token_id", padding), ("eos_token_id", end), ("decoder_start_token_id", start)):
        if type(value) is not int or not 0 <= value < shape.vocab_size:
            raise refused(path, f"{name} in its {CONFIG} is {value!r:.40}, which is not one of its tokens")
        found.append(value)
    return found[0], found[1], found[2]


def _check_tensors(folder: T5Folder) -> None:
    """Refuse a folder whose files do not have exactly the network's tensors and shapes."""
    model = folder.architecture.build_without_values()
    wanted = {folder.name_in_file(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    headers = {file: header_of(folder.path / file) for file in folder.files}
    for file, header in headers.items():
        if header.keys() != set(folder.files[file]):
            raise refused(folder.path, f"the tensors in its {file} differ from its {INDEX}")
        found |= header
    wanted |= {copy: wanted[name] for copy, name in folder.copies().items()}
    if UNUSED in found:
        wanted[UNUSED] = (folder.shape.position_buckets, folder.shape.attention_heads)
    for name in sorted(found.keys() ^ wanted.keys()):
        raise refused(
            folder.path, f"it has no tensor {name}" if name in wanted else f"its tensor {name:.80} is not part of T5"
        )
    for name, (shape, kind) in found.items():
        if kind not in NUMBER_FORMATS:
            raise refused(folder.path, f"its {name} is of type {kind} but must be {', '.join(sorted(NUMBER_FORMATS))}")
        if shape != wanted[name]:
            raise refused(
                folder.path, f"its {name} has the shape {shape}, but {wanted[name]} according to its {CONFIG}"
            )
