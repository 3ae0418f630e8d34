"""Model for inference, from a checkpoint or a pretrained folder.

B batch, S samples, T' encoder frames, D model dimension.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from konkanivani.checkpoints.checkpoint import (
    PRETRAINED_STATE,
    Checkpoint,
    Provenance,
    load_states,
    model_weights,
    read_provenance,
)
from konkanivani.config import AugmentConfig, PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.data.text import Tokenizer, Vocabulary
from konkanivani.distributed import full_tensor
from konkanivani.errors import CheckpointError, DataError, UsageError
from konkanivani.flags import config_from_text
from konkanivani.hub import is_commit, is_hub_name
from konkanivani.lengths import SECONDS, Lengths
from konkanivani.models.architecture import Architecture, architecture_of, is_within_bounds
from konkanivani.models.asr import SkipInit, SpeechNetwork
from konkanivani.models.families import Tuned, read_pretrained_model, restored_model, restored_vocabulary, tuned_of
from konkanivani.models.front_end import FeatureExtractor
from konkanivani.models.hub import locate_model
from konkanivani.models.whisper.export import TunedWhisper
from konkanivani.ops.passes import optimize
from konkanivani.rules import check_config

# --------------------
# Pretrained models as starting points of training runs, and their description in checkpoints.


class Pretrained(Protocol):
    """A validated model folder; its weights are read only on request."""

    @property
    def path(self) -> Path:
        """Path of the folder."""

    def complete_settings(self, config: PretrainedConfig) -> PretrainedConfig:
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


def read_pretrained(path: str | Path, revision: str | None = None) -> Pretrained:
    """Return the pretrained model in a folder or on the hub, with its list of files checked.

    Args:
        revision: branch, tag or commit of a name on the hub.
    """
    return read_pretrained_model(locate_model(str(path), revision, "whisper").path)


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
    architecture = restored_model(state, config.tuning, config.pretrained)
    # Without this digest a wrong folder would be combined with the trained weights unnoticed.
    if type(state.get("frozen")) is not str:
        raise CheckpointError("The checkpoint does not record the weights that it omits. Use another checkpoint.")
    return architecture


def tuned_whisper(checkpoint: Checkpoint, config: TrainConfig) -> TunedWhisper:
    """Return a checkpoint's fine-tuned Whisper model for export; raise a UsageError if it is another model."""
    tuned = tuned_model(checkpoint, config)
    if not isinstance(tuned, TunedWhisper):
        raise UsageError("The checkpoint is of a T5 model: export it with --folder or --adapter.")
    return tuned


def tuned_model(checkpoint: Checkpoint, config: TrainConfig) -> Tuned:
    """Return a checkpoint's fine-tuned model for export; raise a UsageError if its run did not use `--pretrained`."""
    architecture = restored_architecture(checkpoint, config)
    weights = whole_weights(checkpoint, config, architecture.build_without_values().state_dict())
    return tuned_of(config, architecture, weights, checkpoint.tokenizer)


