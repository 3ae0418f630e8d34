"""Pretrained models as starting points of training runs, and their description in checkpoints."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from konkanivani.base.config import PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.base.distributed import full_tensor
from konkanivani.base.errors import CheckpointError, UsageError
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.inference.whisper.export import TunedWhisper
from konkanivani.inference.whisper.pretrained import KIND, read_pretrained_whisper, restored_shape
from konkanivani.model.architecture import Architecture, architecture_of
from konkanivani.model.whisper.architecture import WhisperArchitecture
from konkanivani.training.checkpoint.checkpoint import PRETRAINED_STATE, Checkpoint, model_weights


class Pretrained(Protocol):
    """A validated model folder; its weights are read only on request."""

    @property
    def path(self) -> Path:
        """Path of the folder."""

    def settled(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the settings with unset values replaced by the folder's."""

    def architecture(self, tuning: TuningConfig, config: PretrainedConfig) -> Architecture:
        """Return the model architecture; raise a UsageError if it does not support `tuning`."""

    def vocabulary(self, config: PretrainedConfig) -> Vocabulary:
        """Return the tokenizer for the language and task of `config`; raise a UsageError if one is not supported."""

    def check_weights(self) -> None:
        """Read all weights without keeping them; raise a CheckpointError if some are not finite numbers."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return fp32 weights under this project's names; raise a CheckpointError if some are not finite."""

    def each_weight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of `weights` one by one, so that they are never in host memory together."""

    def learning_rate(self, tuning: TuningConfig) -> float:
        """Return a peak learning rate that suits the model size."""

    def description(self) -> Mapping[str, object]:
        """Return the values that a checkpoint stores to rebuild the architecture."""


@dataclass(frozen=True)
class Origin:
    """Description of the pretrained model of a run, as stored in its checkpoints; stateful and constant.

    `frozen` is the SHA-256 of the frozen weights. Checkpoints do not contain them; they are read from the folder
    `path`.
    """

    description: Mapping[str, object]
    frozen: str
    path: Path | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the description and the digest, which are numbers and strings."""
        return {**self.description, "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise a CheckpointError if the resumed run was started from another model."""
        if dict(state) != self.state_dict():
            where = f"--pretrained {self.path} is" if self.path else "That is"
            raise CheckpointError(
                f"The run was started from another model: {where} of a different shape, or has other frozen "
                "weights. Use the folder that the run was started from, or start a new run in another "
                "--checkpoint_dir."
            )


def read_pretrained(path: str | Path) -> Pretrained:
    """Return the pretrained model in a folder, with its list of files checked."""
    return read_pretrained_whisper(Path(path))


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, shapes and bytes of the weights, as fp32 on the CPU and sorted by name.

    Collective if weights are sharded: they are gathered one by one, so that the digest does not depend on the world
    size.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        # Hash in fp32, so that the digest does not depend on the dtype of an equal tensor.
        weight = full_tensor(weights[name].detach()).to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        # NumPy has no bfloat16, but every dtype can be viewed as bytes.
        digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def restored_architecture(checkpoint: Checkpoint, config: TrainConfig) -> Architecture:
    """Return the architecture of a checkpoint's model; raise a CheckpointError if its description is invalid."""
    state = checkpoint.states.get(PRETRAINED_STATE)
    if state is None:
        return architecture_of(config, checkpoint.vocab_size)
    if state.get("kind") != KIND:
        raise CheckpointError("The checkpoint has an unknown model type. Use a newer version.")
    # Without this digest a wrong folder would be combined with the trained weights unnoticed.
    if type(state.get("frozen")) is not str:
        raise CheckpointError("The checkpoint does not record the weights that it omits. Use another checkpoint.")
    return WhisperArchitecture(restored_shape(state), config.tuning, config.pretrained.audio_context or "window")


def tuned_whisper(checkpoint: Checkpoint, config: TrainConfig) -> TunedWhisper:
    """Return a checkpoint's fine-tuned model for export; raise a UsageError if its run did not use `--pretrained`."""
    architecture = restored_architecture(checkpoint, config)
    if not isinstance(architecture, WhisperArchitecture):
        raise UsageError("The checkpoint is not of a --pretrained model: export it with --bundle, --onnx or --int8.")
    weights = whole_weights(checkpoint, config, architecture.build_without_values().state_dict())
    return TunedWhisper(config, architecture, weights, checkpoint.tokenizer)


def whole_weights(
    checkpoint: Checkpoint, config: TrainConfig, like: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the checkpoint's weights, completed with frozen weights from the pretrained folder of its run.

    Args:
        like: tensors of the whole model. Those missing from the checkpoint are read from the folder.

    Raises a CheckpointError if the folder does not exist or contains other weights.
    """
    found = model_weights(checkpoint)
    missing = set(like) - set(found)
    if not missing or PRETRAINED_STATE not in checkpoint.states:
        return found
    check_base_is_there(config, "Put it there, or use the working folder in which the run was started")
    pretrained = read_pretrained(config.pretrained.pretrained or "")
    base = pretrained.weights()
    # The run kept its frozen weights in the model's dtype: round in the same way, or the digest differs.
    rest = {name: base[name].to(like[name].dtype) for name in missing if name in base}
    if digest_of(rest) != checkpoint.states[PRETRAINED_STATE].get("frozen"):
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {pretrained.path} is not the "
            "one that the run was started from. Restore the original folder."
        )
    return {**rest, **found}


def check_base_is_there(config: TrainConfig, advice: str) -> None:
    """Raise a CheckpointError, which ends with `advice`, if the pretrained folder of the run does not exist."""
    path = config.pretrained.pretrained
    if path is None or not Path(path).is_dir():
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {path} with the rest of the "
            f"model does not exist. {advice}."
        )
