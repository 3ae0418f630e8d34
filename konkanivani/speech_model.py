"""What hears: a model with its front end and tokenizer, of a checkpoint or of a bundle; nothing of its training.

B batch, S samples, T' encoder frames, D model width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from konkanivani.audio import MEL_BINS
from konkanivani.augment import FrontEnd
from konkanivani.checkpoint import Checkpoint, load_states
from konkanivani.errors import CheckpointError
from konkanivani.flags import config_from_text
from konkanivani.lengths import Lengths
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.blocks import run_directly
from konkanivani.text import Tokenizer


@dataclass(frozen=True)
class SpeechModel:
    """A model in evaluation mode on `device`, in full precision; trained on `longest_seconds` of audio at most.

    `digits` says how its transcripts were normalised, as a reference has to be that it is scored on.
    """

    model: KonkaniVaniASR
    front_end: FrontEnd
    tokenizer: Tokenizer
    device: torch.device
    longest_seconds: float
    digits: Literal["keep", "spell"]

    @torch.no_grad()
    def encode(self, waveforms: torch.Tensor, sample_lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """Waveforms (B, S) of 16 kHz with their lengths -> encoded (B, T', D) with theirs."""
        features, feature_lengths = self.front_end(waveforms.to(self.device), sample_lengths, None)
        return self.model.encoder(features, feature_lengths, run_directly)


def speech_model_of(checkpoint: Checkpoint, device: torch.device) -> SpeechModel:
    """The checkpoint's model on `device`; a CheckpointError where its weights do not fit."""
    config = config_from_text(checkpoint.config)
    model = KonkaniVaniASR(config.model, checkpoint.vocab_size, MEL_BINS)
    load_states(checkpoint, {"model": model})
    front_end = FrontEnd(config.augment).to(device)
    tokenizer = Tokenizer(checkpoint.tokenizer)
    longest_seconds, digits = float(config.data.max_duration), config.text.digits
    return SpeechModel(model.to(device).eval(), front_end, tokenizer, device, longest_seconds, digits)


def check_finite(name: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises a CheckpointError where a weight is not a finite number: such a model, called `name`, hears nothing."""
    for tensor_name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"The weights {tensor_name} of {name} are not finite numbers. Use another model.")
