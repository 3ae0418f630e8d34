"""ONE optimizer step: window -> micro-batches -> gradients -> agree -> sum over ranks -> clip -> update.

Where memory runs out before the update, all of it is done again in smaller micro-batches; the update needs none.
Ranks agree that all have their share of the gradient before they sum it: one that ran out of memory inside of a sum
would leave the others waiting in it.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch

from konkanivani.base.config import OptimizerConfig
from konkanivani.base.distributed import ALONE, Topology, agree, bucket_for, gather, losing_ranks, sum_tensors
from konkanivani.base.lengths import SAMPLE_RATE
from konkanivani.base.randomness import masks_of, seed_of, seed_step
from konkanivani.data.batch import Batch, Speech, Window, collate
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.recovery import Cut, Outcome, RememberedSplits, run_or_end, run_or_split
from konkanivani.model.asr import KonkaniVaniASR
from konkanivani.model.losses import LossCounts, LossSums, joint_loss
from konkanivani.training.concurrent import in_lanes
from konkanivani.training.forward import ForwardPass
from konkanivani.training.optimizer import AdamW, learning_rate, set_learning_rate
from konkanivani.training.sharding import is_sharded, plain


@dataclass(frozen=True)
class StepParts:
    """Everything that a step works with."""

    forward: ForwardPass
    optimizer: AdamW
    scaler: torch.amp.GradScaler
    schedule: OptimizerConfig
    total_steps: int
    seed: int
    splits: RememberedSplits
    topology: Topology = ALONE
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
    """The step's only read from the device; a trace, whose tensors hold no numbers, puts zeros in its place."""

    @property
    def model(self) -> KonkaniVaniASR:
        """The model that is trained."""
        return self.forward.model

    def state_tensors(self) -> list[torch.Tensor]:
        """What stays in memory from step to step: weights, buffers, the front end's, the optimizer's state."""
        front_end = self.forward.front_end
        buffers = list(front_end.buffers()) if isinstance(front_end, torch.nn.Module) else []
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *buffers, *moments]


@dataclass(frozen=True)
class WindowGradient:
    """The window's summed losses in nats and the norm of its gradient, which lies clipped in each `.grad`.

    `scale` is what the losses were multiplied by for the backward pass, and the gradient divided by since.
    """

    ctc_sum: float
    attention_sum: float
    norm: float
    scale: float

    @property
    def is_finite(self) -> bool:
        """Whether it can be applied."""
        return math.isfinite(self.norm) and math.isfinite(self.ctc_sum + self.attention_sum)


@dataclass(frozen=True)
class GradientShare:
    """One rank's summed losses (2,), and the bucket in which its gradient, in each `.grad`, is to be summed."""

    totals: torch.Tensor
    bucket: torch.Tensor


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

    All but the update is done inside of `breaking_off`: until then no weight has changed.

    The losses are divided by the counts of the whole window, so the gradient does not depend on how it is cut and
    dealt, and out of memory it is cut smaller. A ResourceError names an utterance that does not fit even alone.
    """
    counts = LossCounts(window.tokens, window.utterances)
    if is_sharded(parts.model):
        return update(parts, compute_in_step(parts, window, counts, step), counts, step, splits=0)
    attempt = compute_gradient if parts.topology.is_alone else compute_share
    with breaking_off():
        found, splits = run_or_split(
            attempt=lambda cut: attempt(parts, cut, counts, step, is_interrupted),
            cut=parts.forward.cut(window.micro_batches),
            splits=parts.splits,
            undo=lambda: drop_gradient(parts),
            agree=lambda outcome: Outcome(agree(parts.topology, outcome)),
        )
    if splits:
        for sizes in gather(parts.topology, parts.splits.sizes()):
            parts.splits.learn(sizes)
    if found is None:
        return None
    gradient = sum_shares(parts, found) if isinstance(found, GradientShare) else found
    return update(parts, gradient, counts, step, splits)


def compute_gradient(
    parts: StepParts, cut: Cut, counts: LossCounts, step: int, is_interrupted: Callable[[], bool]
) -> WindowGradient | None:
    """The window's gradient, unscaled and clipped, in the parameters' `.grad`; None, and none there, if interrupted."""
    totals = add_up(parts, cut, counts, step, is_interrupted)
    return None if totals is None else finish_gradient(parts, totals)


def compute_share(
    parts: StepParts, cut: Cut, counts: LossCounts, step: int, is_interrupted: Callable[[], bool]
) -> GradientShare | None:
    """This rank's share of the gradient, still scaled, in every parameter's `.grad`; None if interrupted.

    With the room in which it will be summed over ranks: whoever has it has all the memory that the step needs.
    """
    totals = add_up(parts, cut, counts, step, is_interrupted)
    if totals is None:
        return None
    if not cut.micro_batches:  # a rank that was dealt nothing
        parts.scaler.scale(totals)  # only this makes the scale exist
        for parameter in parts.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parts.model.parameters()]
    return GradientShare(totals, bucket_for(gradients))


def sum_shares(parts: StepParts, share: GradientShare) -> WindowGradient:
    """The window's gradient, unscaled and clipped, in the parameters' `.grad`: the sum of all ranks' shares."""
    sum_tensors(parts.topology, [parameter.grad for parameter in parts.model.parameters()], share.bucket)
    sum_tensors(parts.topology, [share.totals], share.totals)
    return finish_gradient(parts, share.totals)


