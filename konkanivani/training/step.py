"""ONE optimizer step: window -> micro-batches -> forward -> backward -> gradient -> update.

Where memory runs out before the update, all of it is done again in smaller micro-batches; the update needs none.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from konkanivani.data.batch import Batch, Window
from konkanivani.model.losses import LossCounts, LossSums, joint_loss
from konkanivani.training.optimizer import learning_rate, set_learning_rate
from konkanivani.training.parts import StepParts, WindowGradient, counts_of


@dataclass(frozen=True)
class StepReport:
    """What a step did; losses in nats a token over the window. A skipped step has changed no weight.

    `scale` is that of its backward pass; `splits` counts how often it ran out of memory and was begun again.
    """

    loss: float
    ctc_loss: float
    attention_loss: float
    gradient_norm: float
    learning_rate: float
    scale: float
    is_skipped: bool
    splits: int


def train_step(
    parts: StepParts,
    window: Window,
    step: int,
    is_interrupted: Callable[[], bool] = lambda: False,
    breaking_off: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepReport | None:
    """Updates the weights from one window, or, interrupted between two micro-batches, changes nothing and returns None.

    All but the update is done inside of `breaking_off`: until then no weight has changed. A ResourceError names an
    utterance that does not fit in memory even alone.
    """
    with breaking_off():
        gradient = parts.gradient_of(parts, window, step, forward_and_backward, is_interrupted)
    return None if gradient is None else update(parts, gradient, counts_of(window), step)


def forward_and_backward(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Adds one micro-batch's portion of the window's gradient, scaled, to the parameters' `.grad`.

    The sums that it returns hold nothing of the graph, which would else live on through the next micro-batch.
    """
    _, sums = parts.forward(batch)
    parts.forward.monitor.end_phase("forward")
    parts.scaler.scale(joint_loss(sums, counts, parts.forward.loss.ctc_weight)).backward()
    parts.forward.monitor.end_phase("backward")
    return LossSums(sums.ctc.detach(), sums.attention.detach())


def update(parts: StepParts, gradient: WindowGradient, counts: LossCounts, step: int) -> StepReport:
    """Applies the window's gradient if it is finite. Allocates nothing (see optimizer.py): never half done."""
    rate = learning_rate(parts.schedule, step, parts.total_steps)
    if gradient.is_finite:
        set_learning_rate(parts.optimizer, rate)
        parts.optimizer.step()
    parts.optimizer.zero_grad()
    parts.scaler.update()
    parts.forward.monitor.end_phase("update")
    ctc_loss = gradient.ctc_sum / counts.tokens
    attention_loss = gradient.attention_sum / (counts.tokens + counts.utterances)
    ctc_weight = parts.forward.loss.ctc_weight
    return StepReport(
        loss=ctc_weight * ctc_loss + (1 - ctc_weight) * attention_loss,
        ctc_loss=ctc_loss,
        attention_loss=attention_loss,
        gradient_norm=gradient.norm,
        learning_rate=rate,
        scale=gradient.scale,
        is_skipped=not gradient.is_finite,
        splits=gradient.splits,
    )
