"""ONE optimizer step: window -> micro-batches -> forward -> backward -> gradient -> update; and what it works with.

Evaluation shares its forward pass: waveforms in, hidden states and summed losses out.

Where memory runs out before the update, all of it is done again in smaller micro-batches; the update needs none.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from konkanivani.base.config import OptimizerConfig
from konkanivani.base.distributed import ALONE, Topology
from konkanivani.base.lengths import CHUNK_FRAMES
from konkanivani.data.batch import Batch, GlobalBatch, order_for_concurrency, split_batch
from konkanivani.memory.activation_checkpointing import RecomputePolicy
from konkanivani.memory.monitor import MemoryMonitor
from konkanivani.memory.recovery import MicroBatchPlan, OomHistory
from konkanivani.memory.weights.placement import OffloadedWeights
from konkanivani.model.architecture import Architecture
from konkanivani.model.asr import ASROutput, KonkaniVaniASR
from konkanivani.model.blocks import BlockRunner
from konkanivani.model.front_end import FeatureExtractor
from konkanivani.model.losses import LossCounts, LossSums, Objective
from konkanivani.training.optimizer import Optimizer, RateSchedule, non_head_parameters, set_learning_rate


@dataclass(frozen=True)
class ForwardPass:
    """Model and front end on one device, in one precision; `amp_dtype` is None in full precision.

    `recompute` selects recomputation by the length of a batch's longest utterance, in seconds. Sequences longer than
    `chunk_frames` encoder frames or tokens are processed in chunks, with the same result. In training,
    `concurrent_micro_batches` micro-batches run in parallel.
    """

    architecture: Architecture
    model: KonkaniVaniASR
    front_end: FeatureExtractor
    recompute: Callable[[float], BlockRunner]
    monitor: MemoryMonitor
    device: torch.device
    amp_dtype: torch.dtype | None
    objective: Objective
    weights: OffloadedWeights | None = None
    """Where they lie and how they are brought; None: on the device."""
    chunk_frames: int = CHUNK_FRAMES
    concurrent_micro_batches: int = 1

    def __call__(self, batch: Batch) -> tuple[ASROutput, LossSums]:
        """The model's output for a batch, and its summed losses, all on the device."""
        batch = batch.to(self.device)
        features, feature_lengths = self.front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        with self.autocast():
            run_block = self.recompute(batch.longest_seconds)
            run_block = self.weights.around(run_block) if self.weights else run_block
            output = self.model(features, feature_lengths, batch.decoder_tokens, run_block, self.chunk_frames)
            return output, self.model.loss_sums(output, batch, self.objective, self.chunk_frames)

    def plan(self, micro_batches: tuple[Batch, ...]) -> MicroBatchPlan:
        """These micro-batches run as this forward pass runs them; one alone is halved where two are to run."""
        if self.concurrent_micro_batches > 1 and len(micro_batches) == 1 and micro_batches[0].size > 1:
            micro_batches = split_batch(micro_batches[0])
        concurrent_micro_batches = max(1, min(self.concurrent_micro_batches, len(micro_batches)))
        in_order = order_for_concurrency(micro_batches, concurrent_micro_batches)
        return MicroBatchPlan(
            in_order, self.recompute == RecomputePolicy("always"), self.chunk_frames, concurrent_micro_batches
        )

    def with_plan(self, plan: MicroBatchPlan) -> "ForwardPass":
        """The same forward pass with as much recomputed and in as small chunks as the cut says."""
        recompute = RecomputePolicy("always") if plan.recomputes_all else self.recompute
        return dataclasses.replace(self, recompute=recompute, chunk_frames=plan.chunk_frames)

    def refresh_weights(self) -> None:
        """Takes over what the optimizer has made of them, before each window and before anything is recognised."""
        if self.weights:
            self.weights.refresh()

    def decoder_on_device(self) -> AbstractContextManager[None]:
        """While it lasts, recognition waits for no weight that each token needs. Without gradients."""
        return self.weights.at_hand(self.model) if self.weights else nullcontext()

    def autocast(self) -> AbstractContextManager:
        """The precision in which the model runs.

        Without autocast's cache of weights in half precision: a forward pass uses each weight once (a head's
        once a chunk), and the cache would hold all of them until its end, two bytes a parameter, where recomputing
        keeps nothing else.
        """
        enabled = self.amp_dtype is not None
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled, cache_enabled=False)


