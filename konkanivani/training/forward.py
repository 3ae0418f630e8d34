"""The forward pass that training and evaluation share: waveforms in, logits and summed losses out."""

import contextlib
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import LossConfig
from konkanivani.data.batch import Batch
from konkanivani.lengths import Lengths
from konkanivani.losses import LossSums, loss_sums
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.model.asr import ASROutput, KonkaniVaniASR


class FeatureExtractor(Protocol):
    """The front end: waveforms (B, S), their lengths, seeds -> features (B, T, F), their lengths."""

    def __call__(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]: ...


@dataclass(frozen=True)
class ForwardPass:
    """Model and front end on one device, in one precision; `amp_dtype` is None in full precision."""

    model: KonkaniVaniASR
    front_end: FeatureExtractor
    recompute: RecomputePolicy
    monitor: MemoryMonitor
    device: torch.device
    amp_dtype: torch.dtype | None
    loss: LossConfig

    def __call__(self, batch: Batch) -> tuple[ASROutput, LossSums]:
        """The model's output for a batch, and its summed losses, all on the device."""
        batch = batch.to(self.device)
        features, feature_lengths = self.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        with self.autocast():
            output = self.model(features, feature_lengths, batch.decoder_tokens, self.recompute)
        sums = loss_sums(
            output.ctc_logits,
            output.attention_logits,
            output.encoded_lengths,
            batch.tokens,
            batch.token_lengths,
            batch.targets,
            self.loss,
        )
        return output, sums

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision in which the model runs."""
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)