def whole_weights(
    checkpoint: Checkpoint, config: TrainConfig, like: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the checkpoint's weights, completed with frozen weights from the pretrained folder of its run.

    Args:
        like: tensors of the whole model. Those missing from the checkpoint are read from the folder.

    Raises a CheckpointError if the folder does not exist or contains other weights.
    """
    weights = model_weights(checkpoint)
    missing = set(like) - set(weights)
    if not missing or PRETRAINED_STATE not in checkpoint.states:
        return weights
    check_base_is_there(config, "Put it there, or use the working folder in which the run was started")
    pretrained = read_pretrained(config.pretrained.pretrained or "", config.pretrained.revision)
    base = pretrained.weights()
    # The run kept its frozen weights in the model's dtype: round in the same way, or the digest differs.
    rest = {name: base[name].to(like[name].dtype) for name in missing if name in base}
    if digest_of(rest) != checkpoint.states[PRETRAINED_STATE].get("frozen"):
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {pretrained.path} is not the "
            "one that the run was started from. Restore the original folder."
        )
    return {**rest, **weights}


def check_base_is_there(config: TrainConfig, advice: str) -> None:
    """Raise a CheckpointError, which ends with `advice`, if the pretrained folder of the run does not exist.

    A model on the hub is accepted here and located by `read_pretrained`.
    """
    path = config.pretrained.pretrained
    is_remote = path is not None and is_hub_name(path) and is_commit(config.pretrained.revision)
    if path is None or not (is_remote or Path(path).is_dir()):
        raise CheckpointError(
            f"The checkpoint contains only the trained weights, and the folder {path} with the rest of the "
            f"model does not exist. {advice}."
        )


# --------------------
# Speech model for inference: network, front end and tokenizer of a checkpoint, bundle or pretrained folder.


@dataclass(frozen=True)
class SpeechModel:
    """Model in evaluation mode on `device`, in full precision, without optimizer or training state.

    Args:
        longest_seconds: maximum duration of the training audio.
        digits: normalisation of digits in transcripts, which references need for scoring too.
        knows_times: whether the model was trained to predict timestamps.
    """

    architecture: Architecture
    model: SpeechNetwork
    front_end: FeatureExtractor
    tokenizer: Vocabulary
    device: torch.device
    longest_seconds: float
    digits: Literal["keep", "spell"]
    knows_times: bool = False
    provenance: Provenance | None = None

    @torch.no_grad()
    def encode(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Return encoded audio (B, T', D) and its lengths, for waveforms (B, S) at 16 kHz and their lengths."""
        features, feature_lengths = self.front_end(waveforms.to(self.device), sample_lengths, None)
        return self.model.encode(features, feature_lengths)

    def check_input(self) -> None:
        """Raise a UsageError if the model's input is text instead of speech."""
        if self.architecture.framing.unit != SECONDS:
            raise UsageError("The model turns text into text: give a recogniser, or use konkanivani correct.")


def build_speech_model(checkpoint: Checkpoint, device: torch.device) -> SpeechModel:
    """Return the checkpoint's model on `device`; raise a CheckpointError if its weights do not fit its settings."""
    config = settings_of_weights(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    trained = restored_architecture(checkpoint, config)
    as_trained = trained.build_without_values().state_dict()
    # Merge LoRA weights: inference runs the plain architecture.
    architecture, weights = trained.plain(whole_weights(checkpoint, config, as_trained))
    # The initial values would be overwritten at once.
    with SkipInit():
        model = architecture.build()
    optimize(model)
    front_end = architecture.build_front_end(config.augment).to(device)
    load_states(dataclasses.replace(checkpoint, states={"model": {**weights}}), {"model": model})
    longest_seconds = float(min(config.data.max_duration, architecture.longest_seconds))
    digits = config.text.digits
    times = config.pretrained.timestamp_share > 0
    source = read_provenance(checkpoint)
    return SpeechModel(
        architecture, model.to(device).eval(), front_end, tokenizer, device, longest_seconds, digits, times, source
    )


def build_pretrained_model(pretrained: Pretrained, settings: PretrainedConfig, device: torch.device) -> SpeechModel:
    """Return the model of a pretrained folder on `device`, unchanged."""
    # `knows_times` stays False: a fine-tuned model may have been trained without timestamps, and its folder does not
    # say so.
    architecture = pretrained.architecture(TuningConfig(), settings)
    tokenizer = pretrained.vocabulary(settings)
    model = architecture.build_without_values()
    # The model is on the meta device: assign the tensors instead of copying their values.
    model.load_state_dict(pretrained.weights(), assign=True)
    optimize(model)
    front_end = architecture.build_front_end(AugmentConfig()).to(device)
    longest = float(architecture.longest_seconds)
    return SpeechModel(architecture, model.to(device).eval(), front_end, tokenizer, device, longest, "keep")


def settings_of_weights(checkpoint: Checkpoint) -> TrainConfig:
    """Return the checkpoint's settings, checked against its weights and tokenizer.

    Raises a CheckpointError if the settings are invalid, or weights or tokenizer have other sizes.
    """
    config = config_from_text(checkpoint.config)
    try:
        check_config(config)
    except UsageError as error:
        raise CheckpointError(f"The checkpoint's settings are invalid. {error}") from None
    load_tokenizer(checkpoint)
    # Check that the last layers exist before building the model: even on the meta device, an absurd number of layers
    # would take all memory.
    weights = checkpoint.states.get("model", {})
    architecture = restored_architecture(checkpoint, config)
    dimensions = architecture.model
    counts = {"encoder": dimensions.encoder_layers, "decoder": dimensions.decoder_layers}
    layers = [f"{stack}.blocks.{count - 1}." for stack, count in counts.items() if count]
    has_all = architecture.has_base or all(any(n.startswith(last) for n in weights) for last in layers)
    # Restoring a pretrained model has checked each of its dimensions against its family's own bound: its vocabulary may
    # be larger than any dimension of this project's models (mT5 has 250,112 tokens).
    is_bounded = PRETRAINED_STATE in checkpoint.states or is_within_bounds(dimensions)
    if not is_bounded or not has_all:
        raise CheckpointError("The checkpoint's weights do not match its model dimensions. Use another checkpoint.")
    try:
        model = architecture.build_without_values()
    except UsageError as error:  # not an error of the user's flags
        raise CheckpointError(f"The checkpoint's settings are invalid. {error}") from None
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for name, tensor in model.state_dict().items():
        if architecture.has_base and name not in weights and name not in trained:
            continue  # frozen and stored in the pretrained folder only
        weight = weights.get(name)
        if not isinstance(weight, torch.Tensor) or weight.shape != tensor.shape:
            raise CheckpointError(
                f"The checkpoint's model cannot be loaded: the shape of {name} does not match its settings. "
                "Use another checkpoint."
            )
    return config


def load_tokenizer(checkpoint: Checkpoint) -> Vocabulary:
    """Return the checkpoint's tokenizer; raise a CheckpointError if it is invalid or does not fit the weights."""
    # Only runs from a pretrained model have this state.
    pretrained = checkpoint.states.get(PRETRAINED_STATE)
    tokenizer: Vocabulary
    try:
        if pretrained is None:
            tokenizer = Tokenizer(checkpoint.tokenizer)
        else:
            tokenizer = restored_vocabulary(pretrained, checkpoint.tokenizer)
    except DataError as error:
        raise CheckpointError(f"The checkpoint's tokenizer cannot be used: {error} Use another checkpoint.") from None
    if tokenizer.size != checkpoint.vocab_size:
        raise CheckpointError(
            f"The checkpoint's tokenizer has {tokenizer.size} tokens but its model {checkpoint.vocab_size}. "
            "Use another checkpoint."
        )
    return tokenizer
