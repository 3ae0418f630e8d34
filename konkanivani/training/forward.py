"""The forward pass that training and evaluation share: waveforms in, logits and summed losses out."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import LossConfig
from konkanivani.data.batch import Batch
from konkanivani.lengths import Lengths
from konkanivani.losses import LossSums, loss_sums
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.model.asr import ASROutput, KonkaniVaniASR
from konkanivani.model.blocks import BlockRunner


class FeatureExtractor(Protocol):
    """The front end: waveforms (B, S), their lengths, seeds -> features (B, T, F), their lengths."""

    def __call__(
        self, waveforms: torch.Tensor, sample_lengths: Lengths, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, Lengths]: ...


@dataclass(frozen=True)
class ForwardPass:
    """Model and front end on one device, in one precision; `amp_dtype` is None in full precision.

    `recompute` says how the blocks are run, by the seconds of a batch's longest utterance.
    """

    model: KonkaniVaniASR
    front_end: FeatureExtractor
    recompute: Callable[[float], BlockRunner]
    monitor: MemoryMonitor
    device: torch.device
    amp_dtype: torch.dtype | None
    loss: LossConfig

    def __call__(self, batch: Batch) -> tuple[ASROutput, LossSums]:
        """The model's output for a batch, and its summed losses, all on the device."""
        batch = batch.to(self.device)
        features, feature_lengths = self.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        with self.autocast():
            run_block = self.recompute(batch.longest_seconds)
            output = self.model(features, feature_lengths, batch.decoder_tokens, run_block)
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
        """The precision in which the model runs.

        Without autocast's cache of weights in half precision: a forward pass uses each weight once, and the cache would
        hold all of them until its end, two bytes a parameter, where recomputing keeps nothing else.
        """
        enabled = self.amp_dtype is not None
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled, cache_enabled=False)
