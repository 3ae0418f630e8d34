"""ONE optimizer step: window -> micro-batches -> gradients -> clip -> update."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from konkanivani.config import OptimizerConfig
from konkanivani.data.batch import Batch, Window
from konkanivani.losses import LossCounts, LossSums, joint_loss
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.optimizer import learning_rate, set_learning_rate
from konkanivani.randomness import seed_step
from konkanivani.training.forward import ForwardPass


@dataclass(frozen=True)
class StepParts:
    """Everything that a step works with."""

    forward: ForwardPass
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    schedule: OptimizerConfig
    total_steps: int
    seed: int
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
    """The step's only read from the device; a trace, whose tensors hold no numbers, puts zeros in its place."""

    @property
    def model(self) -> KonkaniVaniASR:
        """The model that is trained."""
        return self.forward.model


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
    totals = torch.zeros(2, dtype=torch.float64, device=parts.forward.device)
    for batch in window.micro_batches:
        if is_interrupted():
            parts.optimizer.zero_grad(set_to_none=True)
            return None
        sums = add_gradients(parts, batch, counts)
        totals += torch.stack([sums.ctc.detach(), sums.attention.detach()])
        parts.forward.monitor.tend_cache()
    return update(parts, totals, counts, step)


def add_gradients(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Adds one micro-batch's share of the window's gradient, scaled, to the parameters' `.grad`."""
    _, sums = parts.forward(batch)
    parts.forward.monitor.end_phase("forward")
    parts.scaler.scale(joint_loss(sums, counts, parts.forward.loss.ctc_weight)).backward()
    parts.forward.monitor.end_phase("backward")
    return sums


def update(parts: StepParts, totals: torch.Tensor, counts: LossCounts, step: int) -> StepReport:
    """Unscales, clips, checks and applies the window's gradient; where it is not finite, nothing is applied."""
    parts.scaler.unscale_(parts.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parts.model.parameters(), parts.schedule.max_grad_norm)
    ctc_sum, attention_sum, gradient_norm = parts.read(torch.cat([totals, norm.detach().double()[None]]))
    is_finite = math.isfinite(gradient_norm) and math.isfinite(ctc_sum + attention_sum)
    rate = learning_rate(parts.schedule, step, parts.total_steps)
    if is_finite:
        set_learning_rate(parts.optimizer, rate)
        parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    parts.scaler.update()
    parts.forward.monitor.end_phase("update")
    ctc_loss, attention_loss = ctc_sum / counts.tokens, attention_sum / (counts.tokens + counts.utterances)
    ctc_weight = parts.forward.loss.ctc_weight
    return StepReport(
        loss=ctc_weight * ctc_loss + (1 - ctc_weight) * attention_loss,
        ctc_loss=ctc_loss,
        attention_loss=attention_loss,
        gradient_norm=gradient_norm,
        learning_rate=rate,
        scale=parts.scaler.get_scale(),
        is_skipped=not is_finite,
    )
