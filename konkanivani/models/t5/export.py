"""T5 folders as pretrained models, and trained T5 models as a copy of their base folder."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.config import PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.errors import CheckpointError, DataError, UsageError
from konkanivani.models.model_files import PretrainedFolder, checked_dimensions, refused, write_adapter
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.folder import MIN_BUCKETS, MOST, PIECES, T5Folder, read_t5_folder
from konkanivani.models.t5.model import T5Shape, T5Variant
from konkanivani.models.t5.vocabulary import Pieces, T5Vocabulary, Utf8Bytes, limits_of
from konkanivani.models.whisper.export import WrittenFolder, locate_base, named_as_in_files, other_base, write_copy

KIND = "t5"
RATE = 1e-4
LORA_RATE = 1e-3  # high, since LoRA's products start at zero
# The embedding may have some rows more than there are pieces: 100 sentinels, and padding to a multiple of 128.
MAX_SPARE_ROWS = 256


@dataclass(frozen=True)
class PretrainedT5(PretrainedFolder[T5Folder]):
    """T5 model in a folder; implements `Pretrained`."""

    def settled(self, config: PretrainedConfig) -> PretrainedConfig:
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
                codec = Pieces((self.path / PIECES).read_bytes(), tokens)
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
