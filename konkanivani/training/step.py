"""ONE optimizer step: window -> micro-batches -> gradients -> clip -> update."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from konkanivani.config import LossConfig, OptimizerConfig
from konkanivani.data.batch import Batch, Window
from konkanivani.losses import LossCounts, LossSums, joint_loss, loss_sums
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.model.asr import ASROutput, KonkaniVaniASR
from konkanivani.optimizer import learning_rate, set_learning_rate
from konkanivani.randomness import seed_step


class FeatureExtractor(Protocol):
    """The front end: waveforms (B, S), sample_lengths (B,), seeds -> features (B, T, F), feature_lengths (B,)."""

    def __call__(
        self, waveforms: torch.Tensor, sample_lengths: torch.Tensor, augment_seeds: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class StepParts:
    """Everything that a step works with; `amp_dtype` is None in full precision."""

    model: KonkaniVaniASR
    front_end: FeatureExtractor
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    recompute: RecomputePolicy
    monitor: MemoryMonitor
    device: torch.device
    amp_dtype: torch.dtype | None
    loss: LossConfig
    schedule: OptimizerConfig
    total_steps: int
    seed: int


@dataclass(frozen=True)
class StepReport:
    """What a step did; losses in nats a token over the window. A skipped step has changed no weight."""

    loss: float
    ctc_loss: float
    attention_loss: float
    gradient_norm: float
    learning_rate: float
    scale: float
    is_skipped: bool


def autocast(parts: StepParts) -> contextlib.AbstractContextManager:
    """The precision in which the model runs."""
    return torch.autocast(parts.device.type, dtype=parts.amp_dtype, enabled=parts.amp_dtype is not None)


def forward(parts: StepParts, batch: Batch) -> tuple[ASROutput, LossSums]:
    """The model's output for a batch that lies on the device, and its summed losses."""
    features, feature_lengths = parts.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
    with autocast(parts):
        output = parts.model(features, feature_lengths, batch.decoder_tokens, parts.recompute)
    sums = loss_sums(
        output.ctc_logits,
        output.attention_logits,
        output.encoded_lengths,
        batch.tokens,
        batch.token_lengths,
        batch.targets,
        parts.loss,
    )
    return output, sums


def train_step(
    parts: StepParts, window: Window, step: int, is_interrupted: Callable[[], bool] = lambda: False
) -> StepReport | None:
    """Updates the weights from one window, or, interrupted between two micro-batches, changes nothing and returns None.

    The losses are divided by the counts of the whole window, so the gradient does not depend on how it is cut.
    """
    seed_step(parts.seed, step)
    parts.model.train()
    parts.optimizer.zero_grad(set_to_none=True)
    counts = LossCounts(window.tokens, window.utterances)
    totals = torch.zeros(2, dtype=torch.float64, device=parts.device)
    for batch in window.micro_batches:
        if is_interrupted():
            parts.optimizer.zero_grad(set_to_none=True)
            return None
        sums = add_gradients(parts, batch, counts)
        totals += torch.stack([sums.ctc.detach(), sums.attention.detach()])
        parts.monitor.tend_cache()
    return update(parts, totals, counts, step)


def add_gradients(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Adds one micro-batch's share of the window's gradient, scaled, to the parameters' `.grad`."""
    _, sums = forward(parts, batch.to(parts.device))
    parts.monitor.end_phase("forward")
    parts.scaler.scale(joint_loss(sums, counts, parts.loss.ctc_weight)).backward()
    parts.monitor.end_phase("backward")
    return sums


def update(parts: StepParts, totals: torch.Tensor, counts: LossCounts, step: int) -> StepReport:
    """Unscales, clips, checks and applies the window's gradient; where it is not finite, nothing is applied."""
    parts.scaler.unscale_(parts.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parts.model.parameters(), parts.schedule.max_grad_norm)
    # The step's only read from the device.
    ctc_sum, attention_sum, gradient_norm = torch.cat([totals, norm.detach().double()[None]]).tolist()
    is_finite = math.isfinite(gradient_norm) and math.isfinite(ctc_sum + attention_sum)
    rate = learning_rate(parts.schedule, step, parts.total_steps)
    if is_finite:
        set_learning_rate(parts.optimizer, rate)
        parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    parts.scaler.update()
    parts.monitor.end_phase("update")
    ctc_loss, attention_loss = ctc_sum / counts.tokens, attention_sum / (counts.tokens + counts.utterances)
    return StepReport(
        loss=parts.loss.ctc_weight * ctc_loss + (1 - parts.loss.ctc_weight) * attention_loss,
        ctc_loss=ctc_loss,
        attention_loss=attention_loss,
        gradient_norm=gradient_norm,
        learning_rate=rate,
        scale=parts.scaler.get_scale(),
        is_skipped=not is_finite,
    )