def compute_in_step(parts: StepParts, window: Window, counts: LossCounts, step: int) -> WindowGradient:
    """The window's gradient, unscaled and clipped, in the `.grad` of parameters that are dealt to the ranks.

    A rank that runs out of memory leaves the others inside of a sum, so it ends, and they with it: DidNotFit, with what
    did not fit remembered. A ResourceError names an utterance that does not fit even alone.
    """
    cut = parts.splits.cut_to_fit(parts.forward.cut(window.micro_batches))
    passes = agree(parts.topology, max(1, len(cut.micro_batches)))
    # A pass too few would leave the others waiting for this rank's part of the weights.
    still = (silence(parts.model),) * (passes - len(cut.micro_batches))

    def attempt(cut: Cut) -> torch.Tensor:
        totals = add_up(parts, cut, counts, step, lambda: False)
        for batch in still:
            add_gradients(parts, batch, LossCounts(math.inf, math.inf))  # which makes of any loss a zero
        return totals

    with losing_ranks():
        totals = run_or_end(attempt, cut, parts.splits)
        sum_tensors(parts.topology, [totals], totals)
        return finish_gradient(parts, totals)


def silence(model: KonkaniVaniASR) -> Batch:
    """The smallest batch that the model takes: half a second of nothing, and one token."""
    waveform = torch.zeros(SAMPLE_RATE // 2, dtype=next(model.parameters()).dtype)
    return collate([Speech("silence", waveform, [1], None)], start=1, end=1)


def add_up(
    parts: StepParts, cut: Cut, counts: LossCounts, step: int, is_interrupted: Callable[[], bool]
) -> torch.Tensor | None:
    """The micro-batches' summed losses (2,), CTC and attention; their gradients, scaled, in the parameters' `.grad`.

    None, and none there, if interrupted.
    """
    seed_step(parts.seed, step, parts.topology.rank)
    parts.model.train()
    parts.optimizer.zero_grad()
    parts = dataclasses.replace(parts, forward=parts.forward.run_as(cut))
    totals = torch.zeros(2, dtype=torch.float64, device=parts.forward.device)
    seed = torch.initial_seed()

    def work(number: int, batch: Batch) -> LossSums:
        if parts.forward.device.type != "cpu":  # dropout draws from the device's own generator
            return add_gradients(parts, batch, counts)
        with masks_of(seed_of(seed, number)):
            return add_gradients(parts, batch, counts)

    with closing(in_lanes(cut.at_once, work, cut.micro_batches, parts.model.parameters())) as results:
        for _ in cut.micro_batches:
            if is_interrupted():
                results.close()
                parts.optimizer.zero_grad()
                return None
            sums = next(results)
            totals += torch.stack([sums.ctc, sums.attention])
            parts.forward.monitor.tend_cache()
    return totals


def finish_gradient(parts: StepParts, totals: torch.Tensor) -> WindowGradient:
    """The gradient in the parameters' `.grad`, unscaled and clipped, of a window of these summed losses (2,)."""
    parts.scaler.unscale_(parts.optimizer)
    norm = plain(torch.nn.utils.clip_grad_norm_(parts.model.parameters(), parts.schedule.max_grad_norm))
    scale = parts.scaler.scale(torch.ones_like(norm))  # get_scale() would wait for the device once more
    return WindowGradient(*parts.read(torch.cat([totals, torch.stack([norm.detach(), scale]).double()])))


def recomputing(parts: StepParts, policy: RecomputePolicy) -> StepParts:
    """The same step under another policy of what is recomputed in the backward pass."""
    return dataclasses.replace(parts, forward=dataclasses.replace(parts.forward, recompute=policy))


def add_gradients(parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
    """Adds one micro-batch's share of the window's gradient, scaled, to the parameters' `.grad`.

    The sums that it returns hold nothing of the graph, which would else live on through the next micro-batch.
    """
    _, sums = parts.forward(batch)
    parts.forward.monitor.end_phase("forward")
    parts.scaler.scale(joint_loss(sums, counts, parts.forward.loss.ctc_weight)).backward()
    parts.forward.monitor.end_phase("backward")
    return LossSums(sums.ctc.detach(), sums.attention.detach())


def drop_gradient(parts: StepParts) -> None:
    """Takes back a gradient that was not finished: a part of it would count twice."""
    parts.optimizer.zero_grad()
    if parts.scaler.is_enabled():
        # Set to what it is, the scale forgets that a gradient was unscaled; only scale() makes it exist.
        parts.scaler.scale(torch.zeros((), device=parts.forward.device))
        parts.scaler.update(parts.scaler.get_scale())


def update(parts: StepParts, gradient: WindowGradient, counts: LossCounts, step: int, splits: int) -> StepReport:
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
        splits=splits,
    )
