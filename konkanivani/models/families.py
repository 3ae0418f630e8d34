"""Families of pretrained models: which one a folder or a checkpoint holds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from konkanivani.config import PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.models.architecture import Architecture
from konkanivani.models.model_files import CONFIG, read_json
from konkanivani.models.t5 import folder as t5
from konkanivani.models.t5 import vocabulary as t5_tokens
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.whisper import export as whisper
from konkanivani.models.whisper import vocabulary as whisper_tokens
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import read_whisper_architecture

PretrainedModel = whisper.PretrainedWhisper | t5.PretrainedT5
PretrainedArchitecture = WhisperArchitecture | T5Architecture
Tuned = whisper.TunedWhisper | t5.TunedT5


def is_t5_folder(path: Path) -> bool:
    """Return whether a folder's config.json is of a T5 model; all other folders are left to Whisper's reader."""
    return (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") in t5.MODEL_TYPES


def read_pretrained_model(path: Path) -> PretrainedModel:
    """Return the model in a folder, with its settings and list of tensors checked."""
    return t5.read_pretrained_t5(path) if is_t5_folder(path) else whisper.read_pretrained_whisper(path)


def read_architecture(path: Path) -> PretrainedArchitecture:
    """Return the architecture of a folder's config.json, the only file needed."""
    return t5.read_t5_architecture(path) if is_t5_folder(path) else read_whisper_architecture(path)


def restored_model(
    state: Mapping[str, object], tuning: TuningConfig, config: PretrainedConfig
) -> PretrainedArchitecture:
    """Return the architecture that a checkpoint describes; raise a CheckpointError if it is invalid."""
    if state.get("kind") == t5.KIND:
        return t5.restored_t5(state, tuning)
    if state.get("kind") != whisper.KIND:
        raise CheckpointError("The checkpoint has an unknown model type. Use a newer version.")
    return WhisperArchitecture(whisper.restored_shape(state), tuning, config.audio_context or "window")


def restored_vocabulary(
    state: Mapping[str, object], model: bytes
) -> whisper_tokens.PromptedVocabulary | t5_tokens.T5Vocabulary:
    """Return a checkpoint's tokenizer; raise a DataError if the bytes are invalid."""
    if state.get("kind") == t5.KIND:
        return t5_tokens.vocabulary_of(model)
    return whisper_tokens.vocabulary_of(model)


def tuned_of(
    config: TrainConfig, architecture: Architecture, weights: Mapping[str, torch.Tensor], tokenizer: bytes
) -> Tuned:
    """Return a fine-tuned model for export; raise a UsageError if it is of no family."""
    if isinstance(architecture, T5Architecture):
        return t5.TunedT5(config, architecture, weights, tokenizer)
    if isinstance(architecture, WhisperArchitecture):
        return whisper.TunedWhisper(config, architecture, weights, tokenizer)
    raise UsageError("The checkpoint is not of a --pretrained model: export it with --bundle, --onnx or --int8.")


@dataclass(frozen=True)
class FolderWriters:
    """Functions that write a fine-tuned model to a folder: whole, or its LoRA adapter; `note` is advice or None."""

    whole: Callable[[Path], whisper.WrittenFolder]
    adapter: Callable[[Path], None]
    note: str | None


def folder_writers(tuned: Tuned, folder: str | None, outputs: Iterable[Path]) -> FolderWriters:
    """Return the functions for a model whose base is the folder of its run, or `folder`, its copy.

    Raises a CheckpointError if the folder does not exist or has another model, and a UsageError if one of the `outputs`
    is inside it.
    """
    if isinstance(tuned, t5.TunedT5):
        base = t5.read_t5_base(tuned, folder, outputs)
        return FolderWriters(partial(t5.export_t5, tuned, base), partial(t5.export_t5_adapter, tuned, base), None)
    of_whisper = whisper.read_base(tuned, folder, outputs)
    return FolderWriters(
        partial(whisper.export_whisper, tuned, of_whisper),
        partial(whisper.export_adapter, tuned, of_whisper),
        tuned.note(),
    )
