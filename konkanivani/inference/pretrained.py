"""A recogniser that others have trained: what a run begins with, and what its checkpoints keep of it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from konkanivani.base.config import PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.base.errors import CheckpointError, UsageError
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.inference.whisper.export import TunedWhisper
from konkanivani.inference.whisper.pretrained import KIND, read_pretrained_whisper, restored_shape
from konkanivani.model.architecture import Architecture, architecture_of
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.training.checkpoint.checkpoint import Checkpoint
from konkanivani.training.sharding import full_tensor

STATE = "pretrained"  # under which a checkpoint keeps an Origin


class Pretrained(Protocol):
    """A folder that has been checked; its weights are read when they are asked for."""

    path: Path

    def settled(self, config: PretrainedConfig) -> PretrainedConfig:
        """The settings with what its folder says where nobody says otherwise."""

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> Architecture:
        """Which recogniser it is; a UsageError where `tuning` asks for what it has not."""

    def vocabulary(self, config: PretrainedConfig) -> Vocabulary:
        """Its tokens, with what is asked of them; a UsageError where it has none for that."""

    def check_weights(self) -> None:
        """Reads its weights and keeps none; a CheckpointError where they are not numbers."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Its weights in fp32 by our names; a CheckpointError where they are not numbers."""

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same one by one, so that they are never all there."""

    def learning_rate(self, tuning: TuningConfig) -> float:
        """A peak that suits its size."""

    def description(self) -> Mapping[str, object]:
        """What a checkpoint keeps of it, to build its architecture again."""


@dataclass(frozen=True)
class Origin:
    """What checkpoints keep of the recogniser that a run began with; stateful, and never changed.

    `frozen` is the SHA-256 of what of it is not trained, which the folder at `path` holds and no checkpoint does.
    """

    description: Mapping[str, object]
    frozen: str
    path: Path | None = None

    def state_dict(self) -> dict[str, object]:
        """Numbers and words."""
        return {**self.description, "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises a CheckpointError where a run that began otherwise would go on."""
        if dict(state) != self.state_dict():
            where = f"--pretrained {self.path} is" if self.path else "That is"
            raise CheckpointError(
                f"The run was started from another model: {where} of a different shape, or has other frozen "
                "weights. Use the folder that the run was started from, or start a new run in another "
                "--checkpoint_dir."
            )


def read_pretrained(path: str | Path) -> Pretrained:
    """The recogniser in this folder, its list of files checked."""
    return read_pretrained_whisper(Path(path))


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 over names, shapes and bytes of fp32 weights, on the CPU, in the order of their names.

    Weights that are sharded over the ranks are gathered one by one, so that the digest is that of a world of one.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = full_tensor(weights[name].detach()).to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def restored_architecture(checkpoint: Checkpoint, config: TrainConfig) -> Architecture:
    """Which recogniser the checkpoint holds; a CheckpointError where it says so in no way that could be."""
    state = checkpoint.states.get(STATE)
    if state is None:
        return architecture_of(config, checkpoint.vocab_size)
    if state.get("kind") != KIND:
        raise CheckpointError("The checkpoint has an unknown model type. Use a newer version.")
    if type(state.get("frozen")) is not str:
        raise CheckpointError("The checkpoint does not record the weights that it omits. Use another checkpoint.")
    return WhisperArchitecture(restored_shape(state), config.tuning, config.pretrained.audio_context or "window")


def tuned_whisper(checkpoint: Checkpoint, config: TrainConfig) -> TunedWhisper:
    """What of a checkpoint is to be written as a folder; a UsageError where its run did not begin with one."""
    if STATE not in checkpoint.states:
        raise UsageError("The checkpoint is not of a --pretrained model: export it with --bundle, --onnx or --int8.")
    architecture = restored_architecture(checkpoint, config)
    weights = whole_weights(checkpoint, config, architecture.build_without_values().state_dict())
    return TunedWhisper(config, architecture, weights, checkpoint.tokenizer)


def whole_weights(
    checkpoint: Checkpoint, config: TrainConfig, like: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The checkpoint's weights, and those of `like` that it has not from the folder that its run began with.

    Those are rounded as the run has kept them. A CheckpointError where that folder is not there, or is another one.
    """
    found = checkpoint.states["model"]
    missing = set(like) - set(found)
    if not missing or STATE not in checkpoint.states:
        return found
    check_base_is_there(config, "Put it there, or use the working folder in which the run was started")
    pretrained = read_pretrained(config.pretrained.pretrained or "")
    base = pretrained.weights()
    rest = {name: base[name].to(like[name].dtype) for name in missing if name in base}
    if digest_of(rest) != checkpoint.states[STATE].get("frozen"):
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {pretrained.path} is not the "
            "one that the run was started from. Restore the original folder."
        )
    return {**rest, **found}


def check_base_is_there(config: TrainConfig, advice: str) -> None:
    """Raises a CheckpointError, which gives this advice, where the folder that a run began with is not there."""
    path = config.pretrained.pretrained
    if path is None or not Path(path).is_dir():
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {path} with the rest of the "
            f"model does not exist. {advice}."
        )
