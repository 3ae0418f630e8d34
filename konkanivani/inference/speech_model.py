"""Speech model for inference: network, front end and tokenizer of a checkpoint, bundle or pretrained folder.

B batch, S samples, T' encoder frames, D model dimension.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from konkanivani.base.config import AugmentConfig, PretrainedConfig, TrainConfig, TuningConfig
from konkanivani.base.errors import CheckpointError, DataError, UsageError
from konkanivani.base.flags import config_from_text
from konkanivani.base.lengths import Lengths
from konkanivani.base.rules import check_config
from konkanivani.data.text import Tokenizer
from konkanivani.data.vocabulary import Vocabulary
from konkanivani.inference.pretrained import Pretrained, restored_architecture, whole_weights
from konkanivani.inference.provenance import Provenance, read_provenance
from konkanivani.inference.whisper.vocabulary import vocabulary_of
from konkanivani.model.architecture import Architecture, is_within_bounds
from konkanivani.model.asr import SkipInit, SpeechNetwork
from konkanivani.model.front_end import FeatureExtractor
from konkanivani.model.kernels.passes import optimize
from konkanivani.training.checkpoint.checkpoint import PRETRAINED_STATE, Checkpoint, load_states


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
        return self.model.encoder(features, feature_lengths)


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


def build_pretrained_model(pretrained: Pretrained, asked: PretrainedConfig, device: torch.device) -> SpeechModel:
    """Return the model of a pretrained folder on `device`, unchanged."""
    # `knows_times` stays False: a fine-tuned model may have been trained without timestamps, and its folder does not
    # say so.
    architecture = pretrained.architecture(TuningConfig(), asked)
    tokenizer = pretrained.vocabulary(asked)
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
    if not is_within_bounds(dimensions) or not has_all:
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
    # Only runs from a pretrained Whisper model have this state.
    is_pretrained = PRETRAINED_STATE in checkpoint.states
    tokenizer: Vocabulary
    try:
        tokenizer = vocabulary_of(checkpoint.tokenizer) if is_pretrained else Tokenizer(checkpoint.tokenizer)
    except DataError as error:
        raise CheckpointError(f"The checkpoint's tokenizer cannot be used: {error} Use another checkpoint.") from None
    if tokenizer.size != checkpoint.vocab_size:
        raise CheckpointError(
            f"The checkpoint's tokenizer has {tokenizer.size} tokens but its model {checkpoint.vocab_size}. "
            "Use another checkpoint."
        )
    return tokenizer
