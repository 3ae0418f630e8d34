"""Source of the model that a run trains: its own settings, a pretrained folder (--pretrained), or a checkpoint."""

import dataclasses
from pathlib import Path

import torch

from konkanivani.base.config import AUTO, TrainConfig
from konkanivani.base.flags import CommandLine
from konkanivani.base.rules import with_values
from konkanivani.inference.pretrained import (
    Origin,
    Pretrained,
    check_base_is_there,
    digest_of,
    read_pretrained,
    restored_architecture,
)
from konkanivani.model.adapters import LOW_RANK_TENSORS
from konkanivani.model.architecture import Architecture, architecture_of
from konkanivani.model.whisper.folder import read_whisper_architecture
from konkanivani.training.checkpoint.checkpoint import PRETRAINED_STATE, Checkpoint


def begin_pretrained(config: TrainConfig) -> tuple[TrainConfig, Pretrained | None]:
    """Read the folder of --pretrained, if given, and return the settings completed by it (language, learning rate).

    Errors are raised here, before any folder is created: unsupported tuning, a missing language, unusable weights.
    """
    if config.pretrained.pretrained is None:
        return config, None
    pretrained = read_pretrained(config.pretrained.pretrained)
    config = dataclasses.replace(config, pretrained=pretrained.settled(config.pretrained))
    # Built on the meta device and discarded: raises a UsageError if the tuning flags do not fit the model.
    pretrained.architecture(config.tuning, config.pretrained).build_without_values()
    tokenizer = pretrained.vocabulary(config.pretrained)
    if config.pretrained.timestamp_share:
        # Raises a UsageError if the tokenizer has no timestamp tokens.
        tokenizer.encode_with_times("", 0.0, None)
    if config.pretrained.forgetting_language is not None:
        other = dataclasses.replace(config.pretrained, language=config.pretrained.forgetting_language)
        pretrained.vocabulary(other)
    # Reads all weights once and discards them: a damaged file is reported now, not after the data is prepared.
    pretrained.check_weights()
    if config.optimizer.learning_rate == AUTO:
        config = with_values(config, {"learning_rate": pretrained.learning_rate(config.tuning)})
    return config, pretrained


def resume_pretrained(asked: CommandLine, config: TrainConfig, checkpoint: Checkpoint) -> Pretrained | None:
    """Return the pretrained folder of a resumed run if needed: for frozen weights, or because --pretrained is given.

    Raises a CheckpointError if the folder is missing or holds another model.
    """
    if PRETRAINED_STATE not in checkpoint.states:
        return None
    if "pretrained" not in asked.explicit:
        # Without frozen weights the checkpoint is complete, and the folder is not needed.
        if not restored_architecture(checkpoint, config).has_base:
            return None
        check_base_is_there(config, "Put it there, or give its path with --pretrained")
    pretrained = read_pretrained(config.pretrained.pretrained or "")
    stored = checkpoint.states[PRETRAINED_STATE]
    # Checks the parts that are known so far; frozen weights are compared later.
    Origin(pretrained.description(), str(stored["frozen"]), pretrained.path).load_state_dict(stored)
    return pretrained


def load_base(pretrained: Pretrained, model: torch.nn.Module) -> None:
    """Load pretrained weights into a model of the same architecture; low-rank factors keep their initial values."""
    own = model.state_dict()
    missing = {name for name in own if not name.endswith(LOW_RANK_TENSORS)}
    # One weight at a time, so that the folder's weights are never in host memory all at once.
    for name, weight in pretrained.each_weight():
        own[name].copy_(weight)
        missing.remove(name)
    if missing:
        raise RuntimeError(f"the folder's weights do not match its architecture: {missing} are missing")


def make_origin(
    pretrained: Pretrained | None, resumed: Checkpoint | None, architecture: Architecture, model: torch.nn.Module
) -> Origin | None:
    """Return the provenance record for checkpoints, or None if the model is not pretrained.

    A collective call: the digest gathers sharded weights, so that all ranks have to call it.
    """
    if pretrained is None:
        stored = resumed.states.get(PRETRAINED_STATE) if resumed else None
        if stored is None:
            return None
        return Origin({name: value for name, value in stored.items() if name != "frozen"}, str(stored["frozen"]))
    # Checkpoints omit frozen weights; their digest shows on resume whether the folder still holds the same ones.
    named = model.named_parameters() if architecture.has_base else ()
    frozen = {name: weight for name, weight in named if not weight.requires_grad}
    return Origin(pretrained.description(), digest_of(frozen), pretrained.path)


def architecture_for(
    config: TrainConfig, vocab_size: int, pretrained: Pretrained | None = None, resumed: Checkpoint | None = None
) -> Architecture:
    """Return the architecture that a run trains; `vocab_size` is used only for a model trained from scratch."""
    if pretrained is not None:
        return pretrained.architecture(config.tuning, config.pretrained)
    return architecture_of(config, vocab_size) if resumed is None else restored_architecture(resumed, config)


def planned_architecture(config: TrainConfig) -> Architecture:
    """Return the architecture for these settings before a corpus is read; weights of a folder are not read."""
    if config.pretrained.pretrained is None:
        return architecture_of(config, config.text.vocab_size)
    read = read_whisper_architecture(Path(config.pretrained.pretrained))
    context = config.pretrained.audio_context or read.audio_context
    return dataclasses.replace(read, tuning=config.tuning, audio_context=context)
