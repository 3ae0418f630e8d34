"""The forward pass that training and evaluation share: waveforms in, hidden states and summed losses out."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.base.lengths import CHUNK_FRAMES
from konkanivani.data.batch import Batch, order_for_concurrency, split_batch
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.recovery import Cut
from konkanivani.memory.weights.placement import PlacedWeights
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import ASROutput, KonkaniVaniASR
from konkanivani.model.blocks import BlockRunner
from konkanivani.model.front_end import FeatureExtractor
from konkanivani.model.losses import LossSums, Objective


@dataclass(frozen=True)
class ForwardPass:
    """Model and front end on one device, in one precision; `amp_dtype` is None in full precision.

    `recompute` says how the blocks are run, by the seconds of a batch's longest utterance. What is longer than
    `chunk_frames` encoder frames or tokens is run in chunks of as many, with the same result. In training `at_once`
    micro-batches are run side by side.
    """

    architecture: Architecture
    model: KonkaniVaniASR
    front_end: FeatureExtractor
    recompute: Callable[[float], BlockRunner]
    monitor: MemoryMonitor
    device: torch.device
    amp_dtype: torch.dtype | None
    objective: Objective
    weights: PlacedWeights | None = None
    """Where they lie and how they are brought; None: on the device."""
    chunk_frames: int = CHUNK_FRAMES
    at_once: int = 1

    def __call__(self, batch: Batch) -> tuple[ASROutput, LossSums]:
        """The model's output for a batch, and its summed losses, all on the device."""
        batch = batch.to(self.device)
        features, feature_lengths = self.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        with self.autocast():
            run_block = self.recompute(batch.longest_seconds)
            run_block = self.weights.around(run_block) if self.weights else run_block
            output = self.model(features, feature_lengths, batch.decoder_tokens, run_block, self.chunk_frames)
            return output, self.model.loss_sums(output, batch, self.objective, self.chunk_frames)

    def cut(self, micro_batches: tuple[Batch, ...]) -> Cut:
        """These micro-batches run as this forward pass runs them; one alone is halved where two are to run."""
        if self.at_once > 1 and len(micro_batches) == 1 and micro_batches[0].size > 1:
            micro_batches = split_batch(micro_batches[0])
        at_once = max(1, min(self.at_once, len(micro_batches)))
        in_order = order_for_concurrency(micro_batches, at_once)
        return Cut(in_order, self.recompute == RecomputePolicy("always"), self.chunk_frames, at_once)

    def run_as(self, cut: Cut) -> "ForwardPass":
        """The same forward pass with as much recomputed and in as small chunks as the cut says."""
        recompute = RecomputePolicy("always") if cut.recomputes_all else self.recompute
        return dataclasses.replace(self, recompute=recompute, chunk_frames=cut.chunk_frames)

    def refresh_weights(self) -> None:
        """Takes over what the optimizer has made of them, before each window and before anything is recognised."""
        if self.weights:
            self.weights.refresh()

    def weights_at_hand(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, recognition waits for no weight that each token needs. Without gradients."""
        return self.weights.at_hand(self.model) if self.weights else contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision in which the model runs.

        Without autocast's cache of weights in half precision: a forward pass uses each weight once (a head's
        once a chunk), and the cache would hold all of them until its end, two bytes a parameter, where recomputing
        keeps nothing else.
        """
        enabled = self.amp_dtype is not None
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled, cache_enabled=False)
