"""Families of pretrained models: which one a folder or a checkpoint holds."""

from collections.abc import Mapping
from pathlib import Path

from konkanivani.config import PretrainedConfig, TuningConfig
from konkanivani.errors import CheckpointError
from konkanivani.models.t5 import export as t5
from konkanivani.models.t5 import vocabulary as t5_tokens
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.folder import MODEL_TYPES, read_t5_architecture
from konkanivani.models.whisper import export as whisper
from konkanivani.models.whisper import vocabulary as whisper_tokens
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.folder import CONFIG, read_json, read_whisper_architecture

PretrainedModel = whisper.PretrainedWhisper | t5.PretrainedT5
PretrainedArchitecture = WhisperArchitecture | T5Architecture


def is_t5_folder(path: Path) -> bool:
    """Return whether a folder's config.json is of a T5 model; all other folders are left to Whisper's reader."""
    return (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") in MODEL_TYPES


def read_pretrained_model(path: Path) -> PretrainedModel:
    """Return the model in a folder, with its settings and list of tensors checked."""
    return t5.read_pretrained_t5(path) if is_t5_folder(path) else whisper.read_pretrained_whisper(path)


def read_architecture(path: Path) -> PretrainedArchitecture:
    """Return the architecture of a folder's config.json, the only file needed."""
    return read_t5_architecture(path) if is_t5_folder(path) else read_whisper_architecture(path)


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