@dataclass(frozen=True)
class StepGradient:
    """The window's summed losses in nats, a term each, and its gradient's norm, which lies clipped in each `.grad`.

    `scale` is what the losses were multiplied by for the backward pass, and the gradient divided by since; `splits`
    counts how often the window ran out of memory and was begun again.
    """

    loss_sums: tuple[float, ...]
    norm: float
    scale: float
    splits: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether it can be applied."""
        return math.isfinite(self.norm) and math.isfinite(sum(self.loss_sums))


ComputeGradient = Callable[["GradientTask"], StepGradient | None]
"""A way to the gradient of a window: of one process alone, summed over ranks, or of weights that ranks share.

It is in the parameters' `.grad`, unscaled and clipped; None, and none there, if interrupted.
"""


@dataclass(frozen=True)
class StepParts:
    """Everything that a step works with."""

    forward: ForwardPass
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    schedule: OptimizerConfig
    rates: RateSchedule
    seed: int
    oom_history: OomHistory
    compute_gradient: ComputeGradient
    topology: Topology = ALONE
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist
    """The step's only read from the device; a trace, whose tensors hold no numbers, puts zeros in its place."""

    @property
    def total_steps(self) -> int:
        """Return the optimizer steps of the whole run."""
        return self.rates.run_steps

    @property
    def architecture(self) -> Architecture:
        """Which recogniser is trained."""
        return self.forward.architecture

    @property
    def model(self) -> KonkaniVaniASR:
        """The model that is trained."""
        return self.forward.model

    def state_tensors(self) -> list[torch.Tensor]:
        """What stays in memory from step to step: weights, buffers, the front end's, the optimizer's state."""
        front_end = self.forward.front_end
        buffers = list(front_end.buffers()) if isinstance(front_end, torch.nn.Module) else []
        copies = self.forward.weights.copies if self.forward.weights else []
        return [*self.model.parameters(), *self.model.buffers(), *copies, *buffers, *self.optimizer.tensors]

    @contextmanager
    def stage(self, step: int) -> Iterator[None]:
        """While it lasts, no gradient is made for what a step of this number is too early for (--freeze_steps)."""
        is_early = step < (self.architecture.tuning.freeze_steps or 0)
        later = non_head_parameters(self.model) if is_early else []
        try:
            for parameter in later:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in later:
                parameter.requires_grad_(True)

    def recomputing(self, policy: RecomputePolicy) -> "StepParts":
        """The same step under another policy of what is recomputed in the backward pass."""
        return dataclasses.replace(self, forward=dataclasses.replace(self.forward, recompute=policy))


ForwardAndBackward = Callable[[StepParts, Batch, LossCounts], LossSums]
"""Adds one micro-batch's gradient, scaled, to the parameters' `.grad`; its summed losses."""


@dataclass(frozen=True)
class GradientTask:
    """What a gradient is asked of: a window, for the optimizer step of this number."""

    parts: StepParts
    global_batch: GlobalBatch
    step: int
    forward_and_backward: ForwardAndBackward
    is_interrupted: Callable[[], bool] = lambda: False

    @property
    def plan(self) -> MicroBatchPlan:
        """The window's micro-batches as the forward pass runs them."""
        return self.parts.forward.plan(self.global_batch.micro_batches)


def loss_counts(global_batch: GlobalBatch) -> LossCounts:
    """What the losses of the window are divided by, however it is cut and divided."""
    return LossCounts(global_batch.tokens, global_batch.utterances)


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
    global_batch: GlobalBatch,
    step: int,
    is_interrupted: Callable[[], bool] = lambda: False,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepReport | None:
    """Updates the weights from one window, or, interrupted between two micro-batches, changes nothing and returns None.

    All but the update is done inside of `interruptible`: until then no weight has changed. A ResourceError names an
    utterance that does not fit in memory even alone.
    """
    with interruptible(), parts.stage(step):
        gradient = parts.compute_gradient(GradientTask(parts, global_batch, step, forward_and_backward, is_interrupted))
    return None if gradient is None else update(parts, gradient, loss_counts(global_batch), step)


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


def update(parts: StepParts, gradient: StepGradient, counts: LossCounts, step: int) -> StepReport:
    """Applies the window's gradient if it is finite. Allocates nothing (see optimizer.py): never half done."""
    rate = parts.rates.rate(parts.schedule, step)
    if gradient.is_finite:
        begun = parts.rates.delayed_warmup_factor(parts.schedule, parts.architecture.tuning, step)
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
