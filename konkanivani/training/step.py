"""ONE optimizer step: window -> micro-batches -> forward -> backward -> gradient -> update.

Where memory runs out before the update, all of it is done again in smaller micro-batches; the update needs none.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from konkanivani.data.batch import Batch, Window
from konkanivani.model.losses import LossCounts, LossSums
from konkanivani.training.optimizer import begun_share, learning_rate, set_learning_rate
from konkanivani.training.parts import GradientTask, StepParts, WindowGradient, loss_counts


@dataclass(frozen=True)
class StepReport:
    """What a step did; losses in nats a token over the window, None where there is none. A skipped one changed nothing.

    `scale` is that of its backward pass; `splits` counts how often it ran out of memory and was begun again.
    """

    loss: float
    ctc_loss: float | None
    attention_loss: float | None
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
    with breaking_off(), parts.stage(step):
        gradient = parts.compute_gradient(GradientTask(parts, window, step, forward_and_backward, is_interrupted))
    return None if gradient is None else update(parts, gradient, loss_counts(window), step)


def forward_and_backward(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Adds one micro-batch's portion of the window's gradient, scaled, to the parameters' `.grad`.

    The sums that it returns hold nothing of the graph, which would else live on through the next micro-batch; and the
    output has no name here, which would hold what was encoded through the backward pass.
    """
    sums = parts.forward(batch)[1]
    parts.forward.monitor.end_phase("forward")
    parts.scaler.scale(parts.forward.objective.total(sums, counts)).backward()
    parts.forward.monitor.end_phase("backward")
    return tuple(summed.detach() for summed in sums)


def update(parts: StepParts, gradient: WindowGradient, counts: LossCounts, step: int) -> StepReport:
    """Applies the window's gradient if it is finite. Allocates nothing (see optimizer.py): never half done."""
    rate = learning_rate(parts.schedule, step, parts.total_steps)
    if gradient.is_finite:
        begun = begun_share(parts.schedule, parts.architecture.tuning, step, parts.total_steps)
        set_learning_rate(parts.optimizer, rate, begun)
        parts.optimizer.step()
    parts.optimizer.zero_grad()
    parts.scaler.update()
    parts.forward.monitor.end_phase("update")
    losses = parts.forward.objective.losses(gradient.loss_sums, counts)
    return StepReport(
        loss=losses.all,
        ctc_loss=losses.ctc,
        attention_loss=losses.attention,
        gradient_norm=gradient.norm,
        learning_rate=rate,
        scale=gradient.scale,
        is_skipped=not gradient.is_finite,
        splits=gradient.splits,
    )
